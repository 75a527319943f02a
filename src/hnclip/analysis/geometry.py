"""How alike the captions of a data set are to an encoder: the paper's diagnosis in two numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CaptionGeometry(NamedTuple):
    """Mean cosine of all pairs of captions, and of each caption with its most similar companion."""

    pairwise: float
    hardest: float


@torch.no_grad()
def caption_geometry(text: Tensor, owner: Tensor, *, chunk: int = 1024) -> CaptionGeometry:
    """Similarities between captions of different pictures, never holding more than a tile of them at once.

    Args:
        text: caption embeddings, L2-normalised.
        owner: the picture each caption belongs to; captions of one picture are not each other's companions.
        chunk: side of a tile.

    Shape:
        text [T, D]; owner [T].

    Reference:
        HN-CLIP, section 2.1 and table s1.
    """
    text = text.float()
    pictures, own = owner.unique(return_inverse=True)  # [P], [T]
    if len(pictures) < 2:
        raise ValueError("owner must name at least 2 pictures: a caption needs a companion")
    # The sum over all pairs of captions is |Σ t|², of which those within a picture are taken off again.
    sums = text.new_zeros(len(pictures), text.shape[1], dtype=torch.float64).index_add(0, own, text.double())  # [P, D]
    total = sums.sum(0).square().sum() - sums.square().sum()
    pairs = len(text) ** 2 - own.bincount().square().sum()
    hardest = torch.full_like(text[:, 0], -torch.inf)  # [T]
    starts = range(0, len(text), chunk)
    for rows, columns in ((slice(i, i + chunk), slice(j, j + chunk)) for i in starts for j in starts if i <= j):
        similarity = text[rows] @ text[columns].T  # [C, C], symmetric: one triangle of tiles serves both sides
        similarity.masked_fill_(own[rows, None] == own[None, columns], -torch.inf)
        hardest[rows] = hardest[rows].maximum(similarity.amax(1))
        hardest[columns] = hardest[columns].maximum(similarity.amax(0))
    return CaptionGeometry(pairwise=(total / pairs).item(), hardest=hardest.mean(dtype=torch.float64).item())
