"""How far two vectors of the same pair are apart, pair by pair and without negatives."""

from __future__ import annotations

from torch import Tensor

from hnclip.losses.hard_negative import at_least_float32


def cosine_gap(left: Tensor, right: Tensor) -> Tensor:
    """1 − a·b of every row.

    Shape:
        left, right [N, D], of length 1; returns [N], in at least float32.

    Reference:
        StructXLIP's L_RS, between a picture and its edge map.
    """
    dtype = at_least_float32(left, right)
    return 1 - (left.to(dtype) * right.to(dtype)).sum(-1)


def squared_gap(left: Tensor, right: Tensor) -> Tensor:
    """(a·b − 1)² of every row.

    Shape:
        left, right [N, D], of length 1; returns [N], in at least float32.

    Relations:
        The square of `cosine_gap`: its gradient fades as the two come together.

    Reference:
        GOAL's L_patch and L_text, between a part of the whole and the part by itself.
    """
    return cosine_gap(left, right).square()
