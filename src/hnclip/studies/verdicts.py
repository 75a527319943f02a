"""How a claim is judged: by measured numbers, each with the interval of its margin, how far it exceeds the claimed one.

A claim holds if all margins lie above zero, and does not hold if one lies below. If one contains zero, or runs are
missing, the claim is undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from hnclip.evaluation.bootstrap import Estimate
from hnclip.studies.results import Column, StudyResults, Term
from hnclip.studies.tables import difference_cell

Verdict = Literal["holds", "does not hold", "undecided", "not comparable"]
Sum = Sequence[Term]
_MOST = 4  # numbers that are all shown; of more, the lowest and the highest


class Measured(NamedTuple):
    """A number as it is shown, and its margin, of no width if the number has no interval."""

    shown: str
    margin: Estimate


Values = Callable[[StudyResults], Mapping[str, float | None]]
"""Numbers by the place where they were measured; None where runs are missing."""
Test = Callable[[StudyResults], Mapping[str, Measured | None]]
"""What a claim says of the results, by the place where it was measured; None where runs are missing."""


class Judgement(NamedTuple):
    """A verdict, the numbers behind it, and what it follows from."""

    verdict: Verdict
    measured: str
    reason: str


def judge(found: Mapping[str, Measured | None]) -> Judgement:
    known = {place: one for place, one in found.items() if one is not None}
    shown = sorted(known, key=lambda place: known[place].margin.mean) if len(known) > _MOST else [*known]
    shown = [shown[0], shown[-1]] if len(shown) > _MOST else shown
    measured = "; ".join(f"{place}: {known[place].shown}" for place in shown)
    if not found or len(known) < len(found):
        missing = f"{len(found) - len(known)} of {len(found)} numbers are missing"
        return Judgement("undecided", measured, missing if found else "nothing to compare")
    above = sum(one.margin.low > 0 for one in known.values())
    below = sum(one.margin.high < 0 for one in known.values())
    verdict: Verdict = "holds" if above == len(known) else "does not hold" if below else "undecided"
    return Judgement(verdict, measured, f"{above} of {len(known)} numbers for it, {below} against it")


def above(*sums: Sum, transfers: bool = False) -> Test:
    """Every weighted sum of recalls is above zero on every column.

    Args:
        transfers: only columns whose gallery is not that of the training domain.
    """

    def test(results: StudyResults) -> dict[str, Measured | None]:
        columns = [one for one in results.columns if not transfers or one.name != one.gallery.name]
        found: dict[str, Measured | None] = {}
        for column in columns:
            for terms in sums:
                one = _complete_sum(results, column, terms)
                place = f"{column.name}, {_words(terms)}" if len(sums) > 1 else column.name
                found[place] = None if one is None else Measured(difference_cell(one), one)
        return found

    return test


def gains(*pairs: tuple[str, str], transfers: bool = False) -> Test:
    """Of each pair the first row has a higher R@1 than the second."""
    return above(*((Term(1, one), Term(-1, other)) for one, other in pairs), transfers=transfers)


def within(row: str, other: str, points: float = 1.0) -> Test:
    """Two rows differ by less than some points of R@1 on every column."""

    def test(results: StudyResults) -> dict[str, Measured | None]:
        found: dict[str, Measured | None] = {}
        for column in results.columns:
            one = _complete_sum(results, column, (Term(1, row), Term(-1, other)))
            if one is None:
                found[column.name] = None
                continue
            nearest = max(0.0, one.low, -one.high)
            margin = Estimate(points - abs(one.mean), points - max(-one.low, one.high), points - nearest)
            found[column.name] = Measured(difference_cell(one), margin)
        return found

    return test


def exceeds(values: Values, bound: float = 0.0, show: str = ".2f") -> Test:
    """Numbers that are measured and not estimated from a sample exceed a bound.

    Args:
        values: by place; None where runs are missing.
        show: their format.
    """

    def test(results: StudyResults) -> dict[str, Measured | None]:
        return {
            place: None
            if value is None
            else Measured(f"{value:{show}}".replace("%", " %"), Estimate(*[value - bound] * 3))
            for place, value in values(results).items()
        }

    return test


def _complete_sum(results: StudyResults, column: Column, terms: Sum) -> Estimate | None:
    """None if a row lacks a seed: a sum over some of the seeds would decide what the others may refute."""
    rows = [column.rows[term.row] for term in terms]
    complete = all(None in row or len(row) == len(results.seeds) for row in rows)
    return column.weighted_sum(terms) if complete else None


def _words(terms: Sum) -> str:
    """A − B, or A R@1 − 0.5 · B R@10 where ranks differ."""
    several = {term.k for term in terms} != {1}
    parts = []
    for weight, row, k in terms:
        times = "" if abs(weight) == 1 else f"{abs(weight):g} · "
        parts.append(f"{'−' if weight < 0 else '+'} {times}{row}{f' R@{k}' if several else ''}")
    return " ".join(parts).removeprefix("+ ")
