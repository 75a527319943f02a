"""StructXLIP: edge maps of images against captions without words of appearance, as wholes and in chunks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hnclip.core import Embeddings
from hnclip.losses.contrastive import clip_loss
from hnclip.losses.hard_negative import at_least_float32
from hnclip.losses.partial import chunk_loss, cosine_gap, loss_of_present, mean_of_present, present_in_all
from hnclip.models.readout import Readout, TowerOutput
from hnclip.objectives.base import (
    Objective,
    Term,
    TrainProgress,
    duplicate_ids,
    project,
    span_mask,
    tokens_of,
    weighted_sum,
)

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

FLOORS = {"structure": 0.7, "consistency": 0.5, "chunks": 0.4}  # share of each weight at the end
FALL = (0.1, 0.8)  # shares of the epochs between which weights fall
CHUNK_TEMPERATURE, CHUNK_SCALE_MAX = 0.07, 100.0  # of the released code


@dataclass(frozen=True)
class StructXlip(Objective):
    """L = L_global + λ_structure·L_SC + λ_consistency·L_RS + λ_chunks·L_LSC.

        L_SC  = symCE(stopgrad(s)·E·Fᵀ), E of edge maps, F of filtered captions, among the pairs that have both
        L_RS  = mean of 1 − v·e over the pairs that have an edge map
        L_LSC = `chunk_loss` of chunks of captions and crops of edge maps

    The weights fall with the epochs, see `weight_factors`. Official: chunks are spans counted in the filtered caption
    and read from the whole one, and scaled by min(s / 0.07, 100); corrected: read from the filtered caption, scaled by
    stopgrad(s), and equal filtered captions are not negatives of each other.

    Args:
        crops: edge crops of each image, of its best regions (K; 2 in the script for DOCCI, 3 by default in the code).

    Reference:
        StructXLIP; the default weights are those of its script for DOCCI.
    """

    crops: int = 2

    @property
    def image_views(self) -> tuple[str, ...]:
        edge = ("edge",) if self.weights["structure"] or self.weights["consistency"] else ()
        return ("full", *edge, *(self._crop_views if self.weights["chunks"] else ()))

    @property
    def text_views(self) -> tuple[str, ...]:
        reads_filtered = self.weights["structure"] or (self.weights["chunks"] and not self.official)
        return ("caption", "filtered") if reads_filtered else ("caption",)

    @property
    def parts(self) -> tuple[str, ...]:
        if not self.weights["chunks"]:
            return ()
        return ("chunk_spans_official",) if self.official else ("chunk_spans",)

    @property
    def tokens(self) -> bool:
        return self.weights["chunks"] > 0

    @property
    def _crop_views(self) -> tuple[str, ...]:
        return tuple(f"edge_crop_{number}" for number in range(1, self.crops + 1))

    @property
    def _chunk_view(self) -> str:
        return "caption" if self.official else "filtered"

    def at(self, progress: TrainProgress) -> StructXlip:
        return replace(self, factors=weight_factors(progress))

    def readouts(self, model: DualEncoder) -> Mapping[str, Readout]:
        return {self._chunk_view: PoolChunks(double_norm=self.official)} if self.tokens else {}

    def own_terms(self) -> Mapping[str, Term]:
        return {"structure": self._structure, "consistency": _consistency, "chunks": self._chunks}

    def _structure(self, embeddings: Embeddings) -> Tensor:
        edge, filtered = embeddings.images["edge"], embeddings.texts["filtered"]
        present = present_in_all(edge.present, filtered.present)  # [N]
        ids = duplicate_ids(embeddings, None if self.official else filtered)
        return loss_of_present(clip_loss, edge.vectors, filtered.vectors, embeddings.scale.detach(), present, ids)

    def _chunks(self, embeddings: Embeddings) -> Tensor:
        text, scale = embeddings.texts[self._chunk_view], embeddings.scale
        chunks, chunk_mask = tokens_of(text)  # [N, S, D], [N, S]
        views = [embeddings.images[name] for name in self._crop_views]
        crops = torch.stack([view.vectors for view in views], dim=1)  # [N, K, D]
        every = crops.new_ones(len(crops), dtype=torch.bool)  # [N]
        crop_mask = torch.stack([every if view.present is None else view.present for view in views], dim=1)  # [N, K]
        scale = (scale / CHUNK_TEMPERATURE).clamp(max=CHUNK_SCALE_MAX) if self.official else scale.detach()
        ids = duplicate_ids(embeddings, None if self.official else text)
        return chunk_loss(chunks, crops, chunk_mask, crop_mask, scale, ids)


def _consistency(embeddings: Embeddings) -> Tensor:
    full, edge = embeddings.images["full"], embeddings.images["edge"]
    return mean_of_present(cosine_gap(full.vectors, edge.vectors), edge.present)


def weight_factors(progress: TrainProgress) -> dict[str, float]:
    """Factors of the weights: 1 at first, then a half cosine down to a floor.

    Weights change between epochs, from 10 % to 80 % of the epochs: of 10, for which the released code is written,
    epochs 0 and 1 have full weights, 8 and 9 the floors. Shares of the run keep that course in runs of other lengths.
    """
    start, stop = FALL
    done = min(1.0, max(0.0, (progress.epoch / progress.epochs - start) / (stop - start)))
    return {name: floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2 for name, floor in FLOORS.items()}


class PoolChunks(Readout):
    """Hidden states of each span, weighted by the softmax of their lengths (without gradient), projected, of length 1.

    Args:
        double_norm: pool after the final norm of the tower, which the projection applies again, as released; otherwise
            before the norm. The same for a tower without a final norm.

    Shape:
        parts of the view: [B, K, 2]; returns [B, K, D] and [B, K], False where a span holds no token.

    Reference:
        StructXLIP's chunks.
    """

    def __init__(self, double_norm: bool) -> None:
        super().__init__()
        self.double_norm = double_norm

    def forward(self, tower: TowerOutput) -> tuple[Tensor, Tensor]:
        hidden = tower.norm(tower.hidden) if self.double_norm else tower.hidden  # [B, T, W]
        spans = span_mask(tower)  # [B, K, T]
        with torch.no_grad():
            lengths = hidden.to(at_least_float32(hidden)).norm(dim=-1)[:, None]  # [B, 1, T]
            lengths = lengths.masked_fill(~spans, torch.finfo(lengths.dtype).min)  # [B, K, T]
            weights = lengths.softmax(-1) * spans  # [B, K, T]; zeros for an empty span
        return project(tower, weighted_sum(hidden, weights)), spans.any(2)
