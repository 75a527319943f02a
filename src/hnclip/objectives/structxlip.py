"""StructXLIP: edge maps of pictures beside captions that are silent on appearance, as wholes and in pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hnclip.losses.contrastive import clip_loss
from hnclip.losses.hard_negative import check_non_negative
from hnclip.losses.partial import chunk_loss, cosine_gap, loss_of_present, mean_of_present, present_in_all
from hnclip.objectives.choice import Choice
from hnclip.objectives.embeddings import Embeddings
from hnclip.objectives.global_term import GlobalTerm, queries
from hnclip.objectives.objective import Moment

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.models.readout import Readout

FLOORS = {"structure": 0.7, "consistency": 0.5, "chunks": 0.4}  # what is left of each weight in the end
FALL = (0.1, 0.8)  # shares of the epochs between which weights fall
LOCAL_TEMPERATURE, LOCAL_MAX = 0.07, 100.0  # of the released code's scale of chunks


@dataclass(frozen=True)
class StructXlip:
    """L = L_global + λ_structure·L_SC + λ_consistency·L_RS + λ_chunks·L_LSC.

        L_SC  = symCE(stopgrad(s)·E·Fᵀ), E of edge maps, F of filtered captions, among the pairs that have both
        L_RS  = mean of 1 − v·e over the pairs that have an edge map
        L_LSC = `chunk_loss` of chunks of captions and crops of edge maps

    The weights fall with the epochs, see `weight_factors`.

    Args:
        global_term: what is injected, on whole pictures and captions; None leaves it out.
        structure_weight, consistency_weight, chunks_weight: before they fall. 0 leaves a term out, and the views and
            parts that only it needs.
        crops: edge crops of each picture, of its best regions.
        misaligned: chunks are spans counted in the filtered caption and read from the whole one.
        official_scale: chunks are scaled by min(s / 0.07, 100), which has no gradient where it is 100, and not by
            stopgrad(s).
        factors: what the weights are multiplied with at this moment.

    Reference:
        StructXLIP; weights and crops are those of its script for DOCCI.
    """

    global_term: GlobalTerm | None
    structure_weight: float = 0.25
    consistency_weight: float = 0.001
    chunks_weight: float = 0.001
    crops: int = 2
    misaligned: bool = False
    official_scale: bool = False
    factors: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(FLOORS, 1.0))

    def __post_init__(self) -> None:
        for name, weight in self._weights.items():
            check_non_negative(f"the weight of StructXLIP's {name}", weight)
        if self.global_term is None and not any(self._weights.values()):
            raise ValueError(
                "StructXLIP needs a term: choose a global loss, or a weight above 0 for structure, consistency or "
                "chunks"
            )
        if self.crops < 1:
            raise ValueError(f"crops must be at least 1, got {self.crops}")

    @property
    def _weights(self) -> dict[str, float]:
        return {
            "structure": self.structure_weight,
            "consistency": self.consistency_weight,
            "chunks": self.chunks_weight,
        }

    @property
    def image_views(self) -> tuple[str, ...]:
        edge = ("edge",) if self.structure_weight or self.consistency_weight else ()
        return ("full", *edge, *(self._crop_views if self.chunks_weight else ()))

    @property
    def text_views(self) -> tuple[str, ...]:
        reads_chunks = self.chunks_weight and not self.misaligned
        return ("caption", "filtered") if self.structure_weight or reads_chunks else ("caption",)

    @property
    def parts(self) -> tuple[str, ...]:
        if not self.chunks_weight:
            return ()
        return ("chunk_spans_official",) if self.misaligned else ("chunk_spans",)

    @property
    def tokens(self) -> bool:
        return self.chunks_weight > 0

    @property
    def _crop_views(self) -> tuple[str, ...]:
        return tuple(f"edge_crop_{number}" for number in range(1, self.crops + 1))

    def at(self, moment: Moment) -> StructXlip:
        return replace(self, factors=weight_factors(moment))

    def __call__(self, embeddings: Embeddings) -> dict[str, Tensor]:
        terms = {} if self.global_term is None else {"global": self.global_term(embeddings)}
        for name, term in (
            ("structure", self._structure),
            ("consistency", self._consistency),
            ("chunks", self._chunks),
        ):
            if weight := self._weights[name]:
                terms[name] = weight * self.factors[name] * term(embeddings)
        return terms

    def _structure(self, embeddings: Embeddings) -> Tensor:
        edge, filtered = embeddings.images["edge"], embeddings.texts["filtered"]
        present = present_in_all(edge.present, filtered.present)  # [N]
        scale = embeddings.scale.detach()
        return loss_of_present(clip_loss, edge.vectors, filtered.vectors, scale, present, **queries(embeddings))

    def _consistency(self, embeddings: Embeddings) -> Tensor:
        full, edge = embeddings.images["full"], embeddings.images["edge"]
        gaps = cosine_gap(full.vectors[embeddings.own], edge.vectors[embeddings.own])  # [R]
        return mean_of_present(gaps, edge.present, embeddings.offset, embeddings.rows)

    def _chunks(self, embeddings: Embeddings) -> Tensor:
        text = embeddings.texts["caption" if self.misaligned else "filtered"]
        if text.tokens is None or text.mask is None:
            raise ValueError("StructXLIP's chunks need what its readout makes of captions")
        views = [embeddings.images[name] for name in self._crop_views]
        crops = torch.stack([view.vectors for view in views], dim=1)  # [N, K, D]
        everyone = crops.new_ones(len(crops), dtype=torch.bool)
        there = [everyone if view.present is None else view.present for view in views]
        mask = torch.stack(there, dim=1)  # [N, K]
        scale = embeddings.scale
        scale = (scale / LOCAL_TEMPERATURE).clamp(max=LOCAL_MAX) if self.official_scale else scale.detach()
        return chunk_loss(text.tokens, crops, text.mask, mask, scale, **queries(embeddings))


def weight_factors(moment: Moment) -> dict[str, float]:
    """What is left of each weight: all of it at first, then along a half cosine down to a floor, where it stays.

    Weights change between epochs and not within. They fall from 10 % to 80 % of the epochs: of 10, which the released
    code is written for, the epochs 0 and 1 have full weights, and 8 and 9 the floors. Shares of the run are this
    package's way to have the same course in runs of other lengths.
    """
    start, stop = FALL
    done = min(1.0, max(0.0, (moment.epoch / moment.epochs - start) / (stop - start)))
    return {name: floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2 for name, floor in FLOORS.items()}


def objective(choice: Choice) -> StructXlip:
    """StructXLIP as configured."""
    weights = choice.weights
    return StructXlip(
        choice.global_term,
        weights["structure"],
        weights["consistency"],
        weights["chunks"],
        misaligned="structxlip_misaligned_spans" in choice.official,
        official_scale="structxlip_local_scale" in choice.official,
    )


def readouts(choice: Choice, model: DualEncoder) -> Mapping[str, Readout]:
    """What pools the chunks of captions; without parameters."""
    from hnclip.models.readouts.pool import PoolChunks

    if not choice.weights["chunks"]:
        return {}
    view = "caption" if "structxlip_misaligned_spans" in choice.official else "filtered"
    return {view: PoolChunks(double_norm="structxlip_double_norm" in choice.official)}
