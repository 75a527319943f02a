"""Bootstrap over queries, and over training runs: how far a recall, or a difference of two, could move with others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_DRAWS_AT_ONCE = 1 << 21  # 16 MB of indices: bounds the memory whatever the number of queries and resamples


class Interval(NamedTuple):
    """A confidence interval, in the unit of the values."""

    low: float
    high: float


class PairedDifference(NamedTuple):
    """Mean of a - b over the same queries, its interval, and the two-sided p-value of "no difference"."""

    mean: float
    low: float
    high: float
    p_value: float


class Estimate(NamedTuple):
    """A mean and its interval."""

    mean: float
    low: float
    high: float


def bootstrap_interval(
    values: Tensor, *, groups: Tensor | None = None, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of the mean of per-query values.

    Args:
        values: one number per query, for example a hit as 0 or 1.
        groups: any integer label per query; queries of one label are drawn together, because the captions of
            one image, or near-duplicate images, succeed and fail together and weigh less than separate ones.
        level: share of the bootstrap distribution inside the interval.
        resamples: number of bootstrap samples.
        seed: of the function's own generator; the global generator is not touched.

    Shape:
        values [n], groups [n]. Memory is bounded by a constant plus O(n + resamples).

    Relations:
        With groups of one query each this is the plain bootstrap. Only the partition matters, not its labels.
        When all values are equal the interval has no width: a recall of 100 % gets [100, 100], which is no
        proof of perfection. With fewer than some twenty groups the interval is too narrow.

    Reference:
        Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13; with groups the cluster
        bootstrap, where the mean of a resample is a ratio of sums because groups differ in size.
    """
    values = _checked_values("values", values)  # [n]
    return bootstrap_intervals(values[:, None], groups=groups, level=level, resamples=resamples, seed=seed)[0]


