"""The special cases of `tiled_hard_negative_loss` with the same margin for every negative: none, or a fixed one."""

from __future__ import annotations

from torch import Tensor

from hnclip.losses.tiled import tiled_hard_negative_loss


def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    *,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """Symmetric InfoNCE, the loss of CLIP: ½[CE(s·S) + CE(s·Sᵀ)].

    Args:
        image, text, scale, offset, rows, ids, check_values: as in `hard_negative_loss`.

    Shape:
        image, text [N, D]; scale scalar; ids [N] or [N, K]; returns a scalar.

    Relations:
        `hard_negative_loss` with gamma = margin = 0.

    Reference:
        Radford et al. 2021; HN-CLIP, eq. 1.
    """
    return tiled_hard_negative_loss(
        image, text, scale, 0.0, offset=offset, rows=rows, ids=ids, check_values=check_values
    )


def fixed_margin_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    *,
    margin: float = 0.2,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """InfoNCE in which the positive must beat every negative by the same margin: symCE(s·(S − margin·I)).

    Args:
        margin: in units of cosine similarity. γ·mean(Ḡ) makes it the control that asks what L_HN adds to its
            mean.
        image, text, scale, offset, rows, ids, check_values: as in `hard_negative_loss`.

    Shape:
        image, text [N, D]; scale scalar; ids [N] or [N, K]; returns a scalar.

    Relations:
        `hard_negative_loss` with gamma = 0: a margin added to all negatives or taken from the positive is the
        same softmax. With margin = 0 this is InfoNCE.

    Reference:
        CosFace, Wang et al. 2018, on image-text pairs.
    """
    return tiled_hard_negative_loss(
        image, text, scale, 0.0, margin=margin, offset=offset, rows=rows, ids=ids, check_values=check_values
    )
