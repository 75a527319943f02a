"""Which numbers of a column stand out: a mark claims no difference that paired intervals do not support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hnclip.evaluate.bootstrap import bootstrap_intervals
from hnclip.evaluate.result import PerQuery
from hnclip.tables import Mark

_PLACES: tuple[Mark, Mark] = ("best", "second")


def highest_marks(values: Mapping[int, str]) -> dict[int, Mark]:
    """The rows with the highest and second highest printed number, all of them where several print the same."""
    heights = sorted({float(value) for value in values.values()}, reverse=True)
    if len(heights) < 2:
        return {}
    names = dict(zip(heights, _PLACES))
    return {row: names[float(value)] for row, value in values.items() if float(value) in names}


def clear_marks(queries: Mapping[int, PerQuery], direction: str, k: int) -> dict[int, Mark]:
    """The best row if it is clearly above every other, then the second if it is clearly above all that remain.

    Clearly above: the paired 95 % interval of the difference in R@k excludes zero, families resampled whole.

    Relations:
        As `compare_ranks` of each pair would say.
    """
    hits = {row: 100.0 * (getattr(query.ranks, direction) <= k) for row, query in queries.items()}  # [n] each
    order = sorted(hits, key=lambda row: -float(hits[row].sum()))
    marks: dict[int, Mark] = {}
    for mark, row in zip(_PLACES, order):
        below = [hits[other] for other in order[len(marks) + 1 :]]
        if not below or not _clearly_above(hits[row], below, queries[row].groups_of(direction)):
            break
        marks[row] = mark
    return marks


def _clearly_above(hits: Tensor, others: Sequence[Tensor], groups: Tensor) -> bool:
    if bool((groups == groups[0]).all()):
        return False  # a single family has no spread to measure
    differences = hits[:, None] - torch.stack(list(others), dim=1)  # [n, M]
    return all(interval.low > 0 for interval in bootstrap_intervals(differences, groups=groups))
