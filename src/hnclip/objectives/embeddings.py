"""What an objective sees: the embeddings of a batch, per view, and nothing of the model or of any process.

The encoder writes these, gradient caching and gathering pass them on, objectives read them. They are the second
seam of the house: embeddings in, scalar terms out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ViewEmbeddings:
    """One view of the batch after its tower.

    Shape:
        vectors: [N, D], L2-normalised global vectors.
        tokens: [N, T, D], L2-normalised token vectors (words or patches), or None when nobody asked for them.
        mask: [N, T] bool, True where a token counts (no start, end, pad or class token), or None with `tokens`.
    """

    vectors: Tensor
    tokens: Tensor | None = None
    mask: Tensor | None = None


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
