"""Claims against invented ranks: what holds, what does not, and what nobody can tell."""

from __future__ import annotations

import pytest
import torch
from small_studies import findings, queries, result, training

from hnclip.evaluate.compare import compare_ranks
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.checks import (
    Evidence,
    Term,
    better,
    contrast,
    first_epoch_beats_last,
    gains,
    numbers,
    positive,
    same,
    same_order,
)
from hnclip.studies.claims import CLAIMS
from hnclip.studies.study import Study
from hnclip.studies.variant import Variant

STUDY = Study(
    "small",
    "Small",
    "?",
    (Variant("start", trained=False), Variant("a"), Variant("b"), Variant("c")),
    shows=("recalls",),
)
SKILL = {"start": 0.3, "a": 0.9, "b": 0.5, "c": 0.5}


def evidence(tmp_path, skill=SKILL, *, seeds=(1, 2, 3), domains=("x",), missing=(), pictures=60) -> Evidence:
    def measure(row, domain, gallery, seed):
        if row in missing:
            return None
        number = 0 if row == "start" else seed + 10 * list(skill).index(row)
        return result(queries(skill[row], 100 * domains.index(domain) + number, pictures=pictures))

    return Evidence(findings(tmp_path, STUDY, measure, seeds=seeds, domains=domains), {})


def test_a_large_lead_holds_and_its_reverse_does_not(tmp_path):
    found = evidence(tmp_path, domains=("x", "y"))
    assert better("a", "b", "c")(found).verdict == "holds"
    reverse = better("b", "a", "c")(found)
    assert reverse.verdict == "does not hold"
    assert "b − a" in reverse.why
    assert gains(("a", "b"), ("a", "start"))(found).verdict == "holds"


def test_equal_skill_is_undecided_whatever_the_sign(tmp_path):
    found = evidence(tmp_path, {"start": 0.3, "a": 0.5, "b": 0.5, "c": 0.5})
    for pair in (("a", "b"), ("b", "a")):
        judged = better(*pair)(found)
        assert judged.verdict == "undecided"
        assert "0 of 1 clearly above" in judged.why


def test_one_clear_reverse_among_clear_leads_does_not_hold(tmp_path):
    found = evidence(tmp_path, {"start": 0.3, "a": 0.7, "b": 0.3, "c": 0.98})
    judged = better("a", "b", "c")(found)
    assert judged.verdict == "does not hold"
    assert "1 of 2 clearly above zero, 1 clearly below" in judged.why


def test_missing_runs_decide_nothing(tmp_path):
    found = evidence(tmp_path, missing=("b",))
    judged = better("a", "b")(found)
    assert (judged.verdict, judged.measured) == ("undecided", "not measured")
    assert better("a", "b", "c")(found).verdict == "undecided"  # a clear lead over one of two is not the claim


def test_a_contrast_of_two_rows_is_their_paired_difference(tmp_path):
    found = evidence(tmp_path, seeds=(1,)).findings
    column = found.columns[0]
    a, b = (found.result(row, column, 1).queries for row in ("a", "b"))
    measured = contrast(found, column, [Term(1, "a"), Term(-1, "b")])
    pair = compare_ranks(a.ranks, b.ranks, groups=a.groups)
    assert measured.mean == pytest.approx(sum(each.difference.mean for each in pair) / 2)
    assert contrast(found, column, [Term(1, "a"), Term(-1, "a")]) == (0, 0, 0)


def test_a_contrast_adds_weighted_recalls_of_any_depth(tmp_path):
    found = evidence(tmp_path).findings
    column = found.columns[0]
    terms = [Term(1, "a", 1), Term(-1, "b", 1), Term(-0.5, "a", 10), Term(2, "start", 5)]
    expected = torch.tensor(0.0)
    for seed in found.seeds:
        for weight, row, k in terms:
            metrics = found.result(row, column, seed if row != "start" else 1).metrics
            expected += weight * metrics[f"mean_R@{k}"] / len(found.seeds)
    assert contrast(found, column, terms).mean == pytest.approx(float(expected), abs=1e-4)
    assert positive(terms)(Evidence(found, {})).verdict == "holds"


def test_alike_needs_a_narrow_interval(tmp_path):
    wide = evidence(tmp_path / "wide", {"start": 0.3, "a": 0.5, "b": 0.5, "c": 0.5})
    assert same("a", "b")(wide).verdict == "undecided"
    assert same("a", "a")(wide).verdict == "holds"
    assert same("a", "b", within=100)(wide).verdict == "holds"
    assert same("a", "b")(evidence(tmp_path / "apart")).verdict == "does not hold"


def test_first_epoch_against_last_epochs(tmp_path):
    found = evidence(tmp_path, seeds=(1,))
    domain = found.findings.domains[0]
    training(found.findings.home("a", domain, 1), best=1, epochs={0: 10.0, 1: 60.0, 2: 50.0})
    check = first_epoch_beats_last("a", "b", "c")
    assert check(found).verdict == "holds"  # the others end at 50
    training(found.findings.home("b", domain, 1), best=2, epochs={0: 90.0, 1: 90.0, 2: 70.0})
    assert check(found).verdict == "undecided"
    training(found.findings.home("c", domain, 1), best=2, epochs={1: 0.0, 2: 60.0})
    assert check(found).verdict == "does not hold"  # level is not above


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({"x": 0.9, "y": 0.8}, "holds"),
        ({"x": 0.9, "y": 0.7}, "undecided"),
        ({"x": 0.1, "y": None}, "does not hold"),
        ({}, "undecided"),
    ],
)
def test_numbers_against_a_bound(values, verdict):
    assert numbers("share", lambda data: data["v"], at_least=0.8)(Evidence(None, {"v": values})).verdict == verdict


def test_orders_under_seeds(tmp_path):
    clear = evidence(tmp_path / "clear", {"start": 0.3, "a": 0.95, "b": 0.5, "c": 0.05})
    assert same_order(("a", "b", "c"))(clear).verdict == "holds"
    alike = evidence(tmp_path / "alike", {"start": 0.3, "a": 0.5, "b": 0.5, "c": 0.5}, seeds=(1, 2, 3, 4))
    assert same_order(("a", "b", "c"))(alike).verdict == "does not hold"


def test_every_claim_names_a_study_and_rows_that_it_has(tmp_path):
    """A claim about a row that its study lacks would raise."""
    for claim in CLAIMS:
        study = STUDIES[claim.study]
        domains = ("x",) if study.columns == "own" else ("x", "y")
        found = findings(tmp_path / claim.study, study, lambda *place: None, domains=domains)
        data = {"gradients": {"runs": {}}, "efficiency": {"rows": []}, "geometry": {"domains": {}}}
        assert claim.check(Evidence(found, data)).verdict == "undecided"
