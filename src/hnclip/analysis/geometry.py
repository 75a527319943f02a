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
def caption_geometry(text: Tensor, owner: Tensor, *, chunk: int = 2048) -> CaptionGeometry:
    """Similarities between captions of different pictures, never holding more than a chunk of rows at once.

    Args:
        text: caption embeddings, L2-normalised.
        owner: the picture each caption belongs to; captions of one picture are not each other's companions.

    Shape:
        text [T, D]; owner [T].

    Reference:
        HN-CLIP, section 2.1 and table s1.
    """
    if owner.unique().numel() < 2:
        raise ValueError("owner must name at least 2 pictures: a caption needs a companion")
    total, pairs = 0.0, 0
    hardest = []
    for start in range(0, len(text), chunk):
        rows = slice(start, start + chunk)
        similarity = text[rows].float() @ text.float().T  # [C, T]
        own = owner[rows, None] == owner[None]  # [C, T]
        total += similarity.masked_fill(own, 0.0).sum(dtype=torch.float64).item()
        pairs += int((~own).sum())
        hardest.append(similarity.masked_fill(own, -torch.inf).amax(1))  # [C]
    return CaptionGeometry(pairwise=total / pairs, hardest=torch.cat(hardest).mean(dtype=torch.float64).item())
