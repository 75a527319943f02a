"""What a batch of vectors has in common with its few main directions: the coarse side of Long-CLIP's matching."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hnclip.losses.hard_negative import at_least_float32, check_embeddings, product


def principal_part(vectors: Tensor, count: int = 32) -> Tensor:
    """Vectors reduced to their mean and their first `count` principal directions: PCA forth and back.

    X' = (X − μ)·V·Vᵀ + μ, where μ is the mean of the rows and V the first right singular vectors of X − μ. The result
    is not normalised again. Gradients pass through μ and V. Computed in at least float32, also under autocast.

    Args:
        count: principal directions that are kept, at least 1.

    Shape:
        vectors [N, D]; returns [N, D].

    Relations:
        N vectors around their mean have at most N − 1 directions, and never more than D: if these are not more than
        `count`, nothing is lost and the vectors come back as they are.

    Reference:
        Primary component matching of Long-CLIP, Zhang et al. 2024.
    """
    check_embeddings("vectors", vectors, 2)
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if min(len(vectors) - 1, vectors.shape[1]) <= count:
        return vectors
    wide = vectors.to(at_least_float32(vectors))
    mean = wide.mean(0)  # [D]
    return _Reduced.apply(wide - mean, count) + mean


class _Reduced(torch.autograd.Function):
    """The nearest matrix of rank k. With X = Σ σ_m u_m v_mᵀ it is the sum of the first k terms.

    Its derivative mixes each kept direction i with each dropped one j, and with no other: in the bases u, v a change H
    of X changes the result by (σ_i²·H_ij + σ_i·σ_j·H_ji) / (σ_i² − σ_j²) at ij and by its mirror image at ji, by H
    among the kept, by 0 among the dropped. This map is its own adjoint, so it is the gradient too. Autograd through
    an SVD divides by the gaps between all singular values instead, so equal ones among the kept make it NaN.

    Shape:
        matrix [N, D]; returns [N, D].
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, count: int) -> Tensor:
        # Decomposing NaN is an error that says nothing; what is not finite shows in the product below.
        finite = matrix.nan_to_num(0.0, 0.0, 0.0)
        left, values, right = torch.linalg.svd(finite, full_matrices=False)  # [N, M], [M], [M, D]
        ctx.save_for_backward(left, values, right)
        ctx.count = count
        kept = right[:count]  # [k, D]
        return product(product(matrix, kept), kept.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, values, right = ctx.saved_tensors
        k = ctx.count
        left_kept, left_dropped = left[:, :k].T, left[:, k:].T  # [k, N], [M−k, N]
        right_kept, right_dropped = right[:k], right[k:]  # [k, D], [M−k, D]
        kept, dropped = values[:k, None], values[k:]  # [k, 1], [M−k]

        # A gap that is rounding alone says nothing: both values are 0, or the choice of k cuts through equals.
        gap = kept - dropped  # [k, M−k]
        real = gap > torch.finfo(values.dtype).eps * max(len(left), right.shape[1]) * values[0]
        inverse = real / torch.where(real, gap * (kept + dropped), 1)  # [k, M−k]
        alike, crossed = dropped.square() * inverse, kept * dropped * inverse  # [k, M−k] each

        by_left, by_right = product(left_kept, grad.T), product(grad, right_kept)  # [k, D], [N, k]
        ahead = product(by_left, right_dropped)  # [k, M−k], grad at kept i, dropped j
        back = product(left_dropped, by_right.T).T  # [k, M−k], grad at dropped j, kept i

        rows = by_left + product(alike * ahead + crossed * back, right_dropped.T)  # [k, D]
        columns = by_right - product(left_kept.T, product(by_left, right_kept).T)  # [N, k]
        columns = columns + product(left_dropped.T, alike * back + crossed * ahead)  # [N, k]
        return product(left_kept.T, rows.T) + product(columns, right_kept.T), None
