"""Long-CLIP's objective: whole captions by the injected global term, short ones by the main directions of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from hnclip.losses.contrastive import smoothed_loss
from hnclip.losses.hard_negative import check_non_negative
from hnclip.losses.partial import principal_part
from hnclip.objectives.choice import Choice
from hnclip.objectives.embeddings import Embeddings
from hnclip.objectives.global_term import GlobalTerm, queries
from hnclip.objectives.objective import Moment

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.models.readout import Readout

DIRECTIONS = 32  # principal directions that a short caption is compared with


@dataclass(frozen=True)
class LongClip:
    """L = L_global(picture, caption) + w·L_short, where L_short is the smoothed InfoNCE of PCA_32(pictures) and short
    captions.

    The principal directions are those of all pairs of the batch, whichever process they belong to. The released code
    finds them in each process, so that its pictures are compared across processes though reduced in different ways.

    Args:
        global_term: the term on whole captions; None leaves it out.
        short_weight: w. 0 leaves the term out and asks for no short captions.

    Relations:
        With `smoothed_loss` and w = 1 this is the released trainer's objective; with `clip_loss` and w = 0 plain
        fine-tuning, the row that HN-CLIP's tables call Long-CLIP. The short term does not depend on the global one.

    Reference:
        Long-CLIP, Zhang et al. 2024.
    """

    image_views: ClassVar[tuple[str, ...]] = ("full",)
    parts: ClassVar[tuple[str, ...]] = ()
    tokens: ClassVar[bool] = False

    global_term: GlobalTerm | None
    short_weight: float = 1.0

    def __post_init__(self) -> None:
        check_non_negative("short_weight", self.short_weight)
        if self.global_term is None and self.short_weight == 0:
            raise ValueError("Long-CLIP needs a term: choose a global loss, or a weight above 0 for 'short'")

    @property
    def text_views(self) -> tuple[str, ...]:
        return ("caption", "short") if self.short_weight > 0 else ("caption",)

    def at(self, moment: Moment) -> LongClip:
        return self

    def __call__(self, embeddings: Embeddings) -> dict[str, Tensor]:
        terms = {}
        if self.global_term is not None:
            terms["global"] = self.global_term(embeddings)
        if self.short_weight > 0:
            pictures = principal_part(embeddings.images["full"].vectors, DIRECTIONS)  # [N, D]
            short = embeddings.texts["short"].vectors  # [N, D]
            term = smoothed_loss(pictures, short, embeddings.scale, **queries(embeddings))
            terms["short"] = self.short_weight * term
        return terms


def principal_note(pairs: int, count: int = DIRECTIONS) -> str | None:
    """What is to be said of a loss over `pairs` pairs: so few have no more directions than are kept."""
    if pairs > count + 1:
        return None
    return (
        f"PCA_{count} of {pairs} pictures keeps all of them as they are: Long-CLIP's short term is plain InfoNCE with "
        f"short captions. It needs more than {count + 1} pairs in a loss: larger micro-batches, or negatives from the "
        "whole batch"
    )


def objective(choice: Choice) -> LongClip:
    """Long-CLIP as configured."""
    return LongClip(choice.global_term, choice.weights["short"])


def readouts(choice: Choice, model: DualEncoder) -> Mapping[str, Readout]:
    """None: Long-CLIP adds no modules."""
    return {}
