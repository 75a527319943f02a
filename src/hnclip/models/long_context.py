"""Longer captions for a model trained on 77 tokens: knowledge-preserving stretching of its positional table."""

from __future__ import annotations

import torch
from torch import Tensor

KEEP, RATIO = 20, 4  # Long-CLIP's choice: 20 well-trained positions stay, the others are spread four times as wide


def stretched_length(length: int, *, keep: int = KEEP, ratio: int = RATIO) -> int:
    """Positions after stretching: 77 become 248."""
    return ratio * length - (ratio - 1) * keep


def stretch_positions(table: Tensor, *, keep: int = KEEP, ratio: int = RATIO, trained: int = 77) -> Tensor:
    """Stretch a text positional table as Long-CLIP does.

    Position p < keep stays; position p ≥ keep is the table read at the fractional index keep + (p − keep)/ratio, by
    linear interpolation, and beyond its last row by extending the last step.

    Args:
        table: the trained positions.
        keep: leading positions left as they are.
        ratio: how many new positions each remaining step becomes.
        trained: a table longer than this is one that has been stretched or trained long already; doing it twice
            corrupts the model, so it is refused.

    Shape:
        table: [L, D]; returns [ratio·L − (ratio−1)·keep, D], for 77 rows 248.

    Reference: Long-CLIP (Zhang et al. 2024), section 3.1.
    """
    if table.ndim != 2:
        raise ValueError(f"table must be [positions, width], got shape {tuple(table.shape)}")
    length = table.shape[0]
    if length > trained:
        raise ValueError(
            f"table has {length} positions, more than the {trained} of an unstretched model: stretching it again "
            "would corrupt what they learnt. Use the model as it is, or pass `trained` if it really is unstretched."
        )
    if not 0 <= keep < length - 1:
        raise ValueError(f"keep must be between 0 and {length - 2} for a table of {length} positions, got {keep}")
    if ratio < 1:
        raise ValueError(f"ratio must be at least 1, got {ratio}")
    position = torch.arange(stretched_length(length, keep=keep, ratio=ratio), device=table.device)
    step = torch.clamp(position - keep, min=0)
    lower = torch.where(position < keep, position, keep + step // ratio)  # [L']
    fraction = (step % ratio).to(table.dtype)[:, None] / ratio  # [L', 1]
    upper = torch.clamp(lower + 1, max=length - 1)
    before = torch.where(lower == length - 1, lower - 1, lower)  # the last row has no successor: extend its step
    slope = table[upper] - table[before]  # [L', D]
    return table[lower] + fraction * slope
