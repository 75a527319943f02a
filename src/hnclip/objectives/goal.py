"""GOAL: the best region of an image and its sentence as a local pair, and each compared with its part of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hnclip.core import Embeddings, ViewEmbeddings
from hnclip.losses.contrastive import clip_loss
from hnclip.losses.partial import cosine_gap, loss_of_present, mean_of_present, present_in_all
from hnclip.models.readout import Readout, TowerOutput
from hnclip.objectives.base import Objective, Term, duplicate_ids, project, span_mask, tokens_of, weighted_sum

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder


POOLED = {"patch": ("full", "region"), "text": ("caption", "sentence_span")}  # by term: view and part that it pools


@dataclass(frozen=True)
class Goal(Objective):
    """L = L_global + λ_local·L_local + λ_patch·L_patch + λ_text·L_text.

        L_local = symCE(s·V_crop·T_sentenceᵀ), among the pairs that have a region
        L_patch = mean of (p·v_crop − 1)², p the hidden states of the whole image pooled over the region's patches
        L_text  = mean of (q·t_sentence − 1)², q the hidden states of the whole caption pooled over the sentence

    No gradient is stopped. Corrected: equal sentences are not negatives of each other. Pairs without a region, and
    those whose region or sentence the model does not see, count in the terms for which they have what is needed.

    Reference:
        GOAL: local image-sentence matching (LISM) and token similarity-based learning (TSL).
    """

    @property
    def image_views(self) -> tuple[str, ...]:
        return ("full", "crop") if self.weights["local"] or self.weights["patch"] else ("full",)

    @property
    def text_views(self) -> tuple[str, ...]:
        return ("caption", "sentence") if self.weights["local"] or self.weights["text"] else ("caption",)

    @property
    def parts(self) -> tuple[str, ...]:
        ending = "_official" if self.official else ""
        return tuple(part + ending for term, (_, part) in POOLED.items() if self.weights[term])

    @property
    def tokens(self) -> bool:
        return bool(self.parts)

    def readouts(self, model: DualEncoder) -> Mapping[str, Readout]:
        return {view: PoolParts(text=term == "text") for term, (view, _) in POOLED.items() if self.weights[term]}

    def own_terms(self) -> Mapping[str, Term]:
        return {
            "local": self._local,
            "patch": lambda embeddings: _part_gap(embeddings.images["full"], embeddings.images["crop"]),
            "text": lambda embeddings: _part_gap(embeddings.texts["caption"], embeddings.texts["sentence"]),
        }

    def _local(self, embeddings: Embeddings) -> Tensor:
        crop, sentence = embeddings.images["crop"], embeddings.texts["sentence"]
        present = present_in_all(crop.present, sentence.present)  # [N]
        ids = duplicate_ids(embeddings, None if self.official else sentence)
        return loss_of_present(clip_loss, crop.vectors, sentence.vectors, embeddings.scale, present, ids)


def _part_gap(whole: ViewEmbeddings, part: ViewEmbeddings) -> Tensor:
    """Mean squared gap between a part of the whole and the part encoded alone, over the pairs that have both."""
    tokens, mask = tokens_of(whole)  # [N, 1, D], [N, 1]
    gaps = cosine_gap(tokens[:, 0], part.vectors).square()  # [N]
    return mean_of_present(gaps, present_in_all(mask[:, 0], part.present))


class PoolParts(Readout):
    """The mean of hidden states over the patches or tokens of each part of the view, projected, of length 1.

    Shape:
        parts of the view: [B, K, P] bool for images, [B, K, 2] for texts; returns [B, K, D] and [B, K], False where a
        part has no patch or token.

    Reference:
        GOAL's TSL; for CLIP the mean is taken before the final norm.
    """

    def __init__(self, *, text: bool) -> None:
        super().__init__()
        self.text = text

    def forward(self, tower: TowerOutput) -> tuple[Tensor, Tensor]:
        parts = span_mask(tower) if self.text else tower.require_parts()  # [B, K, T] bool
        mean = weighted_sum(tower.hidden, parts) / parts.sum(2, keepdim=True).clamp(min=1)  # [B, K, W], 0 if empty
        return project(tower, mean), parts.any(2)