def bootstrap_intervals(
    values: Tensor, *, groups: Tensor | None = None, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> list[Interval]:
    """Intervals of several numbers per query, such as hits at several K, from one set of resamples.

    Shape:
        values [n, M]; M intervals.

    Relations:
        Each is the `bootstrap_interval` of its column, for about the time of one.
    """
    if values.ndim != 2 or values.numel() == 0:
        raise ValueError(f"values must be [n, M] with at least one query and number, got {tuple(values.shape)}")
    sums, sizes = _group_sums(_checked_numbers("values", values), groups)  # [G, M], [G]
    means = _resampled_means(sums, sizes, resamples=resamples, seed=seed)  # [R, M]
    return [_percentiles(column, level) for column in means.unbind(1)]


def paired_bootstrap(
    a: Tensor,
    b: Tensor,
    *,
    groups: Tensor | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> PairedDifference:
    """Compare two models on the same queries: the mean of a - b with its bootstrap interval and p-value.

    Args:
        a: per-query values of the first model.
        b: values of the second model on the same queries in the same order.
        groups, level, resamples, seed: as in `bootstrap_interval`.

    Shape:
        a [n], b [n], groups [n].

    Relations:
        Swapping a and b flips every sign and keeps the p-value. The interval is `bootstrap_interval(a - b)`.
        The p-value is twice the smaller share of resamples on either side of zero, so it is never below
        2 / (resamples + 1), and 1 when the models agree on every query.
    """
    a = _checked_values("a", a)  # [n]
    b = _checked_values("b", b)  # [n]
    if a.shape != b.shape:
        raise ValueError(f"b must have one value per query of a, got {len(b)} and {len(a)}")
    difference = a - b  # [n]
    sums, sizes = _group_sums(difference, groups)  # [G], [G]
    means = _resampled_means(sums, sizes, resamples=resamples, seed=seed)  # [R]
    low, high = _percentiles(means, level)
    smaller_side = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p_value = min(1.0, 2 * (1 + smaller_side) / (1 + resamples))
    return PairedDifference(float(difference.mean()), low, high, p_value)


def crossed_bootstrap(
    values: Sequence[Tensor],
    groups: Sequence[Tensor],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> list[Estimate]:
    """Means over queries and training runs, with intervals that allow for other queries and for other runs.

    Every resample draws groups of queries, and apart from them runs. All parts, for example the two directions of
    retrieval, share what is drawn.

    Args:
        values: of each part one number per query and run.
        groups: of each part the label of every query; equal labels in several parts are one group, and every group
            needs queries in every part.
        level, resamples, seed: as in `bootstrap_interval`.

    Shape:
        values [n, S] each, the same S runs in all; groups [n] each. One estimate per part, and a last one of the mean
        of the parts.

    Relations:
        Equal runs, or a single one, leave `bootstrap_interval`. Of S runs S − 1 are drawn: where all queries are alike,
        the variance of a resample is then s²/S, that of a mean of S runs, which S draws would make (S − 1)/S of.
        What a query does in one run alone counts threefold, so where runs scatter by query the interval is rather too
        wide; a few runs show their spread but roughly, and a single one shows none.

    Reference:
        Owen, The pigeonhole bootstrap (2007); one draw less, Rao and Wu (1988).
    """
    if not values or len(values) != len(groups):
        raise ValueError(f"values and groups must have the same parts, at least one, got {len(values)}, {len(groups)}")
    for part, labels in zip(values, groups):
        if part.ndim != 2 or part.numel() == 0 or part.shape[1] != values[0].shape[1]:
            shapes = ", ".join(str(tuple(part.shape)) for part in values)
            raise ValueError(f"values must be [n, S] with at least one query and the same runs, got {shapes}")
        if labels.shape != part.shape[:1]:
            raise ValueError(f"groups must be [{len(part)}], one per query, got {tuple(labels.shape)}")
    parts, runs = len(values), values[0].shape[1]
    # One table of all queries: S columns of values and one that counts, for each part, empty for those of the others.
    table = torch.block_diag(
        *(torch.column_stack([_checked_numbers("values", part), torch.ones(len(part)).double()]) for part in values)
    )  # [Σn, P·(S + 1)]
    sums, _ = _group_sums(table, torch.cat([labels.cpu() for labels in groups]))  # [G, P·(S + 1)]
    counts = sums.unflatten(1, (parts, runs + 1))[..., -1]  # [G, P]
    if bool((counts == 0).any()):
        raise ValueError("groups must have queries in every part")
    drawn = _resampled_totals(sums, resamples=resamples, seed=seed).unflatten(1, (parts, runs + 1))  # [R, P, S + 1]
    weights = _drawn_runs(runs, resamples, seed)  # [R, S]
    means = (drawn[..., :-1] * weights[:, None]).sum(2) / drawn[..., -1]  # [R, P]
    found = torch.stack([part.double().mean() for part in values])  # [P]
    columns = [*zip(found, means.unbind(1)), (found.mean(), means.mean(1))]
    return [Estimate(float(mean), *_percentiles(column, level)) for mean, column in columns]


def _drawn_runs(runs: int, resamples: int, seed: int) -> Tensor:
    """[R, S]: the share of each run in every resample."""
    generator = torch.Generator().manual_seed((1 << 60) + seed)  # not the draws of the groups
    draws = max(1, runs - 1)
    drawn = torch.randint(runs, (resamples, draws), generator=generator)  # [R, S - 1]
    return torch.nn.functional.one_hot(drawn, runs).sum(1).double() / draws  # [R, S]


def _checked_values(name: str, values: Tensor) -> Tensor:
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"{name} must be [n] with at least one query, got shape {tuple(values.shape)}")
    return _checked_numbers(name, values)


def _checked_numbers(name: str, values: Tensor) -> Tensor:
    values = values.detach().to("cpu", torch.float64)
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name} must be finite")
    return values


def _group_sums(values: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums [G] or [G, M] and number [G] of the values [n] or [n, M] of each group, groups in the order of their first
    query."""
    if groups is None:
        group = torch.arange(len(values))  # [n]
    else:
        if groups.shape != values.shape[:1]:
            raise ValueError(f"groups must be [{len(values)}], one per query, got {tuple(groups.shape)}")
        labels, group = torch.unique(groups.detach().cpu(), return_inverse=True)  # [G], [n]
        query = torch.arange(len(values))  # [n]
        first = query[: len(labels)].scatter_reduce(0, group, query, "amin", include_self=False)  # [G]
        # Numbering by first appearance makes the result independent of how the groups are labelled.
        group = first.argsort().argsort()[group]  # [n]
    count = int(group.max()) + 1
    if count < 2:
        name = "values" if groups is None else "groups"
        raise ValueError(f"{name} must hold at least two queries or groups: one has no spread to measure")
    sums = values.new_zeros(count, *values.shape[1:]).index_add(0, group, values)  # [G] or [G, M]
    sizes = group.bincount().double()  # [G]
    return sums, sizes


def _resampled_means(sums: Tensor, sizes: Tensor, *, resamples: int, seed: int) -> Tensor:
    """Means [R] or [R, M] of resamples that each draw as many groups as there are, with replacement."""
    totals = _resampled_totals(torch.column_stack([sums, sizes]), resamples=resamples, seed=seed)  # [R, M + 1]
    return (totals[:, :-1] / totals[:, -1:]).view(resamples, *sums.shape[1:])


def _resampled_totals(table: Tensor, *, resamples: int, seed: int) -> Tensor:
    """Sums [R, M] over the groups that each resample draws, of what the table [G, M] has of them."""
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    generator = torch.Generator().manual_seed(seed)
    groups = len(table)
    block = max(1, _DRAWS_AT_ONCE // groups)
    totals = []
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn = torch.randint(groups, (rows, groups), generator=generator)  # [r, G]
        # How often each group was drawn serves all columns: one product instead of a gathering for each.
        drawn += groups * torch.arange(rows)[:, None]  # [r, G]
        times = drawn.flatten().bincount(minlength=rows * groups).view(rows, groups).double()  # [r, G]
        totals.append(times @ table)  # [r, M]
    return torch.cat(totals)


def _percentiles(means: Tensor, level: float) -> Interval:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    tails = means.new_tensor([(1 - level) / 2, (1 + level) / 2])  # [2]
    low, high = means.quantile(tails).tolist()
    return Interval(low, high)
