"""Long-CLIP's objective: whole captions by the injected global term, short ones by the principal part of the images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hnclip.core import Embeddings
from hnclip.losses.contrastive import smoothed_loss
from hnclip.losses.partial import principal_part
from hnclip.objectives.base import Objective, Term, duplicate_ids

DIRECTIONS = 32  # principal directions that a short caption is compared with


@dataclass(frozen=True)
class LongClip(Objective):
    """L = L_global(image, caption) + w·L_short, L_short the smoothed InfoNCE of PCA_32(images) and short captions.

    The principal directions are those of all pairs of the batch. The released code computes them in each process, so
    that it compares images across processes that were reduced in different ways. Corrected: equal short captions are
    not negatives of each other.

    Relations:
        With `smoothed_loss` and w = 1 this is the objective of the released trainer; with `clip_loss` and w = 0 plain
        fine-tuning, the row that HN-CLIP's tables call Long-CLIP.

    Reference:
        Long-CLIP, Zhang et al. 2024.
    """

    @property
    def text_views(self) -> tuple[str, ...]:
        return ("caption", "short") if self.weights["short"] > 0 else ("caption",)

    def own_terms(self) -> Mapping[str, Term]:
        return {"short": self._short}

    def _short(self, embeddings: Embeddings) -> Tensor:
        images = principal_part(embeddings.images["full"].vectors, DIRECTIONS)  # [N, D]
        short = embeddings.texts["short"]
        ids = duplicate_ids(embeddings, None if self.official else short)
        return smoothed_loss(images, short.vectors, embeddings.scale, ids=ids)


def principal_note(pairs: int, count: int = DIRECTIONS) -> str | None:
    """A note for losses over so few pairs that their principal part is everything; None otherwise."""
    if pairs > count + 1:
        return None
    return (
        f"PCA_{count} of {pairs} images changes nothing: Long-CLIP's short term is plain InfoNCE with short captions. "
        f"It needs more than {count + 1} pairs in a loss: larger micro-batches, or negatives from the whole batch"
    )
