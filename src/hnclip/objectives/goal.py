"""GOAL: the best region of an image and its sentence as a local pair, and each compared with its part of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from hnclip.core import Embeddings, ViewEmbeddings
from hnclip.losses.contrastive import clip_loss
from hnclip.losses.partial import cosine_gap, loss_of_present, mean_of_present, present_in_all
from hnclip.models.readout import Readout, TowerOutput
from hnclip.objectives.base import Objective, Term, mean_pool, project, shard, span_mask

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder


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

    title: ClassVar[str] = "GOAL"

    @property
    def image_views(self) -> tuple[str, ...]:
        return ("full", "crop") if self.weights["local"] or self.weights["patch"] else ("full",)

    @property
    def text_views(self) -> tuple[str, ...]:
        return ("caption", "sentence") if self.weights["local"] or self.weights["text"] else ("caption",)

    @property
    def parts(self) -> tuple[str, ...]:
        names = {"patch": "region", "text": "sentence_span"}
        ending = "_official" if self.official else ""
        return tuple(name + ending for term, name in names.items() if self.weights[term])

    @property
    def tokens(self) -> bool:
        return bool(self.parts)

    def readouts(self, model: DualEncoder) -> Mapping[str, Readout]:
        pools: dict[str, tuple[str, Readout]] = {"patch": ("full", PoolPatches()), "text": ("caption", PoolSpans())}
        return dict(pool for term, pool in pools.items() if self.weights[term])

    def own_terms(self) -> Mapping[str, Term]:
        return {
            "local": self._local,
            "patch": lambda embeddings: _part_gap(embeddings.images["full"], embeddings.images["crop"], embeddings),
            "text": lambda embeddings: _part_gap(embeddings.texts["caption"], embeddings.texts["sentence"], embeddings),
        }

    def _local(self, embeddings: Embeddings) -> Tensor:
        crop, sentence = embeddings.images["crop"], embeddings.texts["sentence"]
        present = present_in_all(crop.present, sentence.present)  # [N]
        vectors, duplicates = (crop.vectors, sentence.vectors), shard(embeddings, None if self.official else sentence)
        return loss_of_present(clip_loss, *vectors, embeddings.scale, present, **duplicates)


def _part_gap(whole: ViewEmbeddings, part: ViewEmbeddings, embeddings: Embeddings) -> Tensor:
    """Mean squared gap between a part of the whole and the part encoded alone, over the pairs that have both."""
    if whole.tokens is None or whole.mask is None:
        raise ValueError("GOAL's patch and text terms need the output of their readouts")
    gaps = cosine_gap(whole.tokens[embeddings.own, 0], part.vectors[embeddings.own]).square()  # [R]
    present = present_in_all(whole.mask[:, 0], part.present)  # [N]
    return mean_of_present(gaps, present, embeddings.offset, embeddings.rows)


class PoolPatches(Readout):
    """The mean of an image's hidden states over the patches of each part, projected, of length 1.

    Shape:
        parts of the view: [B, K, P] bool; returns [B, K, D] and [B, K], False where a part has no patch.

    Reference:
        GOAL's TSL-image; for CLIP the mean is taken before the final norm.
    """

    def forward(self, tower: TowerOutput) -> tuple[Tensor, Tensor]:
        parts = tower.require_parts()
        if parts.shape[2] != tower.hidden.shape[1]:
            raise ValueError(
                f"parts of images have {parts.shape[2]} patches, the tower has {tower.hidden.shape[1]}: prepare the "
                "data with the grid of this model"
            )
        return project(tower, mean_pool(tower.hidden, parts)), parts.any(2)


class PoolSpans(Readout):
    """The mean of a text's hidden states over the tokens of each span, projected, of length 1.

    Shape:
        parts of the view: [B, K, 2]; returns [B, K, D] and [B, K], False where a span holds no token.

    Reference:
        GOAL's TSL-text; for CLIP the mean is taken before the final norm.
    """

    def forward(self, tower: TowerOutput) -> tuple[Tensor, Tensor]:
        spans = span_mask(tower)  # [B, K, T]
        return project(tower, mean_pool(tower.hidden, spans)), spans.any(2)
