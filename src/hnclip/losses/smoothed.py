"""InfoNCE with label smoothing, the loss that Long-CLIP and FineLIP's baseline are trained with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hnclip.losses.hard_negative import MASK_ELEMENTS, check_pairs, product, same_pairs
from hnclip.losses.infonce import clip_loss


def smoothed_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    *,
    smoothing: float = 0.1,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """Symmetric cross-entropy over s·S towards smoothed labels: 1 − smoothing for the positive, and smoothing spread
    evenly over the positive and all negatives.

    With logits L_ij = s·S_ij that is InfoNCE + smoothing·(L_ii − mean_j L_ij), and a mean of logits is the logit of a
    mean vector: so the smoothing costs no matrix of its own, and the loss as little memory as InfoNCE.

    Args:
        smoothing: share of the label that is spread, in [0, 1).
        image, text, scale, offset, rows, ids, check_values: as in `hard_negative_loss`. Pairs that ids exclude get
            neither a logit nor a share of the label.

    Shape:
        image, text [N, D]; scale scalar; ids [N] or [N, K]; returns a scalar.

    Relations:
        smoothing = 0 is InfoNCE. Its minimum is not 0 but the entropy of the smoothed labels, and is reached at
        finite logits.

    Reference:
        Long-CLIP, Zhang et al. 2024; label smoothing: Szegedy et al. 2016.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be at least 0 and less than 1, got {smoothing}")
    pairs = check_pairs(image, text, scale, offset=offset, rows=rows, ids=ids, check_values=check_values)
    infonce = clip_loss(
        pairs.image, pairs.text, pairs.scale, offset=offset, rows=pairs.rows, ids=pairs.ids, check_values=False
    )
    if smoothing == 0:
        return infonce
    own_image, own_text = pairs.image[pairs.local], pairs.text[pairs.local]  # [R, D] each
    if pairs.ids is None:
        mean_text, mean_image = pairs.text.mean(0), pairs.image.mean(0)  # [D] each
    else:
        both = torch.cat([pairs.text, pairs.image], 1)  # [N, 2·D]
        mean_text, mean_image = _KeptMeans.apply(both, pairs.ids, offset, pairs.rows).chunk(2, 1)  # [R, D] each
    image_to_text = own_image * (own_text - mean_text)  # [R, D]
    text_to_image = own_text * (own_image - mean_image)  # [R, D]
    excess = (image_to_text + text_to_image).sum(1).mean() / 2
    return infonce + smoothing * pairs.scale * excess


class _KeptMeans(torch.autograd.Function):
    """For every query the mean of the vectors of all pairs that are not excluded for it, its own among them. The masks
    exist a few rows at a time, forward and backward.

    Shape:
        vectors [N, D]; ids [N, K]; returns [R, D].
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, ids: Tensor, offset: int, rows: int) -> Tensor:
        means = vectors.new_empty(rows, vectors.shape[1])  # [R, D]
        for part, weights in _weights(vectors, ids, offset, rows):
            means[part] = product(weights, vectors.T)
        ctx.save_for_backward(vectors, ids)
        ctx.offset = offset
        return means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        vectors, ids = ctx.saved_tensors
        total = torch.zeros_like(vectors)  # [N, D]
        for part, weights in _weights(vectors, ids, ctx.offset, len(grad)):
            total += product(weights.T, grad[part].T)
        return total, None, None, None


def _weights(vectors: Tensor, ids: Tensor, offset: int, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the R queries, and what every pair counts in the mean of each: [C, N]."""
    block = max(1, MASK_ELEMENTS // len(vectors))
    for start in range(0, rows, block):
        part = slice(start, min(start + block, rows))
        kept = ~same_pairs(ids, offset + part.start, part.stop - part.start)  # [C, N]
        yield part, kept.to(vectors.dtype) / kept.sum(1, keepdim=True)
