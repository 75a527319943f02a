"""A study's stored results: recalls over seeds, differences of rows with paired intervals, and marks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, stdev
from typing import Any, NamedTuple

from hnclip.evaluation.bootstrap import Estimate, mark_best, recall_sum
from hnclip.evaluation.metrics import recall_at
from hnclip.evaluation.ranks import ARROWS
from hnclip.evaluation.retrieval import EvaluationResult
from hnclip.recipes import PAPER_GALLERIES
from hnclip.studies.plan import MeasureJob, Place, Plan, RunJob
from hnclip.studies.spec import Domain, GallerySpec, Setting, Study
from hnclip.studies.store import Store
from hnclip.util.tables import Mark

MEAN = "mean"  # of both directions
DIRECTIONS = (*ARROWS, MEAN)
FIELDS = ("study", "row", "against", "data", "gallery", "seed", "direction", "k", "value", "low", "high", "mark")

BySeed = Mapping[int | None, EvaluationResult]
"""A row's results by seed. An untrained model has one result, under None, which is paired with every seed."""


@dataclass(frozen=True)
class Spread:
    """A number for every seed."""

    values: Mapping[int | None, float]

    @property
    def mean(self) -> float:
        return fmean(self.values.values())

    @property
    def std(self) -> float | None:
        """Sample standard deviation, of two or more seeds."""
        return stdev(self.values.values()) if len(self.values) > 1 else None


class Term(NamedTuple):
    """A row's recall at k times a weight, as part of a weighted sum of recalls."""

    weight: float
    row: str
    k: int = 1


