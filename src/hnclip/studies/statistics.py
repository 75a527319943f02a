"""Recalls of rows over seeds, and how rows of one column stand to each other: paired by query and by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hnclip.evaluate.bootstrap import crossed_bootstrap, mark_best
from hnclip.evaluate.metrics import recall_at
from hnclip.evaluate.ranks import ARROWS
from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.util.tables import Mark

MEAN = "mean"  # of both directions
DIRECTIONS = (*ARROWS, MEAN)

Seed = TypeVar("Seed", int, int | None)

Runs = Mapping[int | None, EvaluationResult]
"""What every seed found of every query. What has no seed, such as a model that was not trained, stands under None and
counts for every seed."""


@dataclass(frozen=True)
class Spread:
    """A number of every seed, their mean, and their sample standard deviation where there are two or more."""

    values: Mapping[int | None, float]

    @property
    def mean(self) -> float:
        return fmean(self.values.values())

    @property
    def std(self) -> float | None:
        return stdev(self.values.values()) if len(self.values) > 1 else None

    def cell(self) -> str:
        """51.62, or 51.62 ± 0.40"""
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"

    def to_dict(self) -> dict[str, Any]:
        seeds = {str(seed): value for seed, value in self.values.items() if seed is not None}
        return {"mean": self.mean, "std": self.std, "seeds": seeds}


class Difference(NamedTuple):
    """Recall of one row minus that of another in points, with its paired 95 % interval. A single family of queries has
    no spread to measure, and so no interval."""

    mean: float
    low: float | None
    high: float | None

    @property
    def clear(self) -> bool:
        """A difference counts only if its interval excludes zero."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    def flipped(self) -> Difference:
        """The other row minus the one."""
        ends = None if self.high is None else -self.high, None if self.low is None else -self.low
        return Difference(-self.mean, *ends)

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "clear": self.clear}

    def sentence(self, a: str, b: str, what: str = "average R@1") -> str:
        """What was found, with the names of the rows, as `Comparison.sentence` says it."""
        verdict = f"{a if self.mean > 0 else b} is better" if self.clear else "no clear difference"
        return f"{a} minus {b} {signed(self.mean)} points of {what}{self._interval()}: {verdict}"

    def cell(self) -> str:
        """+1.9 [+0.4, +3.3]"""
        return f"{signed(self.mean)}{self._interval()}"

    def _interval(self) -> str:
        if self.low is None or self.high is None:
            return ""
        # A clear difference must not be printed with an end at zero.
        ends = [f"{end:+.1g}" if self.clear and round(end, 1) == 0 else signed(end) for end in (self.low, self.high)]
        return f" [{', '.join(ends)}]"


def signed(points: float) -> str:
    """A difference in points. What rounds to nothing is +0.0.

    >>> signed(1.25), signed(-0.04)
    ('+1.2', '+0.0')
    """
    return f"{round(points, 1) + 0.0:+.1f}"


def level(recall: float) -> float:
    """A recall as it is compared with others: equal ones may differ in their last bit, as means of two directions do.

    >>> level(50.1 + 1e-14) == level(50.1)
    True
    """
    return round(recall, 9)


def queries_of(results: Mapping[Seed, EvaluationResult], *, held_out: bool = False) -> dict[Seed, EvaluationResult]:
    """The queries of results by seed; with `held_out` those of the held-out part, of the seeds that have one."""
    parts = {seed: result.held_out if held_out else result for seed, result in results.items()}
    return {seed: part for seed, part in parts.items() if part is not None}


def recalls(runs: Runs, direction: str, k: int) -> Spread | None:
    """R@k in percent over seeds, of a direction or of the mean of both; None of no runs."""
    if not runs:
        return None
    return Spread({seed: _recall(queries, direction, k) for seed, queries in runs.items()})


def _recall(queries: EvaluationResult, direction: str, k: int) -> float:
    if direction == MEAN:
        return fmean(_recall(queries, one, k) for one in ARROWS)
    return recall_at(getattr(queries.ranks, direction), k)


def common_seeds(*sides: Runs) -> list[int | None]:
    """Seeds that all sides have. A side that has none of its own has those of the others."""
    seeded = [side for side in sides if None not in side]
    if not seeded:
        return [None]
    return [seed for seed in seeded[0] if all(seed in side for side in seeded)]


