"""HN-CLIP's objective: a global term that is handed in, and a token term beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hnclip.losses import token_loss
from hnclip.objectives.embeddings import Embeddings
from hnclip.objectives.global_term import GlobalTerm, queries
from hnclip.objectives.objective import Moment


@dataclass(frozen=True)
class HNClip:
    """L = L_global + λ·L_tok on whole pictures and captions.

    Args:
        global_loss: one of `GLOBAL_LOSSES`, with its own parameters bound by `functools.partial`.
        token_weight: λ. 0 leaves the term out and asks for no token vectors.
        frozen_margin: hand the batch's `margin_text` to the global loss, which builds Ḡ from it.

    Relations:
        `hard_negative_loss` with λ = 1 is the paper's objective; `clip_loss` with λ = 0 is CLIP's. The token
        term does not depend on the global loss.

    Reference:
        HN-CLIP, eq. 3.
    """

    image_views: ClassVar[tuple[str, ...]] = ("full",)
    text_views: ClassVar[tuple[str, ...]] = ("caption",)
    parts: ClassVar[tuple[str, ...]] = ()

    global_loss: Callable[..., Tensor]
    token_weight: float = 1.0
    frozen_margin: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.token_weight) and self.token_weight >= 0):
            raise ValueError(f"token_weight must be a finite number of at least 0, got {self.token_weight}")

    @property
    def tokens(self) -> bool:
        return self.token_weight > 0

    def at(self, moment: Moment) -> HNClip:
        return self

    def __call__(self, embeddings: Embeddings) -> dict[str, Tensor]:
        image, text = embeddings.images["full"], embeddings.texts["caption"]
        terms = {"global": GlobalTerm(self.global_loss, frozen=self.frozen_margin)(embeddings)}
        if self.tokens:
            if image.tokens is None or image.mask is None or text.tokens is None or text.mask is None:
                raise ValueError("a token_weight above 0 needs token vectors and masks of both views")
            term = token_loss(image.tokens, text.tokens, image.mask, text.mask, embeddings.scale, **queries(embeddings))
            terms["token"] = self.token_weight * term
        return terms
