"""GOAL: the best region of a picture and its sentence, beside the whole, and each inside the other's whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hnclip.losses.contrastive import clip_loss
from hnclip.losses.hard_negative import check_non_negative
from hnclip.losses.partial import cosine_gap, loss_of_present, mean_of_present, present_in_all
from hnclip.objectives.choice import Choice
from hnclip.objectives.embeddings import Embeddings, ViewEmbeddings
from hnclip.objectives.global_term import GlobalTerm, queries
from hnclip.objectives.objective import Moment

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.models.readout import Readout

# By the switches goal_patch_size and goal_box_scale that stand at official.
REGION_PARTS = {
    frozenset[str](): "region",
    frozenset({"goal_patch_size"}): "region_official_patch",
    frozenset({"goal_box_scale"}): "region_official_scale",
    frozenset({"goal_patch_size", "goal_box_scale"}): "region_official",
}


@dataclass(frozen=True)
class Goal:
    """L = L_global + λ_local·L_local + λ_patch·L_patch + λ_text·L_text.

        L_local = symCE(s·V_crop·T_sentenceᵀ), among the pairs that have a region
        L_patch = mean of (p·v_crop − 1)², p the whole picture's hidden states pooled over the region's patches
        L_text  = mean of (q·t_sentence − 1)², q the whole caption's pooled over the sentence's tokens

    No gradient is stopped anywhere. Pairs without a region, and those whose region or sentence the model does not see,
    count in the terms that they can.

    Args:
        global_term: what is injected, on whole pictures and captions; None leaves it out.
        local_weight, patch_weight, text_weight: 0 leaves a term out, and the views and parts that only it needs.
        region_part, span_part: names of the parts that p and q are pooled over (`hnclip.data.views.parts`).

    Reference:
        GOAL: local image-sentence matching (LISM) and token similarity-based learning (TSL).
    """

    global_term: GlobalTerm | None
    local_weight: float = 0.5
    patch_weight: float = 1.0
    text_weight: float = 1.0
    region_part: str = "region"
    span_part: str = "sentence_span"

    def __post_init__(self) -> None:
        weights = {"local": self.local_weight, "patch": self.patch_weight, "text": self.text_weight}
        for name, weight in weights.items():
            check_non_negative(f"the weight of GOAL's {name}", weight)
        if self.global_term is None and not any(weights.values()):
            raise ValueError("GOAL needs a term: choose a global loss, or a weight above 0 for local, patch or text")

    @property
    def image_views(self) -> tuple[str, ...]:
        return ("full", "crop") if self.local_weight or self.patch_weight else ("full",)

    @property
    def text_views(self) -> tuple[str, ...]:
        return ("caption", "sentence") if self.local_weight or self.text_weight else ("caption",)

    @property
    def parts(self) -> tuple[str, ...]:
        wanted = {self.region_part: self.patch_weight, self.span_part: self.text_weight}
        return tuple(name for name, weight in wanted.items() if weight)

    @property
    def tokens(self) -> bool:
        return bool(self.parts)

    def at(self, moment: Moment) -> Goal:
        return self

    def __call__(self, embeddings: Embeddings) -> dict[str, Tensor]:
        terms = {} if self.global_term is None else {"global": self.global_term(embeddings)}
        images, texts = embeddings.images, embeddings.texts
        if self.local_weight:
            crop, sentence = images["crop"], texts["sentence"]
            present = present_in_all(crop.present, sentence.present)  # [N]
            terms["local"] = self.local_weight * loss_of_present(
                clip_loss, crop.vectors, sentence.vectors, embeddings.scale, present, **queries(embeddings)
            )
        if self.patch_weight:
            terms["patch"] = self.patch_weight * _inside(images["full"], images["crop"], embeddings)
        if self.text_weight:
            terms["text"] = self.text_weight * _inside(texts["caption"], texts["sentence"], embeddings)
        return terms


def _inside(whole: ViewEmbeddings, part: ViewEmbeddings, embeddings: Embeddings) -> Tensor:
    """How far a part of the whole is from the part by itself, over the pairs that have both."""
    if whole.tokens is None or whole.mask is None:
        raise ValueError("GOAL's patch and text terms need what readouts make of whole pictures and captions")
    gaps = cosine_gap(whole.tokens[embeddings.own, 0], part.vectors[embeddings.own]).square()  # [R]
    present = present_in_all(whole.mask[:, 0], part.present)  # [N]
    return mean_of_present(gaps, present, embeddings.offset, embeddings.rows)


def objective(choice: Choice) -> Goal:
    """GOAL as configured."""
    weights = choice.weights
    return Goal(
        choice.global_term,
        weights["local"],
        weights["patch"],
        weights["text"],
        region_part=REGION_PARTS[choice.official & {"goal_patch_size", "goal_box_scale"}],
        span_part="sentence_span_official" if "goal_late_span" in choice.official else "sentence_span",
    )


def readouts(choice: Choice, model: DualEncoder) -> Mapping[str, Readout]:
    """What pools regions of whole pictures and sentences of whole captions; without parameters."""
    from hnclip.models.readouts.pool import PoolPatches, PoolSpan

    found = dict[str, "Readout"]()
    if choice.weights["patch"]:
        found["full"] = PoolPatches()
    if choice.weights["text"]:
        found["caption"] = PoolSpan()
    return found
