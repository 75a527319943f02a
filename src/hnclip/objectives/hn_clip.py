"""HN-CLIP's objective: the injected global term and a token term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hnclip.core import Embeddings
from hnclip.losses import token_loss
from hnclip.objectives.base import Objective, Term, shard


@dataclass(frozen=True)
class HNClip(Objective):
    """L = L_global + λ·L_tok on whole images and captions.

    Relations:
        L_HN with a token weight λ = 1 is the paper's objective, InfoNCE with λ = 0 CLIP's.

    Reference:
        HN-CLIP, eq. 3.
    """

    title: ClassVar[str] = "HN-CLIP"

    @property
    def tokens(self) -> bool:
        return self.weights.get("token", 0.0) > 0

    def own_terms(self) -> Mapping[str, Term]:
        return {"token": _token}


def _token(embeddings: Embeddings) -> Tensor:
    image, text = embeddings.images["full"], embeddings.texts["caption"]
    if image.tokens is None or image.mask is None or text.tokens is None or text.mask is None:
        raise ValueError("a token_weight above 0 needs token vectors and masks of both views")
    return token_loss(image.tokens, text.tokens, image.mask, text.mask, embeddings.scale, **shard(embeddings))
