"""How a claim is judged by the results of a study: four ways, each with the rows that it needs.

Weighted sums of recalls lie above zero (`above`, `better`, `gains`), two rows differ by less than some points
(`within`), a measured number reaches a bound (`reaches`), something is true in every comparison (`always`). Where runs
are missing, or what a claim takes for granted is not so, it is undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from hnclip.evaluate.bootstrap import Estimate
from hnclip.studies.results import Column, StudyResults, Term
from hnclip.studies.tables import difference_cell

Verdict = Literal["holds", "does not hold", "undecided", "not comparable"]
Sum = Sequence[Term]
Values = Callable[[StudyResults], Mapping[str, float | None]]
"""Numbers by the place where they were measured; None where one is missing."""


class Judgement(NamedTuple):
    """A verdict, the numbers behind it, and what it follows from."""

    verdict: Verdict
    measured: str
    reason: str


class ClaimTest(NamedTuple):
    """A way to judge a claim.

    Args:
        rows: of the study whose runs it needs.
        judge: from the results of the study.
    """

    rows: tuple[str, ...]
    judge: Callable[[StudyResults], Judgement]


def judge_signs(found: Sequence[Estimate]) -> Verdict:
    """Whether differences are above zero: by intervals."""
    if found and all(one.low > 0 for one in found):
        return "holds"
    return "does not hold" if any(one.high < 0 for one in found) else "undecided"


def judge_within(found: Sequence[Estimate], points: float) -> Verdict:
    """Whether differences are smaller than some points: an interval that reaches across decides nothing."""
    if found and all(-points <= one.low and one.high <= points for one in found):
        return "holds"
    return "does not hold" if any(one.low > points or one.high < -points for one in found) else "undecided"


def judge_bound(found: Sequence[float], bound: float) -> Verdict:
    """Whether numbers, measured and not estimated from a sample, reach a bound."""
    reached = [value >= bound for value in found]
    if reached and all(reached):
        return "holds"
    return "undecided" if any(reached) or not reached else "does not hold"


def judge_counts(found: Sequence[bool]) -> Verdict:
    """Whether something is true in every comparison: one that is not refutes it."""
    if not found:
        return "undecided"
    return "holds" if all(found) else "does not hold"


def above(*sums: Sum, given: Sequence[Sum] = (), otherwise: str = "", transfers: bool = False) -> ClaimTest:
    """Every weighted sum of recalls is above zero on every column.

    Args:
        given: sums that the claim takes for granted to be above zero; if one is not, nothing is decided.
        otherwise: the reason then.
        transfers: only columns whose gallery is not that of the training domain.
    """

    def judge(results: StudyResults) -> Judgement:
        columns = [one for one in results.columns if not transfers or one.name != one.gallery.name]
        found, missing = _estimates(columns, sums)
        granted, missing_given = _estimates(columns, given)
        measured = _listed(found)
        if not found or missing or missing_given:
            return _undecided(measured, missing + missing_given)
        if given and judge_signs(list(granted.values())) != "holds":
            return Judgement("undecided", measured, otherwise)
        clear = sum(one.low > 0 for one in found.values())
        reason = f"{clear} of {len(found)} intervals lie above zero, {sum(o.high < 0 for o in found.values())} below"
        return Judgement(judge_signs(list(found.values())), measured, reason)

    return ClaimTest(tuple(dict.fromkeys(term.row for terms in (*sums, *given) for term in terms)), judge)


def better(row: str, *others: str, **options: Any) -> ClaimTest:
    """A row has a higher R@1 than each of the others."""
    return gains(*((row, other) for other in others), **options)


def gains(*pairs: tuple[str, str], **options: Any) -> ClaimTest:
    """Of each pair the first row has a higher R@1 than the second."""
    return above(*((Term(1, one), Term(-1, other)) for one, other in pairs), **options)


def within(row: str, other: str, points: float = 1.0) -> ClaimTest:
    """Two rows differ by at most some points of R@1 on every column."""

    def judge(results: StudyResults) -> Judgement:
        found, missing = _estimates(results.columns, [(Term(1, row), Term(-1, other))])
        if not found or missing:
            return _undecided(_listed(found), missing)
        verdict = judge_within(list(found.values()), points)
        said = {"holds": "every interval lies within", "does not hold": "an interval lies beyond"}
        reason = f"{said.get(verdict, 'intervals reach beyond')} {points:g} point{'s' * (points != 1)} of zero"
        return Judgement(verdict, _listed(found), reason)

    return ClaimTest((row, other), judge)


def reaches(
    what: str,
    bound: float,
    values: Values,
    *rows: str,
    digits: str = ".2f",
) -> ClaimTest:
    """A number that was measured reaches a bound wherever it was measured.

    Args:
        what: the number, in words.
        values: the number by place; None where it is missing.
    """

    def judge(results: StudyResults) -> Judgement:
        found = values(results)
        known = {place: value for place, value in found.items() if value is not None}
        measured = f"{what}: {'; '.join(f'{place} {value:{digits}}' for place, value in known.items())}"
        if len(known) < max(1, len(found)):
            return _undecided(measured if known else "", len(found) - len(known))
        verdict = judge_bound(list(known.values()), bound)
        return Judgement(verdict, measured, f"the bound is {bound:{digits}}")

    return ClaimTest(rows, judge)


def always(row: str, *others: str, compare: Callable[[StudyResults], Mapping[str, bool | None]]) -> ClaimTest:
    """Something is true in every comparison, as measured, without intervals.

    Args:
        compare: whether it is, by place; None where runs are missing or the comparison means nothing.
    """

    def judge(results: StudyResults) -> Judgement:
        found = compare(results)
        known = [value for value in found.values() if value is not None]
        failed = [place for place, value in found.items() if value is False]
        measured = f"true in {sum(known)} of {len(known)} comparisons" if known else ""
        measured += f", not in {failed[0]}" if failed else ""
        if len(known) < max(1, len(found)):
            lacking = f"{len(found) - len(known)} comparisons are missing, or with a row that training did not improve"
            return Judgement("undecided", measured, lacking if found else "there is only one seed")
        return Judgement(judge_counts(known), measured, "as measured, without intervals")

    return ClaimTest((row, *others), judge)


def _estimates(columns: Sequence[Column], sums: Sequence[Sum]) -> tuple[dict[str, Estimate], int]:
    """The sums on every column by place, and how many cannot be computed because runs are missing."""
    found, missing = {}, 0
    for column in columns:
        for terms in sums:
            one = column.weighted_sum(terms)
            # A sum over some of the seeds would decide what the others may refute.
            seeds = [len(column.rows[term.row]) for term in terms if None not in column.rows[term.row]]
            missing += one is None or len({*seeds}) > 1
            if one is not None:
                found[f"{column.name}{f', {_words(terms)}' if len(sums) > 1 else ''}"] = one
    return found, missing


def _undecided(measured: str, missing: int) -> Judgement:
    said = f"{missing} number{'s' * (missing != 1)} missing" if missing else "nothing was measured"
    return Judgement("undecided", measured, said)


def _words(terms: Sum) -> str:
    """A − B, or A R@1 − 0.5 · B R@10 where ranks differ."""
    several = {term.k for term in terms} != {1}
    parts = []
    for weight, row, k in terms:
        times = "" if abs(weight) == 1 else f"{abs(weight):g} · "
        parts.append(f"{'−' if weight < 0 else '+'} {times}{row}{f' R@{k}' if several else ''}")
    return " ".join(parts).removeprefix("+ ")


def _listed(found: Mapping[str, Estimate], most: int = 4) -> str:
    """All of a few numbers, of many the lowest and the highest."""
    places = sorted(found.items(), key=lambda item: item[1].mean) if len(found) > most else list(found.items())
    shown = [places[0], places[-1]] if len(places) > most else places
    return "; ".join(f"{place}: {difference_cell(one)}" for place, one in shown)
