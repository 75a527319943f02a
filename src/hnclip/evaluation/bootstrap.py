"""Bootstrap over queries, and over training runs: how far a recall, or a difference of two, varies with others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hnclip.evaluation.ranks import ARROWS, Ranks
from hnclip.util.tables import Mark

DRAWS_AT_ONCE = 1 << 21  # 16 MB of indices: bounds the memory for any number of queries and resamples

Row = TypeVar("Row")


class Estimate(NamedTuple):
    """A mean with its interval, and the two-sided p-value of "the mean is zero", which is of use for differences.

    The p-value is twice the smaller share of resamples on either side of zero: never below 2 / (resamples + 1), and 1
    where all values are zero.
    """

    mean: float
    low: float
    high: float
    p_value: float | None = None

    @property
    def clear(self) -> bool:
        """The interval excludes zero; otherwise a difference may be chance."""
        return not self.low <= 0 <= self.high


def bootstrap_intervals(
    values: Tensor, *, groups: Tensor | None = None, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> list[Estimate]:
    """Percentile bootstrap intervals of the means of one or more numbers per query, from one set of resamples.

    Args:
        values: numbers of each query, for example hits at several K as 0 or 1.
        groups: any integer label per query; queries of one label are drawn together, because the captions of
            one image, or near-duplicate images, succeed and fail together and weigh less than separate ones.
        level: share of the bootstrap distribution inside the interval.
        resamples: number of bootstrap samples.
        seed: of the function's own generator; the global generator is not touched.

    Shape:
        values [n, M], groups [n]; M estimates. Memory is bounded by a constant plus O((n + resamples)·M).

    Relations:
        With groups of one query each this is the plain bootstrap. Only the partition matters, not its labels.
        When all values are equal the interval has no width: a recall of 100 % gets [100, 100], which is no
        proof of perfection. With fewer than some twenty groups the interval is too narrow.

    Reference:
        Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13; with groups the cluster
        bootstrap, where the mean of a resample is a ratio of sums because groups differ in size.
    """
    values = values.detach().to("cpu", torch.float64)  # [n, M]
    (sums,) = _group_sums([values], [torch.arange(len(values)) if groups is None else groups])  # [G, M + 1]
    totals = _resampled_totals(sums, resamples, seed)  # [R, M + 1]
    means = totals[:, :-1] / totals[:, -1:]  # [R, M]
    return [_estimate(*column, level) for column in zip(values.mean(0), means.unbind(1))]


def crossed_bootstrap(
    values: Sequence[Tensor],
    groups: Sequence[Tensor],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> list[Estimate]:
    """Means over queries and training runs, with intervals that allow for other queries and for other runs.

    Every resample draws groups of queries, and independently runs. All parts, for example the two directions of
    retrieval, share what is drawn.

    Args:
        values: one array per part, with one number per query and run.
        groups: one array per part, with the label of every query; equal labels in several parts are one group, and
            every group needs queries in every part.
        level, resamples, seed: as in `bootstrap_intervals`.

    Shape:
        values [n, S] each, the same S runs in all; groups [n] each. One estimate per part, and a last one of the mean
        of the parts.

    Relations:
        With equal runs, or a single one, this is `bootstrap_intervals`. S − 1 of S runs are drawn: where all queries
        agree, the variance of a resample is then s²/S, as of a mean of S runs; S draws would give (S − 1)/S of it.
        What a query does in one run alone counts threefold, so where runs scatter by query the interval is rather too
        wide; a few runs give only a rough estimate of their spread, and a single one none.

    Reference:
        Owen, The pigeonhole bootstrap (2007); one draw less, Rao and Wu (1988).
    """
    values = [part.detach().to("cpu", torch.float64) for part in values]  # [n, S] each
    sums = torch.stack(_group_sums(values, groups), 1)  # [G, P, S + 1]
    if bool((sums[..., -1] == 0).any()):
        raise ValueError("groups must have queries in every part")
    drawn = _resampled_totals(sums.flatten(1), resamples, seed).unflatten(1, sums.shape[1:])  # [R, P, S + 1]
    runs = _drawn_runs(sums.shape[2] - 1, resamples, seed)  # [R, S]
    means = (drawn[..., :-1] * runs[:, None]).sum(2) / drawn[..., -1]  # [R, P]
    found = torch.stack([part.mean() for part in values])  # [P]
    columns = [*zip(found, means.unbind(1)), (found.mean(), means.mean(1))]
    return [_estimate(*column, level) for column in columns]


def paired_difference(
    a: Sequence[Ranks],
    b: Sequence[Ranks],
    k: int,
    *,
    groups: Tensor | None = None,
    **options: Any,
) -> dict[str, Estimate]:
    """R@k of model a minus that of model b in points, over the same queries: by direction, and the "mean" of both.

    Args:
        a, b: ranks of each training run of a model, of the same captions and images in the same order; run i of a is
            paired with run i of b.
        groups, options: as of `recall_sum`.

    Relations:
        Swapping a and b flips every sign and keeps the p-values. With one run per model the interval of a direction is
        that of `bootstrap_intervals` of the differences.
    """
    return recall_sum([(1, a, k), (-1, b, k)], groups=groups, **options)


def recall_sum(
    terms: Sequence[tuple[float, Sequence[Ranks], int]], *, groups: Tensor | None = None, **options: Any
) -> dict[str, Estimate]:
    """Recalls of several models times their weights, added up, in points: by direction, and the "mean" of both.

    Args:
        terms: weight, ranks of each training run, and k of every model. The ranks are of the same captions and images
            in the same order, and run i of all models is paired.
        groups: label per image; images of one label are drawn together, always with all their captions. Without it
            every image is its own group.
        options: level, resamples, seed of `crossed_bootstrap`.

    Shape:
        groups [I].
    """
    first = terms[0][1]
    if not all(
        len(runs) == len(first) and all(torch.equal(one.owner, first[0].owner) for one in runs) for _, runs, _ in terms
    ):
        raise ValueError("all models must have the same number of runs, ranked on the same gallery")
    labels = first[0].query_groups(groups)

    def hits(runs: Sequence[Ranks], k: int, direction: str) -> Tensor:
        return 100.0 * (torch.stack([getattr(ranks, direction) for ranks in runs], 1) <= k).double()  # [n, S]

    values = [
        torch.stack([weight * hits(runs, k, direction) for weight, runs, k in terms]).sum(0) for direction in ARROWS
    ]
    found = crossed_bootstrap(values, [labels[direction] for direction in ARROWS], **options)
    return dict(zip((*ARROWS, "mean"), found, strict=True))


def mark_best(heights: Mapping[Row, float], is_above: Callable[[Row, Row], bool]) -> dict[Row, Mark]:
    """Mark the best row if it is clearly above every other, then the second if it is clearly above all that remain.

    Args:
        heights: the number of each row.
        is_above: whether one row is clearly above another: the paired interval of their difference lies above zero.
    """
    order = sorted(heights, key=lambda row: -heights[row])
    places: tuple[Mark, Mark] = ("best", "second")
    marks: dict[Row, Mark] = {}
    for place, (mark, row) in enumerate(zip(places, order), start=1):
        below = order[place:]
        # The nearest first: where a lead is not clear, few intervals are needed to know.
        if not below or not all(is_above(row, other) for other in below):
            break
        marks[row] = mark
    return marks


def _drawn_runs(runs: int, resamples: int, seed: int) -> Tensor:
    """[R, S]: the share of each run in every resample."""
    generator = torch.Generator().manual_seed((1 << 60) + seed)  # not the draws of the groups
    draws = max(1, runs - 1)
    drawn = torch.randint(runs, (resamples, draws), generator=generator)  # [R, S - 1]
    return torch.nn.functional.one_hot(drawn, runs).sum(1).double() / draws  # [R, S]


def _group_sums(values: Sequence[Tensor], groups: Sequence[Tensor]) -> list[Tensor]:
    """Sums of each part over each group [G, S], with the number of its queries as one more column.

    Groups are in the order of their first query, which makes the result independent of how they are labelled.
    """
    for part, labels in zip(values, groups, strict=True):
        if part.ndim != 2 or part.numel() == 0 or not bool(part.isfinite().all()):
            raise ValueError(f"values must be [n, S] finite numbers of at least one query, got {tuple(part.shape)}")
        if labels.shape != part.shape[:1]:
            raise ValueError(f"groups must be [{len(part)}], one label per query, got {tuple(labels.shape)}")
    labels, group = torch.unique(torch.cat([part.cpu() for part in groups]), return_inverse=True)  # [G], [Σn]
    if len(labels) < 2:
        raise ValueError("groups must hold at least two queries or groups: one has no spread to measure")
    query = torch.arange(len(group))  # [Σn]
    first = query[: len(labels)].scatter_reduce(0, group, query, "amin", include_self=False)  # [G]
    numbers = first.argsort().argsort()[group].split([len(part) for part in values])  # [n] each
    return [
        part.new_zeros(len(labels), part.shape[1] + 1).index_add(
            0, number, torch.column_stack([part, part.new_ones(len(part))])
        )
        for part, number in zip(values, numbers)
    ]


def _resampled_totals(table: Tensor, resamples: int, seed: int) -> Tensor:
    """Sums [R, M] of the table [G, M] over the groups of each resample, which draws as many groups as there are."""
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    generator = torch.Generator().manual_seed(seed)
    groups = len(table)
    block = max(1, DRAWS_AT_ONCE // groups)
    totals = []
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn = torch.randint(groups, (rows, groups), generator=generator)  # [r, G]
        # How often each group was drawn serves all columns: one product instead of a gathering for each.
        drawn += groups * torch.arange(rows)[:, None]  # [r, G]
        times = drawn.flatten().bincount(minlength=rows * groups).view(rows, groups).double()  # [r, G]
        totals.append(times @ table)  # [r, M]
    return torch.cat(totals)


def _estimate(mean: Tensor, resampled: Tensor, level: float) -> Estimate:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    low, high = resampled.quantile(resampled.new_tensor([(1 - level) / 2, (1 + level) / 2])).tolist()
    smaller_side = min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))
    return Estimate(float(mean), low, high, min(1.0, 2 * (1 + smaller_side) / (1 + len(resampled))))
