"""How a claim is held against what was measured: it holds, it does not, or this size cannot tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch

from hnclip.evaluate.bootstrap import crossed_bootstrap
from hnclip.evaluate.result import PerQuery
from hnclip.evaluate.table import ARROWS
from hnclip.studies.findings import Column, Findings
from hnclip.studies.statistics import Difference, signed

Verdict = Literal["holds", "does not hold", "undecided"]


class Judgement(NamedTuple):
    """A verdict, the numbers behind it, and what it follows from."""

    verdict: Verdict
    measured: str
    why: str


@dataclass(frozen=True)
class Evidence:
    """The runs of a study, and what its shows made of them for programs."""

    findings: Findings
    data: Mapping[str, Any]


Check = Callable[[Evidence], Judgement]


class Term(NamedTuple):
    """A row's R@k, averaged over both directions, times a weight."""

    weight: float
    row: str
    k: int = 1


def contrast(findings: Findings, column: Column, terms: Sequence[Term]) -> Difference | None:
    """The weighted sum of recalls with an interval over queries and seeds; None if runs are missing.

    Relations:
        With weights 1 and −1 the difference of two rows, as `paired_differences` has it.
    """
    runs = {term.row: _runs(findings, term.row, column) for term in terms}
    seeds = [seed for seed in findings.seeds if all(seed in found for found in runs.values())]
    if not seeds:
        return None
    first = runs[terms[0].row][seeds[0]]
    values = [
        torch.stack(
            [
                torch.stack(
                    [term.weight * 100.0 * (getattr(runs[term.row][seed].ranks, way) <= term.k) for term in terms]
                ).sum(0)
                for seed in seeds
            ],
            dim=1,
        )  # [n, S]
        for way in ARROWS
    ]
    return Difference(*crossed_bootstrap(values, [first.groups_of(way) for way in ARROWS])[-1])


def _runs(findings: Findings, row: str, column: Column) -> dict[int, PerQuery]:
    """The queries of a row by seed; a model that was not trained is the same under every seed."""
    found = findings.results(row, column)
    if not findings.study.row(row).trained and found:
        found = dict.fromkeys(findings.seeds, next(iter(found.values())))
    return {seed: result.queries for seed, result in found.items() if result.queries is not None}


def positive(*sums: Sequence[Term]) -> Check:
    """Every one of these sums is above zero on every column of the study. It holds if all intervals lie above zero, and
    does not if one lies below."""

    def check(evidence: Evidence) -> Judgement:
        findings = evidence.findings
        found = {
            (column.name, number): contrast(findings, column, terms)
            for column in findings.columns
            for number, terms in enumerate(sums)
        }
        there = {place: each for place, each in found.items() if each is not None}
        if not there:
            return _nothing()
        above = [each for each in there.values() if each.clear and each.mean > 0]
        below = [place for place, each in there.items() if each.clear and each.mean < 0]
        measured = "; ".join(
            f"{column}{f', {_words(sums[number])}' if len(sums) > 1 else ''}: {each.cell()}"
            for (column, number), each in _extremes(there)
        )
        total = f"{len(above)} of {len(there)} clearly above zero, {len(below)} clearly below"
        if len(above) == len(found):
            return Judgement("holds", measured, f"every interval lies above zero ({total})")
        if below:
            return Judgement(
                "does not hold", measured, f"it is the other way round in {_place(below[0], sums)} ({total})"
            )
        return Judgement("undecided", measured, f"intervals include zero ({total})")

    return check


def better(row: str, *others: str, k: int = 1) -> Check:
    """A row retrieves better than each of the others."""
    return positive(*([Term(1, row, k), Term(-1, other, k)] for other in others))


def gains(*pairs: tuple[str, str]) -> Check:
    """Of each pair the first retrieves better than the second."""
    return positive(*([Term(1, one), Term(-1, other)] for one, other in pairs))


def same(row: str, other: str, *, within: float = 1.0) -> Check:
    """Two rows retrieve alike, up to so many points: an interval that is wider than that decides nothing."""

    def check(evidence: Evidence) -> Judgement:
        findings = evidence.findings
        terms = [Term(1, row), Term(-1, other)]
        found = {column.name: contrast(findings, column, terms) for column in findings.columns}
        there = {name: each for name, each in found.items() if each is not None}
        if not there:
            return _nothing()
        measured = "; ".join(f"{name}: {each.cell()}" for name, each in there.items())
        if any(each.clear and abs(each.mean) > within for each in there.values()):
            return Judgement("does not hold", measured, "there is a clear difference")
        inside = all(
            each.low is not None and each.high is not None and -within <= each.low and each.high <= within
            for each in there.values()
        )
        if inside and len(there) == len(found):
            return Judgement("holds", measured, f"every interval lies within {within:g} points of zero")
        return Judgement("undecided", measured, f"intervals reach further than {within:g} points from zero")

    return check


