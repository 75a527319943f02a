"""Verdicts: what follows from numbers, and that every claim can be judged by its study."""

from __future__ import annotations

from typing import Any

import pytest
from small_studies import evaluation, queries, study_results

from hnclip.config import TrainConfig
from hnclip.evaluation.bootstrap import Estimate
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.claims import CLAIMS, Claim
from hnclip.studies.results import StudyResults, Term
from hnclip.studies.spec import Study, Variant
from hnclip.studies.verdicts import Measured, Test, above, gains, judge, within

UP, ACROSS, DOWN = Estimate(2, 1, 3), Estimate(0.5, -0.5, 1.5), Estimate(-2, -3, -1)
STUDY = Study("duel", "Duel", "Which?", (Variant("start", trained=False), *map(Variant, "abc")), parts=("recalls",))


@pytest.mark.parametrize(
    ("margins", "verdict"),
    [
        ([UP, UP], "holds"),
        ([UP, ACROSS], "undecided"),
        ([UP, ACROSS, DOWN], "does not hold"),
        ([UP, None], "undecided"),
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
        (above([Term(1, "a"), Term(-0.5, "b"), Term(-0.5, "start")]), "holds"),
        (within("a", "b"), "does not hold"),
        (within("a", "b", points=90.0), "holds"),
        (gains(("a", "b"), transfers=True), "undecided"),  # there is no column of another domain
    ],
)
def test_rows_are_judged_by_their_differences(test: Test, verdict: str) -> None:
    assert judge(test(results())).verdict == verdict
    # A missing seed of a row decides nothing, also where every other row lacks it too.
    assert judge(test(results(*((row, "y", 2) for row in "abc")))).verdict == "undecided"


def claim(study: str, words: str) -> Claim:
    (found,) = (one for one in CLAIMS[study] if words in one.text)
    return found


@pytest.mark.parametrize(
    ("first", "last", "verdict"), [(60.0, 50.0, "holds"), (50.0, 55.0, "does not hold"), (60.0, 10.0, "undecided")]
)
def test_the_first_epoch_against_the_last_of_rows_that_learnt(first: float, last: float, verdict: str) -> None:
    def logs(row: str, domain: str, seed: int) -> list[dict[str, Any]]:
        return [evaluation(0, 10.0), evaluation(1, first if row == "HN-CLIP" else 20.0), evaluation(2, last)]

    found = study_results(STUDIES["convergence"], logs=logs)
    assert claim("convergence", "first epoch").judge(found).verdict == verdict


def test_numbers_of_other_data_or_hardware_are_not_comparable() -> None:
    cosines = {key: {"mean": 0.5} for key in ("pairwise", "hardest")}
    seconds = {"HN-CLIP/docci/1": [1.0], "GOAL/docci/1": [9.0]}
    paper: dict[str, Any] = {"domains": ("docci",), "base": TrainConfig(model="longclip-L.pt")}
    drawings, docci = (study_results(STUDIES["geometry"], measured=lambda *at: cosines, **one) for one in ({}, paper))
    timed = study_results(STUDIES["efficiency"], measured=lambda *at: {"seconds": seconds}, **paper)
    cosine = claim("geometry", "any two")
    assert cosine.judge(drawings)[:2] == ("not comparable", "a: 0.50")
    assert cosine.judge(docci).verdict == "does not hold"
    assert claim("efficiency", "as fast as GOAL").judge(timed)[:2] == ("not comparable", "docci: 9.0")


@pytest.mark.parametrize("study", CLAIMS)
def test_without_results_every_claim_is_undecided(study: str) -> None:
    for one in CLAIMS[study]:
        assert one.judge(study_results(STUDIES[study], domains=("x", "y"))).verdict == "undecided", one.text
