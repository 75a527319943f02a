"""HN-CLIP's objective: the injected global term and a token term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hnclip.core import Embeddings
from hnclip.losses import token_loss
from hnclip.objectives.base import Objective, Term, tokens_of


@dataclass(frozen=True)
class HNClip(Objective):
    """L = L_global + λ·L_tok on whole images and captions.

    Relations:
        L_HN with a token weight λ = 1 is the paper's objective, InfoNCE with λ = 0 CLIP's.

    Reference:
        HN-CLIP, eq. 3.
    """

    @property
    def tokens(self) -> bool:
        return self.weights.get("token", 0.0) > 0

    def own_terms(self) -> Mapping[str, Term]:
        return {"token": _token}


def _token(embeddings: Embeddings) -> Tensor:
    patches, patch_mask = tokens_of(embeddings.images["full"])
    words, word_mask = tokens_of(embeddings.texts["caption"])
    return token_loss(patches, words, patch_mask, word_mask, embeddings.scale, ids=embeddings.ids)