def first_epoch_beats_last(row: str, *others: str) -> Check:
    """On validation, a row is better after its first epoch than the others are after their last."""

    def check(evidence: Evidence) -> Judgement:
        findings = evidence.findings
        outcomes, words = [], []
        for domain in findings.domains:
            for seed in findings.seeds:
                logs = {name: findings.metrics(name, domain, seed, "evaluation") for name in (row, *others)}
                if not all(logs.values()):
                    continue
                first = next(entry["mean_R@1"] for entry in logs[row] if entry["epoch"] == 1)
                last = {name: logs[name][-1]["mean_R@1"] for name in others}
                outcomes += [first > value for value in last.values()]
                ends = ", ".join(f"{name} {value:.1f}" for name, value in last.items())
                words.append(f"{domain.name}: {first:.1f} after epoch 1, against {ends}")
        if not outcomes:
            return _nothing()
        count = f"true in {sum(outcomes)} of {len(outcomes)} comparisons, on validation, without intervals"
        if all(outcomes):
            return Judgement("holds", "; ".join(words), count)
        return Judgement("does not hold" if not any(outcomes) else "undecided", "; ".join(words), count)

    return check


def numbers(
    what: str,
    values: Callable[[Mapping[str, Any]], Mapping[str, float | None]],
    *,
    at_least: float,
    form: str = "{:.2f}",
) -> Check:
    """A number that was measured, not estimated from a sample, reaches a bound wherever it was measured.

    Args:
        what: the number, in words.
        values: finds it in the data of the study's shows, by the name of the place.
    """

    def check(evidence: Evidence) -> Judgement:
        found = {name: value for name, value in values(evidence.data).items() if value is not None}
        if not found:
            return _nothing()
        measured = f"{what}: " + "; ".join(f"{name} {form.format(value)}" for name, value in found.items())
        reached = [value >= at_least for value in found.values()]
        bound = f"the bound is {form.format(at_least)}; reached in {sum(reached)} of {len(reached)}"
        if all(reached):
            return Judgement("holds", measured, bound)
        return Judgement("undecided" if any(reached) else "does not hold", measured, bound)

    return check


def same_order(rows: Sequence[str]) -> Check:
    """The rows stand in the same order of average R@1 under every seed."""

    def check(evidence: Evidence) -> Judgement:
        findings = evidence.findings
        words, agree = [], []
        for column in findings.columns:
            orders = []
            for seed in findings.seeds:
                found = {row: findings.result(row, column, seed) for row in rows}
                heights = {row: result.metrics["mean_R@1"] for row, result in found.items() if result is not None}
                if len(heights) == len(rows):
                    orders.append(tuple(sorted(heights, key=lambda row: -heights[row])))
            if len(orders) < 2:
                continue
            agree.append(len(set(orders)) == 1)
            words.append(f"{column.name}: {len(set(orders))} orders under {len(orders)} seeds")
        if not agree:
            return _nothing()
        verdict: Verdict = "holds" if all(agree) else "does not hold"
        return Judgement(
            verdict,
            "; ".join(words),
            "the order is the same under every seed"
            if all(agree)
            else "the order changes with the seed: differences between rows are not larger than those between seeds",
        )

    return check


def mean_of(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _nothing() -> Judgement:
    return Judgement("undecided", "not measured", "its runs are missing")


def _words(terms: Sequence[Term]) -> str:
    if len(terms) == 2 and terms[0].k == terms[1].k:
        deep = "" if terms[0].k == 1 else f" at R@{terms[0].k}"
        return f"{terms[0].row} − {terms[1].row}{deep}"
    return " ".join(f"{signed(term.weight)} {term.row} R@{term.k}" for term in terms)


def _place(place: tuple[str, int], sums: Sequence[Sequence[Term]]) -> str:
    column, number = place
    return f"{column}, {_words(sums[number])}" if len(sums) > 1 else column


def _extremes(found: Mapping[tuple[str, int], Difference], most: int = 4) -> list[tuple[tuple[str, int], Difference]]:
    """All of a few, of many the lowest and the highest: the tables have the rest."""
    places = list(found.items())
    if len(places) <= most:
        return places
    order = sorted(places, key=lambda item: item[1].mean)
    return [order[0], order[-1]]
