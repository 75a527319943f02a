"""How a claim is held against what was measured: it holds, it does not, or this size cannot tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hnclip.studies.findings import Column, Findings
from hnclip.studies.measured import runs_of
from hnclip.studies.statistics import MEAN, Difference, Weighted, level, weighted_sums

Verdict = Literal["holds", "does not hold", "undecided"]

NOT_ABOVE_UNTRAINED = "what it is measured against is not above the untrained model here"
_NOT_MEASURED = "not measured"


class Judgement(NamedTuple):
    """A verdict, the numbers behind it, what it follows from, and whether all was there that it takes: where runs are
    missing it is undecided for want of them, not of size."""

    verdict: Verdict
    measured: str
    why: str
    complete: bool = True


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


Sum = Sequence[Term]


class Provided(NamedTuple):
    """What a claim takes for granted: sums that are clearly above zero on every column, and what to say if they are
    not. Nothing is decided then."""

    sums: Sequence[Sum]
    otherwise: str


class Number(NamedTuple):
    """A number that a show measured, None if it could not, and of how many measurements it is."""

    value: float | None
    measurements: int | None = None


def contrast(findings: Findings, column: Column, terms: Sum) -> Difference | None:
    """The weighted sum of recalls with an interval over queries and seeds; None if runs are missing.

    Relations:
        `weighted_sums` of the rows' runs, the mean of both directions.
    """
    found = weighted_sums([Weighted(term.weight, runs_of(findings, term.row, column), term.k) for term in terms])
    return None if found is None else found[MEAN]


def positive(*sums: Sum, provided: Provided | None = None) -> Check:
    """Every one of these sums is above zero on every column of the study. It holds if all intervals lie above zero, and
    does not if one lies below."""

    def check(evidence: Evidence) -> Judgement:
        findings = evidence.findings
        asked = [*sums, *(provided.sums if provided is not None else ())]
        found = _contrasts(findings, sums)
        measured = _listed(found, sums)
        if missing := _missing(findings, (term.row for terms in asked for term in terms)):
            return Judgement("undecided", measured, missing, complete=False)
        if provided is not None:
            granted = _contrasts(findings, provided.sums)
            lacking = {place: each for place, each in granted.items() if not (each.clear and each.mean > 0)}
            if lacking:
                why = f"{provided.otherwise} ({_listed(lacking, provided.sums, named=True)})"
                return Judgement("undecided", measured, why)
        above = [each for each in found.values() if each.clear and each.mean > 0]
        below = [place for place, each in found.items() if each.clear and each.mean < 0]
        total = f"{len(above)} of {len(found)} clearly above zero, {len(below)} clearly below"
        if len(above) == len(found):
            return Judgement("holds", measured, f"every interval lies above zero ({total})")
        if below:
            return Judgement(
                "does not hold", measured, f"it is the other way round in {_place(below[0], sums)} ({total})"
            )
        return Judgement("undecided", measured, f"intervals include zero ({total})")

    return check


def better(row: str, *others: str, k: int = 1, provided: Provided | None = None) -> Check:
    """A row retrieves better than each of the others."""
    return positive(*([Term(1, row, k), Term(-1, other, k)] for other in others), provided=provided)


def gains(*pairs: tuple[str, str]) -> Check:
    """Of each pair the first retrieves better than the second."""
    return positive(*([Term(1, one), Term(-1, other)] for one, other in pairs))


def same(row: str, other: str, *, within: float = 1.0) -> Check:
    """Two rows retrieve alike, up to so many points. It holds if every interval lies within them and does not if one
    lies beyond: an interval that reaches from the one into the other decides nothing."""

    def check(evidence: Evidence) -> Judgement:
        findings = evidence.findings
        sums = [[Term(1, row), Term(-1, other)]]
        found = _contrasts(findings, sums)
        measured = _listed(found, sums)
        if missing := _missing(findings, (row, other)):
            return Judgement("undecided", measured, missing, complete=False)
        points = f"{within:g} {'point' if within == 1 else 'points'}"
        ends = [(each.low, each.high) for each in found.values() if each.low is not None and each.high is not None]
        if any(low > within or high < -within for low, high in ends):
            return Judgement("does not hold", measured, f"an interval lies further than {points} from zero")
        if len(ends) == len(found) and all(-within <= low and high <= within for low, high in ends):
            return Judgement("holds", measured, f"every interval lies within {points} of zero")
        return Judgement("undecided", measured, f"intervals reach further than {points} from zero")

    return check


def first_epoch_beats_last(row: str, *others: str) -> Check:
    """On validation, a row is better after its first epoch than the others are after their last; provided that they are
    better then than before training, which is no feat to beat otherwise."""

    def check(evidence: Evidence) -> Judgement:
        findings = evidence.findings
        outcomes, words, untaught = [], [], []
        for domain in findings.domains:
            for seed in findings.seeds:
                logs = {name: findings.metrics(name, domain, seed, "evaluation") for name in (row, *others)}
                if not all(logs.values()):
                    continue
                recalls = {
                    name: {entry["epoch"]: level(entry["mean_R@1"]) for entry in log} for name, log in logs.items()
                }
                place = domain.name if len(findings.seeds) == 1 else f"{domain.name}, seed {seed}"
                last = {name: recalls[name][max(recalls[name])] for name in others}
                outcomes += [recalls[row][1] > value for value in last.values()]
                untaught += [
                    f"{place}: {name} {value:.1f} after {recalls[name][0]:.1f}"
                    for name, value in last.items()
                    if value <= recalls[name][0]
                ]
                ends = ", ".join(f"{name} {value:.1f}" for name, value in last.items())
                words.append(f"{place}: {recalls[row][1]:.1f} after epoch 1, against {ends}")
        measured = "; ".join(words) or _NOT_MEASURED
        if missing := _missing_logs(findings, (row, *others), "evaluation"):
            return Judgement("undecided", measured, missing, complete=False)
        if untaught:
            first = f"{len(untaught)} of {len(outcomes)}, for example {untaught[0]}"
            return Judgement("undecided", measured, f"{NOT_ABOVE_UNTRAINED} ({first})")
        count = f"true in {sum(outcomes)} of {len(outcomes)} comparisons, on validation, without intervals"
        if all(outcomes):
            return Judgement("holds", measured, count)
        return Judgement("does not hold" if not any(outcomes) else "undecided", measured, count)

    return check


def numbers(
    what: str,
    values: Callable[[Mapping[str, Any]], Mapping[str, Number]],
    *,
    at_least: float,
    form: str = "{:.2f}",
    logs: tuple[str, Sequence[str]] | None = None,
) -> Check:
    """A number that was measured, not estimated from a sample, reaches a bound wherever it was measured.

    Args:
        what: the number, in words.
        values: finds it in the data of the study's shows, by the name of the place.
        logs: a kind of entries, and the rows whose runs must all have logged some.
    """

    def check(evidence: Evidence) -> Judgement:
        found = values(evidence.data)
        there = {name: (one.value, one.measurements) for name, one in found.items() if one.value is not None}
        measured = f"{what}: " + "; ".join(
            f"{name} {form.format(value)}{'' if count is None else f' (of {count:,} measurements)'}"
            for name, (value, count) in there.items()
        )
        missing = None if logs is None else _missing_logs(evidence.findings, logs[1], logs[0])
        if missing is None and len(there) < max(1, len(found)):
            missing = _count(len(found) - len(there), len(found), "numbers")
        if missing is not None:
            return Judgement("undecided", measured if there else _NOT_MEASURED, missing, complete=False)
        reached = [value >= at_least for value, _ in there.values()]
        bound = f"the bound is {form.format(at_least)}; reached in {sum(reached)} of {len(reached)}"
        if all(reached):
            return Judgement("holds", measured, bound)
        return Judgement("undecided" if any(reached) else "does not hold", measured, bound)

    return check


def best_under_every_seed(row: str, *others: str) -> Check:
    """Under every seed a row has the highest average R@1 on every column. A tie is not the highest."""

    def check(evidence: Evidence) -> Judgement:
        findings = evidence.findings
        words, best = [], []
        for column in findings.columns:
            outcomes = []
            for seed in findings.seeds:
                found = {name: findings.result(name, column, seed) for name in (row, *others)}
                heights = {name: level(one.metrics["mean_R@1"]) for name, one in found.items() if one is not None}
                if len(heights) == len(found):
                    outcomes.append(all(heights[row] > heights[other] for other in others))
            words.append(f"{column.name}: best under {sum(outcomes)} of {len(outcomes)} seeds")
            best += outcomes
        measured = "; ".join(words) if best else _NOT_MEASURED
        if missing := _missing(findings, (row, *others)):
            return Judgement("undecided", measured, missing, complete=False)
        if len(findings.seeds) < 2:
            return Judgement("undecided", measured, "there is but one seed", complete=False)
        why = f"the highest average R@1 in {sum(best)} of {len(best)}, as measured, without intervals"
        return Judgement("holds" if all(best) else "does not hold", measured, why)

    return check


def _contrasts(findings: Findings, sums: Sequence[Sum]) -> dict[tuple[str, int], Difference]:
    """Those that there are, by column and number of the sum."""
    found = {
        (column.name, number): contrast(findings, column, terms)
        for column in findings.columns
        for number, terms in enumerate(sums)
    }
    return {place: each for place, each in found.items() if each is not None}


def _missing(findings: Findings, rows: Iterable[str]) -> str | None:
    """How many of the runs that a check needs are not there, or not evaluated; None if all are."""
    wanted: dict[tuple[str, str | None, int], bool] = {}
    for row in dict.fromkeys(rows):
        for column in findings.columns:
            trained = findings.study.row(row).trained
            for seed in findings.seeds if trained else findings.seeds[:1]:
                run = (row, column.domain.name if trained else None, seed)
                wanted[run] = wanted.get(run, True) and findings.result(row, column, seed) is not None
    return _count(len(wanted) - sum(wanted.values()), len(wanted), "runs")


def _missing_logs(findings: Findings, rows: Iterable[str], kind: str) -> str | None:
    """The same of runs that must have logged entries of a kind."""
    logged = [
        bool(findings.metrics(row, domain, seed, kind))
        for row in rows
        for domain in findings.domains
        for seed in findings.seeds
    ]
    return _count(len(logged) - sum(logged), len(logged), "runs")


def _count(missing: int, wanted: int, what: str) -> str | None:
    if not wanted:
        return "nothing was measured"
    return f"{missing} of {wanted} {what} are missing" if missing else None


def _words(terms: Sum) -> str:
    """A − B, or A R@1 − 0.5 · B R@10 where ranks differ."""
    depths = {term.k for term in terms}
    parts = []
    for weight, row, k in terms:
        times = "" if abs(weight) == 1 else f"{abs(weight):g} · "
        parts.append(f"{'−' if weight < 0 else '+'} {times}{row}{f' R@{k}' if depths != {1} else ''}")
    return " ".join(parts).removeprefix("+ ")


def _place(place: tuple[str, int], sums: Sequence[Sum]) -> str:
    column, number = place
    return f"{column}, {_words(sums[number])}" if len(sums) > 1 else column


def _listed(found: Mapping[tuple[str, int], Difference], sums: Sequence[Sum], *, named: bool = False) -> str:
    """Sums with their places, the number of the sum in words where there are several, or where it must be told."""
    if not found:
        return _NOT_MEASURED
    return "; ".join(
        f"{column}{f', {_words(sums[number])}' if named or len(sums) > 1 else ''}: {each.cell()}"
        for (column, number), each in _extremes(found)
    )


def _extremes(found: Mapping[tuple[str, int], Difference], most: int = 4) -> list[tuple[tuple[str, int], Difference]]:
    """All of a few, of many the lowest and the highest: the tables have the rest."""
    places = list(found.items())
    if len(places) <= most:
        return places
    order = sorted(places, key=lambda item: item[1].mean)
    return [order[0], order[-1]]
