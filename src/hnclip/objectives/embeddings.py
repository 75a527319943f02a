"""What an objective sees: the embeddings of a batch, per view, and nothing of the model or of any process.

The encoder writes these, gradient caching and gathering pass them on, objectives read them. They are the second
seam of the house: embeddings in, scalar terms out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ViewEmbeddings:
    """One view of the batch after its tower.

    Shape:
        vectors: [N, D], L2-normalised global vectors.
        tokens: [N, T, D], L2-normalised token vectors (words or patches), or whatever a framework's readout of this
            view put in their place (`hnclip.models.readout`), or None when nobody asked for them.
        mask: [N, T] bool, True where a token counts (no start, end, pad or class token), or None with `tokens`.
        present: [N] bool, False where a pair has no such view and its row is filler; None where all pairs have it.
    """

    vectors: Tensor
    tokens: Tensor | None = None
    mask: Tensor | None = None
    present: Tensor | None = None


@dataclass(frozen=True)
class Embeddings:
    """All views of N pairs. Row i of every view belongs to pair i.

    With several processes N counts the pairs of all of them, and `offset`, `rows` say which are this process's own
    queries; an objective hands both on to its losses and never asks about ranks.

    Shape:
        scale: scalar tensor, the inverse temperature s (already exponentiated), with its gradient.
        ids: [N, K] integers, or None. Two pairs that agree in any column are the same thing (column 0: the image,
            column 1: the caption) and never each other's negatives.
        margin_text: [N, D'] vectors that Ḡ is built from instead of the live captions (frozen-encoder ablation).
    """

    images: Mapping[str, ViewEmbeddings]
    texts: Mapping[str, ViewEmbeddings]
    scale: Tensor
    ids: Tensor | None = None
    margin_text: Tensor | None = None
    offset: int = 0
    rows: int | None = None

    @property
    def own(self) -> slice:
        """This process's queries among the N pairs."""
        return slice(self.offset, None if self.rows is None else self.offset + self.rows)


def join_embeddings(parts: Sequence[Embeddings]) -> Embeddings:
    """Consecutive parts of a batch as one, with gradient. The scale is the first part's: it counts once."""
    first = parts[0]
    return Embeddings(
        images={name: _join_views([part.images[name] for part in parts]) for name in first.images},
        texts={name: _join_views([part.texts[name] for part in parts]) for name in first.texts},
        scale=first.scale,
        ids=_join([part.ids for part in parts]),
        margin_text=_join([part.margin_text for part in parts]),
    )


def pad_tokens(view: ViewEmbeddings, length: int) -> ViewEmbeddings:
    """The view with `length` token places; what is added is masked out."""
    if view.tokens is None or view.mask is None or view.tokens.shape[1] == length:
        return view
    missing = length - view.tokens.shape[1]
    tokens, mask = F.pad(view.tokens, (0, 0, 0, missing)), F.pad(view.mask, (0, missing))  # [N, T, D], [N, T]
    return replace(view, tokens=tokens, mask=mask)


def _join_views(parts: Sequence[ViewEmbeddings]) -> ViewEmbeddings:
    length = max(0 if part.tokens is None else part.tokens.shape[1] for part in parts)
    padded = [pad_tokens(part, length) for part in parts]
    return ViewEmbeddings(
        torch.cat([part.vectors for part in padded]),  # [N, D]
        _join([part.tokens for part in padded]),  # [N, T, D]
        _join([part.mask for part in padded]),  # [N, T]
        _join([part.present for part in padded]),  # [N]
    )


def _join(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None
