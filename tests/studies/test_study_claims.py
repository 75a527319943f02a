"""Verdicts: what follows from numbers, and that every claim can be judged by its study."""

from __future__ import annotations

from typing import Any

import pytest
from small_studies import queries, study_results

from hnclip.evaluation.bootstrap import Estimate
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.claims import CLAIMS
from hnclip.studies.results import StudyResults
from hnclip.studies.spec import Study, Variant
from hnclip.studies.verdicts import Measured, Test, gains, judge, within

UP, ACROSS, DOWN = Estimate(2, 1, 3), Estimate(0.5, -0.5, 1.5), Estimate(-2, -3, -1)
STUDY = Study("duel", "Duel", "Which?", (Variant("start", trained=False), *map(Variant, "abc")), parts=("recalls",))


@pytest.mark.parametrize(
    ("margins", "verdict"),
    [
        ([UP, UP], "holds"),
        ([UP, ACROSS], "undecided"),
        ([UP, ACROSS, DOWN], "does not hold"),
        ([DOWN, None], "undecided"),  # a missing run may be bad luck of the others
        ([], "undecided"),
    ],
)
def test_what_numbers_decide(margins: list[Estimate | None], verdict: str) -> None:
    found = {str(n): None if one is None else Measured(f"{one.mean}", one) for n, one in enumerate(margins)}
    assert judge(found).verdict == verdict


def results(*missing: tuple[str, str, int]) -> StudyResults:
    skill = {"start": 0.1, "a": 0.9, "b": 0.5, "c": 0.5}

    def evaluate(row: str, domain: str, gallery: str, seed: int) -> Any:
        found = queries(skill[row], seed + 10 * ord(row[0]), images=200)
        return None if (row, domain, seed) in missing else found

    return study_results(STUDY, evaluate, domains=("x", "y"), seeds=(1, 2))


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        (gains(("a", "b"), ("a", "start")), "holds"),
        (gains(("b", "a")), "does not hold"),
        (gains(("a", "c"), ("b", "c")), "undecided"),
        (within("a", "b"), "does not hold"),
        (within("a", "b", points=90.0), "holds"),
        (gains(("a", "b"), transfers=True), "undecided"),  # there is no column of another domain
    ],
)
def test_rows_are_judged_by_their_differences(test: Test, verdict: str) -> None:
    assert judge(test(results())).verdict == verdict
    # A missing seed of a row decides nothing, also where every other row lacks it too.
    assert judge(test(results(*((row, "y", 2) for row in "abc")))).verdict == "undecided"


@pytest.mark.parametrize("study", CLAIMS)
def test_without_results_every_claim_is_undecided(study: str) -> None:
    for one in CLAIMS[study]:
        assert one.judge(study_results(STUDIES[study], domains=("x", "y"))).verdict == "undecided", one.text