class Weighted(NamedTuple):
    """Recall at k of a row, times a weight."""

    weight: float
    runs: Runs
    k: int


def weighted_sums(terms: Sequence[Weighted]) -> dict[str, Difference] | None:
    """Recalls of rows times their weights, added up: for each direction, and the mean of both.

    Over the same queries, families resampled whole, and over the seeds that all rows have; None if there are none.

    Raises:
        ValueError: the rows were not evaluated on the same gallery.
    """
    seeds = common_seeds(*(term.runs for term in terms))
    if not seeds:
        return None
    found = [[term.runs[seed if seed in term.runs else None] for term in terms] for seed in seeds]
    first = found[0][0]
    for one in (queries for of_seed in found for queries in of_seed):
        _check_same_gallery(first, one)

    def sums(direction: str) -> Tensor:
        hits = [
            [term.weight * 100.0 * (getattr(one.ranks, direction) <= term.k) for term, one in zip(terms, of_seed)]
            for of_seed in found
        ]
        return torch.stack([torch.stack(of_seed).sum(0) for of_seed in hits], dim=1)  # [n, S]

    values = [sums(direction) for direction in ARROWS]
    groups = [first.groups_of(direction) for direction in ARROWS]
    if first.groups.unique().numel() < 2:
        means = [float(part.double().mean()) for part in values]
        return {name: Difference(mean, None, None) for name, mean in zip(DIRECTIONS, [*means, fmean(means)])}
    return {name: Difference(*one[:3]) for name, one in zip(DIRECTIONS, crossed_bootstrap(values, groups))}


def paired_differences(ours: Runs, base: Runs, k: int) -> dict[str, Difference] | None:
    """Recall at k of one row minus that of another: for each direction, and the mean of both.

    Over the same queries, families resampled whole, and over the seeds that both sides have; None if there are none.

    Relations:
        `weighted_sums` with the weights 1 and −1. Of one seed, or of equal ones, the difference of a direction is that
        of `compare_ranks`. A row against itself has the difference 0 [0, 0]. Swapping the sides flips every sign.

    Raises:
        ValueError: the sides were not evaluated on the same gallery.
    """
    return weighted_sums([Weighted(1, ours, k), Weighted(-1, base, k)])


def _check_same_gallery(one: EvaluationResult, other: EvaluationResult) -> None:
    same_captions = torch.equal(one.ranks.owner, other.ranks.owner) and torch.equal(one.groups, other.groups)
    if one.ids != other.ids or not same_captions:
        only = sorted(set(one.ids) ^ set(other.ids))
        example = f", for example {only[0]!r} is in one alone" if only else ""
        raise ValueError(
            f"rows of one column were evaluated on different galleries, {len(one.groups)} and {len(other.groups)} "
            f"pictures{example}: evaluate them again on the same data"
        )


class Standings:
    """The rows of one column, and how they stand to each other.

    Args:
        rows: their runs by name, in the order of the table; rows without runs are there but stand nowhere.
    """

    def __init__(self, rows: Mapping[str, Runs]) -> None:
        self.rows = rows
        self._found: dict[tuple[str, str, int], dict[str, Difference] | None] = {}

    def recall(self, row: str, direction: str, k: int) -> Spread | None:
        return recalls(self.rows[row], direction, k)

    def difference(self, row: str, other: str, direction: str, k: int) -> Difference | None:
        """None if the rows have no seed in common."""
        if (other, row, k) in self._found:  # a bootstrap takes its time
            found = self._found[other, row, k]
            return None if found is None else found[direction].flipped()
        if (row, other, k) not in self._found:
            self._found[row, other, k] = paired_differences(self.rows[row], self.rows[other], k)
        found = self._found[row, other, k]
        return None if found is None else found[direction]

    def marks(self, rows: Sequence[str], direction: str, k: int) -> dict[str, Mark]:
        """`mark_best` of these rows: clearly above if the paired 95 % interval of the difference lies above zero."""
        heights = {row: found.mean for row in rows if (found := self.recall(row, direction, k)) is not None}
        return mark_best(heights, lambda row, other: self._is_above(row, other, direction, k))

    def _is_above(self, row: str, other: str, direction: str, k: int) -> bool:
        found = self.difference(row, other, direction, k)
        return found is not None and found.clear and found.mean > 0
