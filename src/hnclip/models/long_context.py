"""Longer texts for a model trained on 77 tokens: Long-CLIP's knowledge-preserving stretching of its positions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

KEEP, RATIO = 20, 4  # Long-CLIP: the 20 well-trained positions stay, the others are spread four times as wide


def stretch(model: DualEncoder, *, context: int = 248, keep: int = KEEP, ratio: int | None = None) -> DualEncoder:
    """Stretch the positional table of a model in place, so that it takes longer texts, and return the model.

    A model that is already as long, or that has been stretched before, is refused.

    Args:
        context: the new length in tokens.
        keep: leading positions that stay as they are.
        ratio: new positions per later position; default: the smallest that reaches `context`. Rows beyond `context`
            are cut off.
    """
    if model.has_adapters:
        raise ValueError("the model has adapters, which were trained for its positions: stretch it before adding them")
    holder = model.family.positions(model.backbone)
    table = holder.position_embedding.weight
    length = len(table)
    if context <= length:
        raise ValueError(f"the model already takes {length} tokens and cannot be stretched to {context}")
    if ratio is None:
        ratio = math.ceil((context - keep) / max(1, length - keep))
    if (reach := stretched_length(length, keep=keep, ratio=ratio)) < context:
        raise ValueError(f"keep {keep} and ratio {ratio} stretch {length} positions to {reach}, not to {context}")
    stretched = stretch_positions(table.detach(), keep=keep, ratio=ratio)[:context]
    holder.position_embedding = nn.Embedding.from_pretrained(stretched.clone(), freeze=not table.requires_grad)
    holder.register_buffer("position_ids", torch.arange(context, device=table.device)[None], persistent=False)
    model.backbone.config.text_config.max_position_embeddings = context
    model.text_transform = replace(model.text_transform, context=context)
    model.source += f", stretched from {length} to {context} tokens (keep {keep}, ratio {ratio})"
    return model


def stretched_length(length: int, *, keep: int = KEEP, ratio: int = RATIO) -> int:
    """Positions after stretching: 77 become 248."""
    return ratio * length - (ratio - 1) * keep


def stretch_positions(table: Tensor, *, keep: int = KEEP, ratio: int = RATIO, trained: int = 77) -> Tensor:
    """Stretch a text positional table as Long-CLIP does.

    Position p < keep stays; position p ≥ keep is the table read at the fractional index keep + (p − keep)/ratio, by
    linear interpolation, and beyond its last row by extending the last step.

    Args:
        table: the trained positions.
        keep: leading positions that stay as they are.
        ratio: new positions per later position.
        trained: a longer table has already been stretched or trained on long texts, and is refused.

    Shape:
        table: [L, D]; returns [ratio·L − (ratio−1)·keep, D], for 77 rows 248.

    Reference: Long-CLIP (Zhang et al. 2024), section 3.1.
    """
    length = len(table)
    if length > trained:
        raise ValueError(
            f"a table of {length} positions, more than the {trained} of an unstretched model, would be corrupted by "
            "stretching it again: use the model as it is, or pass `trained`"
        )
    if not 0 <= keep < length - 1:
        raise ValueError(f"keep must be between 0 and {length - 2} for a table of {length} positions, got {keep}")
    position = torch.arange(stretched_length(length, keep=keep, ratio=ratio), device=table.device)
    step = torch.clamp(position - keep, min=0)
    lower = torch.where(position < keep, position, keep + step // ratio)  # [L']
    fraction = (step % ratio).to(table.dtype)[:, None] / ratio  # [L', 1]
    upper = torch.clamp(lower + 1, max=length - 1)
    before = torch.where(lower == length - 1, lower - 1, lower)  # the last row has no successor: extend the last step
    slope = table[upper] - table[before]  # [L', D]
    return table[lower] + fraction * slope