@dataclass(frozen=True)
class Column:
    """The results of all rows of a study that were trained on one domain and evaluated on one gallery.

    Args:
        rows: by name, in the order of the table; rows without results are empty.
    """

    domain: Domain
    gallery: GallerySpec
    rows: Mapping[str, BySeed]
    _sums: dict[tuple[Term, ...], dict[str, Estimate] | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The gallery; if it is not the domain's own, "domain → gallery"."""
        paper = PAPER_GALLERIES.get(self.domain.name, ())
        own = self.gallery.source == self.domain.data or self.gallery.source.partition("=")[0] in paper
        return self.gallery.name if own else f"{self.domain.name} → {self.gallery.name}"

    @property
    def results(self) -> Iterator[EvaluationResult]:
        return (result for by_seed in self.rows.values() for result in by_seed.values())

    def recall(self, row: str, direction: str, k: int) -> Spread | None:
        """R@k in percent; None without results."""
        found = self.rows[row]
        return Spread({seed: _recall(result, direction, k) for seed, result in found.items()}) if found else None

    def difference(self, row: str, other: str, direction: str, k: int) -> Estimate | None:
        """R@k of a row minus that of another in points; None if they have no seed in common."""
        back = (Term(1, other, k), Term(-1, row, k))
        if back in self._sums:  # a bootstrap takes a while, and only the sign differs
            found = self.weighted_sum(back, direction)
            return found and Estimate(-found.mean, -found.high, -found.low)
        return self.weighted_sum((Term(1, row, k), Term(-1, other, k)), direction)

    def weighted_sum(self, terms: Sequence[Term], direction: str = MEAN) -> Estimate | None:
        """Recalls of rows times their weights, added up, in points; None if the rows have no seed in common.

        The interval is paired: over the queries that all rows share, groups of near-duplicates whole, and over the
        seeds that all rows have. If all images are one group there is no spread to measure, and it is unbounded.

        Relations:
            This is `hnclip.evaluation.bootstrap.recall_sum` of the rows' ranks.
        """
        if (key := tuple(terms)) not in self._sums:
            self._sums[key] = self._bootstrap(key)
        found = self._sums[key]
        return None if found is None else found[direction]

    def marks(self, rows: Sequence[str], direction: str, k: int) -> dict[str, Mark]:
        """`mark_best` of these rows: above another if the paired 95 % interval of their difference lies above zero."""

        def is_above(row: str, other: str) -> bool:
            found = self.difference(row, other, direction, k)
            return found is not None and found.low > 0

        heights = {row: recall.mean for row in rows if (recall := self.recall(row, direction, k)) is not None}
        return mark_best(heights, is_above)

    def _bootstrap(self, terms: Sequence[Term]) -> dict[str, Estimate] | None:
        sides = [self.rows[term.row] for term in terms]
        seeded = [side for side in sides if None not in side]  # untrained models have the seeds of the others
        seeds = [seed for seed in seeded[0] if all(seed in side for side in seeded)] if seeded else [None]
        if not seeds:
            return None
        runs = [[side[seed if seed in side else None] for seed in seeds] for side in sides]
        first = runs[0][0]
        if any(one.ids != first.ids for side in runs for one in side):
            raise ValueError("rows of one column were evaluated on different galleries: evaluate them again")
        if first.groups.unique().numel() > 1:
            ranked = [(term.weight, [one.ranks for one in side], term.k) for term, side in zip(terms, runs)]
            return recall_sum(ranked, groups=first.groups)

        def total(direction: str) -> float:
            means = [fmean(_recall(one, direction, term.k) for one in side) for term, side in zip(terms, runs)]
            return sum(term.weight * mean for term, mean in zip(terms, means))

        return {direction: Estimate(total(direction), -math.inf, math.inf) for direction in DIRECTIONS}


class StudyResults:
    """A study and what its runs and measurements left in the store; each file is read once.

    What is not there, because it was not run or failed, is None or empty in every method.
    """

    def __init__(self, setting: Setting, plan: Plan, store: Store) -> None:
        self.setting, self.store = setting, store
        self.study, self.seeds, self.domains = setting.study, setting.seeds, setting.domains
        self.jobs: Mapping[Place, RunJob] = plan.of(self.study)
        self.measures: Mapping[tuple[str, str], MeasureJob] = plan.measures_of(self.study)
        self._read: dict[tuple[Any, ...], Any] = {}

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        return tuple(
            Column(domain, gallery, {row.name: self._by_seed(row.name, domain, gallery) for row in self.study.rows})
            for domain in self.domains
            for gallery in self.setting.galleries_of(domain)
        )

    @cached_property
    def missing(self) -> tuple[int, int]:
        """How many runs and measurements are missing or not evaluated, and how many there are in all."""
        done = {job.identity: self._once(self.store.measurement, job) is not None for job in self.measures.values()}
        for column in self.columns:
            for place, job in self.jobs.items():
                if place.domain == column.domain.name:
                    there = (place.seed if job.trained else None) in column.rows[place.row]
                    done[job.identity] = done.get(job.identity, True) and there
        return sum(not there for there in done.values()), len(done)

    def training(self, row: str, domain: Domain, seed: int) -> dict[str, Any] | None:
        """`TrainResult` of a finished run: seconds, best and last epoch with their validation R@1."""
        return self._once(self.store.training, self.jobs[Place(row, domain.name, seed)])

    def metrics(self, row: str, domain: Domain, seed: int, kind: str) -> list[dict[str, Any]]:
        """Entries of the log of a finished run: "evaluation" (validation), "watched" (test), "gradients"."""
        return self._once(self.store.metrics, self.jobs[Place(row, domain.name, seed)], kind)

    def measured(self, kind: str) -> dict[str, dict[str, Any]]:
        """What `hnclip.studies.analyses` measured for the study, by the names of the domains that have it."""
        jobs = {domain: job for (own, domain), job in self.measures.items() if own == kind}
        return {name: one for name, job in jobs.items() if (one := self._once(self.store.measurement, job)) is not None}

    def marks(self, column: Column, direction: str, k: int) -> dict[str, Mark]:
        """The marks of all rows, each compared with its group."""
        groups = row_groups(self.study)
        return {row: mark for group in groups for row, mark in column.marks(group, direction, k).items()}

    def measurements(self) -> list[dict[str, Any]]:
        """Every recall and every difference that the study asks for, one `FIELDS` each.

        A number of one seed has that seed; the mean over seeds, with its mark, and a difference (`against`) have none.
        """
        return [
            dict.fromkeys(FIELDS)
            | {"study": self.study.name, "data": column.domain.name, "gallery": column.gallery.name}
            | {"direction": direction, "k": k}
            | numbers
            for column in self.columns
            for direction in DIRECTIONS
            for k in self.study.ks
            for numbers in self._numbers(column, direction, k)
        ]

    def _numbers(self, column: Column, direction: str, k: int) -> Iterator[dict[str, Any]]:
        marks = self.marks(column, direction, k)
        for row in self.study.rows:
            if (recall := column.recall(row.name, direction, k)) is None:
                continue
            for seed, value in recall.values.items():
                if seed is not None:
                    metrics = column.rows[row.name][seed].metrics.get(direction, {})
                    low, high = metrics.get(f"R@{k}_interval", (None, None))
                    yield {"row": row.name, "seed": seed, "value": value, "low": low, "high": high}
            yield {"row": row.name, "value": recall.mean, "mark": marks.get(row.name)}
            for other in row.against:
                if (difference := column.difference(row.name, other, direction, k)) is not None:
                    low, high = (end if math.isfinite(end) else None for end in difference[1:3])
                    yield {"row": row.name, "against": other, "value": difference.mean, "low": low, "high": high}

    def _by_seed(self, row: str, domain: Domain, gallery: GallerySpec) -> BySeed:
        seeds = {seed: seed for seed in self.seeds} if self.study.row(row).trained else {None: self.seeds[0]}
        jobs = {key: self.jobs[Place(row, domain.name, seed)] for key, seed in seeds.items()}
        found = {key: self._once(self.store.result, job, gallery) for key, job in jobs.items()}
        return {key: result for key, result in found.items() if result is not None}

    def _once(self, read: Callable[..., Any], job: RunJob | MeasureJob, *what: Any) -> Any:
        """What a method of the store reads, from memory if it was read before."""
        key = (read.__name__, job.identity, *what)
        if key not in self._read:
            self._read[key] = read(job, *what)
        return self._read[key]


def row_groups(study: Study) -> list[list[str]]:
    """Rows that are compared with each other: pairs where every second row is compared with the one above (the paper's
    Table 2); rows of one x where there are several series (Table A9); otherwise all rows."""
    rows = list(study.rows)
    pairs = [rows[start : start + 2] for start in range(0, len(rows), 2)]
    groups = [rows]
    if all([row.against for row in pair] == [(), (pair[0].name,)] for pair in pairs):
        groups = pairs
    elif len({row.series for row in rows if row.x is not None}) > 1:
        groups = [[row for row in rows if row.x == x] for x in dict.fromkeys(row.x for row in rows)]
    return [[row.name for row in group] for group in groups]


def rounded(recall: float) -> float:
    """A recall as it is compared with others: equal means of two directions may differ in their last bit."""
    return round(recall, 9)


def _recall(result: EvaluationResult, direction: str, k: int) -> float:
    if direction == MEAN:
        return fmean(_recall(result, one, k) for one in ARROWS)
    return recall_at(getattr(result.ranks, direction), k)
