"""Verdicts: what follows from numbers, and that every claim names a study and rows that exist."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_studies import evaluation, queries, study_results

from hnclip.config import TrainConfig
from hnclip.evaluate.bootstrap import Estimate
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.claims import CLAIMS, Claim
from hnclip.studies.results import Term
from hnclip.studies.spec import Study, Variant
from hnclip.studies.verdicts import (
    above,
    always,
    better,
    gains,
    judge_bound,
    judge_counts,
    judge_signs,
    judge_within,
    reaches,
    within,
)

UP, ACROSS, DOWN = Estimate(2, 1, 3), Estimate(0.5, -0.5, 1.5), Estimate(-2, -3, -1)
TINY, BEYOND = Estimate(0.1, -0.4, 0.6), Estimate(2, 1.2, 3)
SKILL = {"start": 0.1, "a": 0.9, "b": 0.5, "c": 0.5}
STUDY = Study("duel", "Duel", "Which?", (Variant("start", trained=False), *map(Variant, "abc")), parts=("recalls",))


@pytest.mark.parametrize(
    ("judge", "measured", "verdict"),
    [
        (judge_signs, [UP, UP], "holds"),
        (judge_signs, [UP, ACROSS], "undecided"),
        (judge_signs, [UP, UP, DOWN], "does not hold"),
        (judge_signs, [], "undecided"),
        (judge_signs, [Estimate(9, float("-inf"), float("inf"))], "undecided"),  # no spread to measure
        (lambda found: judge_within(found, 1), [TINY, TINY], "holds"),
        (lambda found: judge_within(found, 1), [TINY, ACROSS], "undecided"),
        (lambda found: judge_within(found, 1), [TINY, BEYOND], "does not hold"),
        (lambda found: judge_within(found, 1), [], "undecided"),
        (lambda found: judge_bound(found, 0.8), [0.8, 0.9], "holds"),
        (lambda found: judge_bound(found, 0.8), [0.7, 0.9], "undecided"),
        (lambda found: judge_bound(found, 0.8), [0.7, 0.1], "does not hold"),
        (judge_counts, [True, True], "holds"),
        (judge_counts, [True, False], "does not hold"),
        (judge_counts, [], "undecided"),
    ],
)
def test_what_numbers_decide(judge, measured, verdict):
    assert judge(measured) == verdict


def results(*, missing=(), skill=SKILL, domains=("x", "y"), seeds=(1, 2)):
    def evaluate(row, domain, gallery, seed):
        found = queries(skill[row], seed + 10 * ord(row[0]), images=200)
        return None if (row, domain, seed) in missing else found

    return study_results(STUDY, evaluate, domains=domains, seeds=seeds)


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        (better("a", "b", "start"), "holds"),
        (better("b", "a"), "does not hold"),
        (gains(("b", "c"), ("a", "c")), "undecided"),
        (above([Term(1, "a"), Term(-0.5, "b"), Term(-0.5, "start")]), "holds"),
        (above([Term(1, "a"), Term(-1, "b")], given=[[Term(1, "b"), Term(-1, "start")]]), "holds"),
        (above([Term(1, "a"), Term(-1, "b")], given=[[Term(1, "b"), Term(-1, "c")]], otherwise="no"), "undecided"),
        (within("a", "b"), "does not hold"),
        (within("b", "c", points=50.0), "holds"),
        (within("b", "c"), "undecided"),
        (better("a", "b", transfers=True), "undecided"),  # there is no column of another domain
    ],
)
def test_rows_are_judged_by_their_differences(test, verdict):
    assert test.judge(results()).verdict == verdict
    lacking = test.judge(results(missing=[(test.rows[0], "y", 2)]))
    assert lacking.verdict == "undecided"  # one missing seed decides nothing, whatever the others say
    assert "missing" in lacking.reason or "nothing" in lacking.reason


def test_numbers_are_listed_with_their_places_and_missing_ones_counted():
    test = reaches("share", 0.5, lambda found: {"x": 0.6, "y": 0.25})
    assert test.judge(results()).measured == "share: x 0.60; y 0.25"
    lacking = reaches("share", 0.5, lambda found: {"x": 0.6, "y": None}).judge(results())
    assert (lacking.verdict, lacking.reason) == ("undecided", "1 number missing")
    assert always("a", compare=lambda found: {"x": True, "y": None}).judge(results()).verdict == "undecided"


def claim(words: str) -> Claim:
    (found,) = (one for one in CLAIMS if words in one.text)
    return found


@pytest.mark.parametrize(
    ("first", "last", "verdict"), [(60.0, 50.0, "holds"), (50.0, 50.0, "does not hold"), (60.0, 10.0, "undecided")]
)
def test_the_first_epoch_against_the_last_of_rows_that_learnt(first, last, verdict):
    def logs(row, domain, seed):
        return [evaluation(0, 10.0), evaluation(1, first if row == "HN-CLIP" else 20.0), evaluation(2, last)]

    assert claim("The first epoch").judge(study_results(STUDIES["convergence"], logs=logs)).verdict == verdict


@pytest.mark.parametrize(("skill", "verdict"), [(0.9, "holds"), (0.5, "does not hold")])
def test_best_under_every_seed(skill, verdict):
    def evaluate(row, domain, gallery, seed):
        return queries(skill if row == "HN-CLIP" else 0.5, seed + len(row))

    found = claim("every seed")
    assert found.judge(study_results(STUDIES["main"], evaluate, seeds=(1, 2))).verdict == verdict
    assert found.judge(study_results(STUDIES["main"], evaluate)).verdict == "undecided"  # one seed


@pytest.mark.parametrize(("zero", "verdict"), [(0.1, "holds"), (0.6, "undecided")])
def test_less_data_is_enough_only_where_all_of_it_helps(zero, verdict):
    def evaluate(row, domain, gallery, seed):
        skill = zero if row == "zero-shot" else 0.9 if row == "HN-CLIP, 20 %" else 0.4
        return queries(skill, len(row), images=200)

    assert claim("a fifth").judge(study_results(STUDIES["samples"], evaluate)).verdict == verdict
    assert claim("a fifth").where == "Table A9, GOAL"  # what the study tests, and no more


def test_numbers_of_other_data_or_hardware_are_not_comparable():
    def measured(kind, domain):
        return {key: {"mean": 0.5} for key in ("pairwise", "hardest")}

    study, cosine = STUDIES["geometry"], claim("between any two")
    drawings = study_results(study, measured=measured)
    assert cosine.judge(drawings).verdict == "not comparable"
    assert "0.50" in cosine.judge(drawings).measured
    paper = study_results(study, measured=measured, domains=("docci",), base=TrainConfig(model="longclip-L.pt"))
    assert cosine.judge(paper).verdict == "does not hold"
    assert cosine.judge(study_results(study)).verdict == "undecided"  # nothing was measured

    stored = {"seconds": {f"{row}/docci/1": [seconds] for row, seconds in (("HN-CLIP", 1.0), ("GOAL", 9.0))}}
    timed = study_results(
        STUDIES["efficiency"], measured=lambda *at: stored, domains=("docci",), base=TrainConfig(model="longclip-L.pt")
    )
    found = claim("as fast as GOAL").judge(timed)
    assert (found.verdict, "9.0" in found.measured) == ("not comparable", True)


def test_every_claim_names_a_study_and_rows_that_it_has():
    for one in CLAIMS:
        study = STUDIES[one.study]
        assert {*one.test.rows} <= {row.name for row in study.rows}, one.text
        assert one.judge(study_results(study, domains=("x", "y"))).verdict == "undecided", one.text
        # Judged by its own rows alone: results of others change nothing.
        alone = replace(study, rows=tuple(replace(row, against=()) for row in study.rows if row.name in one.test.rows))
        if one.study != "gradients":
            one.judge(study_results(alone, lambda *place: queries(0.5, 1), domains=("x", "y")))
