"""Types that several packages share: the embeddings of a batch, written by the encoder and read by objectives.

Gradient caching and gathering pass them on; an objective sees embeddings and returns scalar terms.
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
        tokens: [N, T, D], L2-normalised token vectors (words or patches), or the output of a method's readout for this
            view (`hnclip.models.readout`), or None if the objective does not read tokens.
        mask: [N, T] bool, True where a token counts (no start, end, padding or class token); None without `tokens`.
        present: [N] bool, False where a pair lacks this view and its row is filler; None if all pairs have it.
        ids: [N] integers, equal for equal texts of this view; None for images, and for captions, whose ids are those
            of the pairs.
    """

    vectors: Tensor
    tokens: Tensor | None = None
    mask: Tensor | None = None
    present: Tensor | None = None
    ids: Tensor | None = None


@dataclass(frozen=True)
class Embeddings:
    """All views of N pairs. Row i of every view belongs to pair i.

    With several processes N counts the pairs of all of them, and `offset`, `rows` select the queries of this process;
    an objective passes both on to its losses and knows no rank.

    Shape:
        scale: scalar tensor, the inverse temperature s (already exponentiated), with its gradient.
        ids: [N, K] integers, or None. Two pairs that agree in any column are duplicates (column 0: image, column 1:
            caption) and not negatives of each other.
        margin_text: [N, D'] embeddings that Ḡ is computed from instead of the live captions (frozen-encoder ablation).
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
        """The queries of this process among the N pairs."""
        return slice(self.offset, None if self.rows is None else self.offset + self.rows)


def join_embeddings(parts: Sequence[Embeddings]) -> Embeddings:
    """Consecutive parts of a batch as one, with gradient. The scale is that of the first part: it counts once."""
    first = parts[0]
    return Embeddings(
        images={name: _join_views([part.images[name] for part in parts]) for name in first.images},
        texts={name: _join_views([part.texts[name] for part in parts]) for name in first.texts},
        scale=first.scale,
        ids=_join([part.ids for part in parts]),
        margin_text=_join([part.margin_text for part in parts]),
    )


def pad_tokens(view: ViewEmbeddings, length: int) -> ViewEmbeddings:
    """The view padded to `length` token places, which are masked."""
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
        _join([part.ids for part in padded]),  # [N]
    )


def _join(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None
