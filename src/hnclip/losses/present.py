"""Terms of the pairs that have a view, where not every pair has it.

With several processes every term is a mean over this process's R queries, which training weighs with W·R/N. A term of
the V pairs that are present is therefore scaled so that the weighted mean over processes is that of one process that
holds all N pairs, however the present ones are spread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hnclip.losses.hard_negative import check_rows

FEWEST = 2  # pairs of a contrastive loss: one alone has no negative


def present_in_all(*masks: Tensor | None) -> Tensor | None:
    """[N] bool, which pairs have all of these views; None, as in each of them, where every pair has."""
    both: Tensor | None = None
    for mask in masks:
        if mask is not None:
            both = mask if both is None else both & mask
    return both


def mean_of_present(values: Tensor, present: Tensor | None, offset: int = 0, rows: int | None = None) -> Tensor:
    """The mean of `values` over the pairs that are present, of which the queries bring theirs.

    Args:
        values: of the queries. What stands in rows that are absent is not read.
        present: of all N pairs, which count; None for all of them.
        offset, rows: which of the N pairs are the queries, as in `hard_negative_loss`.

    Shape:
        values [R]; present [N] bool; returns a scalar: (N/R) · (Σ over own present rows) / V, and 0 if V is 0.

    Relations:
        The mean over processes of (W·R/N) times this is the mean over all V present pairs.
    """
    if present is None:
        return values.mean()
    rows = check_rows(len(present), offset, rows)
    own = present[offset : offset + rows]  # [R]
    total = values.where(own, 0).sum()
    return total * (len(present) / rows) / present.sum().clamp(min=1)


def loss_of_present(
    loss: Callable[..., Tensor],
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    present: Tensor | None,
    *,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """A contrastive loss among the pairs that are present: the others are neither queries nor anybody's negatives.

    How many are present decides over shapes, so an accelerator has to tell the host; where all pairs are (None) nobody
    waits.

    Args:
        loss: with the signature of `GLOBAL_LOSSES`.
        image, text, scale, offset, rows, ids: as in `hard_negative_loss`, of all N pairs.
        present: which of them count; None for all.
        options: handed on to `loss`.

    Shape:
        image, text [N, D]; present [N] bool; returns a scalar: (N/R) · (own present / V) · the loss of own present
        queries among the V present pairs. It is 0, with zero gradients, where no query is present or V < 2.
    """
    if present is None:
        return loss(image, text, scale, offset=offset, rows=rows, ids=ids, **options)
    count = len(present)
    rows = check_rows(count, offset, rows)
    there = present.cpu()  # once, for all that the host has to know
    before, own = (int(there[part].sum()) for part in (slice(offset), slice(offset, offset + rows)))
    kept = there.nonzero().flatten().to(image.device)  # [V]
    if own == 0 or len(kept) < FEWEST:
        return 0 * (image.sum() + text.sum() + scale)
    some = loss(
        image[kept],
        text[kept],
        scale,
        offset=before,
        rows=own,
        ids=None if ids is None else ids[kept],
        **options,
    )
    return some * (own * count / (len(kept) * rows))
