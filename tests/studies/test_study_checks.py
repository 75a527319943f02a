"""Claims against invented ranks: what holds, what does not, and what nobody can tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_studies import findings, queries, result, training

from hnclip.evaluate.compare import compare_ranks
from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.checks import (
    NOT_ABOVE_UNTRAINED,
    Evidence,
    Number,
    Provided,
    Term,
    best_under_every_seed,
    better,
    contrast,
    first_epoch_beats_last,
    gains,
    numbers,
    positive,
    same,
)
from hnclip.studies.claims import CLAIMS
from hnclip.studies.statistics import MEAN, Difference, paired_differences
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
    """Args:
    missing: rows, or rows with a domain and a seed, that are not there.
    """

    def measure(row, domain, gallery, seed):
        if row in missing or (row, domain, seed) in missing:
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
    assert (judged.why, judged.complete) == ("3 of 6 runs are missing", False)
    assert better("a", "b", "c")(found).verdict == "undecided"  # a clear lead over one of two is not the claim


def test_one_missing_seed_decides_nothing_whatever_the_others_say(tmp_path):
    found = evidence(tmp_path, domains=("x", "y"), missing=[("b", "y", 2)])
    for row in "ab":
        for domain in found.findings.domains:
            for seed in found.findings.seeds:
                if (home := found.findings.home(row, domain, seed)) is not None:
                    training(home, best=1, epochs={0: 10.0, 1: 50.0, 2: 40.0})
    checks = (
        better("a", "b"),
        better("b", "a"),
        same("a", "b"),
        best_under_every_seed("a", "b"),
        first_epoch_beats_last("a", "b"),
    )
    for check in checks:
        judged = check(found)
        assert (judged.verdict, judged.why, judged.complete) == ("undecided", "1 of 12 runs are missing", False)
        assert "x" in judged.measured  # what there is is shown
    assert better("a", "c")(found).verdict == "holds"  # what a claim does not need may be missing
    assert better("a", "c")(found).complete


def test_nothing_is_decided_where_a_claim_takes_too_much_for_granted(tmp_path):
    """a beats b; but b is below the untrained model, c above it."""
    found = evidence(tmp_path, {"start": 0.5, "a": 0.95, "b": 0.1, "c": 0.8}, domains=("x", "y"))

    def granted(*rows):
        return Provided([[Term(1, row), Term(-1, "start")] for row in rows], NOT_ABOVE_UNTRAINED)

    assert better("a", "b")(found).verdict == "holds"
    assert better("a", "b", provided=granted("c"))(found).verdict == "holds"
    for rows in ("b", "bc", "cb"):
        judged = better("a", "b", provided=granted(*rows))(found)
        assert (judged.verdict, judged.complete) == ("undecided", True)
        assert judged.why.startswith(f"{NOT_ABOVE_UNTRAINED} (x, b − start: -")
        assert "c − start" not in judged.why
    assert better("b", "a", provided=granted("b"))(found).verdict == "undecided"
    assert better("b", "a", provided=granted("c"))(found).verdict == "does not hold"
    level = Provided([[Term(1, "a"), Term(-1, "a")]], "nothing")  # not below is not clearly above
    assert better("a", "b", provided=level)(found).verdict == "undecided"


def test_what_is_taken_for_granted_must_be_measured(tmp_path):
    found = evidence(tmp_path, missing=("start",))
    granted = Provided([[Term(1, "b"), Term(-1, "start")]], NOT_ABOVE_UNTRAINED)
    judged = better("a", "b", provided=granted)(found)
    assert (judged.verdict, judged.why, judged.complete) == ("undecided", "1 of 7 runs are missing", False)


def test_a_contrast_of_two_rows_is_their_paired_difference(tmp_path):
    found = evidence(tmp_path, seeds=(1,)).findings
    column = found.columns[0]
    a, b = (found.result(row, column, 1) for row in ("a", "b"))
    measured = contrast(found, column, [Term(1, "a"), Term(-1, "b")])
    pair = compare_ranks(a.ranks, b.ranks, groups=a.groups)
    assert measured.mean == pytest.approx(sum(each.difference.mean for each in pair) / 2)
    assert contrast(found, column, [Term(1, "a"), Term(-1, "a")]) == (0, 0, 0)
    assert measured == paired_differences({1: a}, {1: b}, 1)[MEAN]


def test_a_contrast_refuses_rows_of_different_galleries(tmp_path):
    def measure(row, domain, gallery, seed):
        return result(queries(0.5, 1, pictures=58 if row == "b" else 60))

    found = findings(tmp_path, STUDY, measure)
    with pytest.raises(ValueError, match="different galleries"):
        contrast(found, found.columns[0], [Term(1, "a"), Term(-1, "b")])


def test_a_contrast_of_one_family_has_no_interval_and_decides_nothing(tmp_path):
    def alone(row, domain, gallery, seed):
        found = queries(SKILL[row], 1, pictures=60)
        return replace(result(found), groups=torch.zeros(60, dtype=torch.long))

    found = findings(tmp_path, STUDY, alone)
    measured = contrast(found, found.columns[0], [Term(1, "a"), Term(-1, "b")])
    assert (measured.low, measured.high) == (None, None)
    assert measured.mean > 0
    for check in (better("a", "b"), better("b", "a"), same("a", "b"), same("a", "a")):
        assert check(Evidence(found, {})).verdict == "undecided"


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


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Difference(2.5, 1.1, 4.0), "does not hold"),
        (Difference(-2.5, -4.0, -1.1), "does not hold"),
        (Difference(1.5, 0.2, 2.8), "undecided"),  # a clear difference, but it may be one of half a point
        (Difference(-1.5, -2.8, -0.2), "undecided"),
        (Difference(0.5, 0.1, 0.9), "holds"),
        (Difference(0.0, -1.0, 1.0), "holds"),
    ],
)
def test_alike_is_refuted_by_an_interval_beyond_the_points_alone(tmp_path, monkeypatch, found, verdict):
    monkeypatch.setattr("hnclip.studies.checks.contrast", lambda *asked: found)
    assert same("a", "b")(evidence(tmp_path)).verdict == verdict


def test_first_epoch_against_last_epochs(tmp_path):
    found = evidence(tmp_path, seeds=(1,))
    domain = found.findings.domains[0]

    def epochs(row, *recalls):
        training(found.findings.home(row, domain, 1), best=1, epochs=dict(enumerate(recalls)))

    epochs("a", 10.0, 60.0, 50.0)
    epochs("b", 10.0, 40.0, 50.0)
    epochs("c", 10.0, 40.0, 50.0)
    check = first_epoch_beats_last("a", "b", "c")
    assert check(found).verdict == "holds"
    epochs("b", 10.0, 90.0, 70.0)
    assert check(found).verdict == "undecided"
    assert "1 of 2 comparisons" in check(found).why
    epochs("c", 10.0, 0.0, 60.0 + 1e-14)
    assert check(found).verdict == "does not hold"  # level is not above


@pytest.mark.parametrize("last", [49.0, 50.0, 50.0 + 1e-14])
def test_a_last_epoch_that_training_did_not_improve_is_no_measure(tmp_path, last):
    found = evidence(tmp_path, seeds=(1,))
    for row, recalls in {"a": (50.0, 60.0, 60.0), "b": (50.0, 52.0, 55.0), "c": (50.0, 52.0, last)}.items():
        home = found.findings.home(row, found.findings.domains[0], 1)
        training(home, best=1, epochs=dict(enumerate(recalls)))
    assert first_epoch_beats_last("a", "b")(found).verdict == "holds"
    judged = first_epoch_beats_last("a", "b", "c")(found)
    assert judged.verdict == "undecided"
    assert judged.why == f"{NOT_ABOVE_UNTRAINED} (1 of 2, for example x: c {last:.1f} after 50.0)"


@pytest.mark.parametrize(
    ("values", "verdict", "complete"),
    [
        ({"x": 0.9, "y": 0.8}, "holds", True),
        ({"x": 0.9, "y": 0.7}, "undecided", True),
        ({"x": 0.1, "y": 0.7}, "does not hold", True),
        ({"x": 0.9, "y": None}, "undecided", False),
        ({"x": 0.1, "y": None}, "undecided", False),
        ({}, "undecided", False),
    ],
)
def test_numbers_against_a_bound(values, verdict, complete):
    given = {name: Number(value) for name, value in values.items()}
    judged = numbers("share", lambda data: data["v"], at_least=0.8)(Evidence(None, {"v": given}))
    assert (judged.verdict, judged.complete) == (verdict, complete)


def test_numbers_tell_of_how_many_measurements_they_are():
    judged = numbers("share", lambda data: data, at_least=0.8)(Evidence(None, {"x": Number(0.9, 1234)}))
    assert judged.measured == "share: x 0.90 (of 1,234 measurements)"


def gradient_data(**changes):
    """As the show of gradients has it: one batch of a small share has everything, the whole data has nothing."""
    small = {
        "measurements": 1,
        "measurements_first_epoch": 1,
        "infonce_solved_first_epoch": 1.0,
        "infonce_zero": 1.0,
        "ratio": 1e6,
        "cosine_positive": 1.0,
    }
    whole = dict.fromkeys(small, 0.1) | {"measurements": 24, "measurements_first_epoch": 12}
    return {"gradients": {"runs": {"x, 5 %": small, "x, 100 %": whole | changes}, "all": whole | changes}}


@pytest.mark.parametrize(
    ("words", "name", "reached", "count"),
    [
        ("80 %", "infonce_solved_first_epoch", 0.8, 12),
        ("47 %", "infonce_zero", 0.47, 24),
        ("100 times", "ratio", 100.0, 24),
        ("98 %", "cosine_positive", 0.98, 24),
    ],
)
def test_gradients_are_judged_by_the_whole_data_and_by_all_of_their_runs(tmp_path, words, name, reached, count):
    (claim,) = [claim for claim in CLAIMS if claim.study == "gradients" and words in claim.text]

    def judged(data, lacking=()):
        found = findings(tmp_path, STUDIES["gradients"], lambda *place: result(queries(0.5, 1)))
        for place, job in found.jobs.items():
            entries = "" if place.row in lacking else '{"kind": "gradients"}\n'
            (found.store.home(job) / "metrics.jsonl").write_text(entries)
        return claim.check(Evidence(found, data))

    assert judged(gradient_data()).verdict == "does not hold"  # whatever one batch of a twentieth of the data says
    held = judged(gradient_data(**{name: reached}))
    assert held.verdict == "holds"
    assert f"(of {count} measurements)" in held.measured
    gone = judged(gradient_data(**{name: reached}), lacking=("HN-CLIP, 100 %",))
    assert (gone.verdict, gone.complete) == ("undecided", False)
    assert gone.why in ("1 of 1 runs are missing", "1 of 4 runs are missing")
    small = judged(gradient_data(**{name: reached}), lacking=("HN-CLIP, 5 %",))
    assert small.verdict == ("undecided" if name == "cosine_positive" else "holds")


def test_best_under_every_seed(tmp_path):
    clear = evidence(tmp_path / "clear", {"start": 0.3, "a": 0.95, "b": 0.5, "c": 0.5}, domains=("x", "y"))
    judged = best_under_every_seed("a", "b", "c")(clear)  # in whatever order b and c are
    assert (judged.verdict, judged.measured) == (
        "holds",
        "x: best under 3 of 3 seeds; y: best under 3 of 3 seeds",
    )
    assert best_under_every_seed("b", "a")(clear).verdict == "does not hold"
    one = evidence(tmp_path / "one", seeds=(1,))
    assert best_under_every_seed("a", "b")(one).verdict == "undecided"


def test_best_under_all_seeds_but_one_is_not_best_under_every(tmp_path):
    def measure(row, domain, gallery, seed):
        return result(queries(0.9 if (row == "a") == (seed < 3) else 0.1, seed))

    found = Evidence(findings(tmp_path, STUDY, measure, seeds=(1, 2, 3)), {})
    judged = best_under_every_seed("a", "b")(found)
    assert (judged.verdict, judged.measured) == ("does not hold", "a: best under 2 of 3 seeds")


def test_a_lead_in_the_last_bit_is_none(tmp_path):
    def measure(row, domain, gallery, seed):
        found = result(queries(0.5, seed))
        return replace(found, metrics={**found.metrics, "mean_R@1": 50.1 + (1e-14 if row == "a" else 0)})

    found = Evidence(findings(tmp_path, STUDY, measure, seeds=(1, 2)), {})
    assert best_under_every_seed("a", "b")(found).verdict == "does not hold"


def claim_of(words):
    (claim,) = [claim for claim in CLAIMS if words in claim.text]
    return claim


def judged_by(tmp_path, claim, skill):
    """Rows with nested hits: a row of more skill finds all that one of less does."""

    def measure(row, domain, gallery, seed):
        ranks = torch.full((200,), 99)
        first, tenth = skill[row]
        ranks[: round(200 * tenth)] = 10
        ranks[: round(200 * first)] = 1
        order = torch.arange(200)
        # Files hold no tensor twice.
        return result(EvaluationResult(Ranks(ranks, ranks.clone(), order), order.clone(), tuple(map(str, range(200)))))

    found = findings(tmp_path, STUDIES[claim.study], measure)
    return claim.check(Evidence(found, {}))


@pytest.mark.parametrize(
    ("zero", "goal", "ours", "verdict"),
    [
        (0.5, 0.6, 0.7, "holds"),
        (0.5, 0.6, 0.5, "does not hold"),
        (0.8, 0.6, 0.7, "undecided"),  # training hurts, and more of it hurts more
        (0.6, 0.6, 0.7, "undecided"),
        (0.595, 0.6, 0.7, "undecided"),  # a help that may be chance
    ],
)
def test_a_fifth_of_the_data_is_enough_only_if_the_whole_helps(tmp_path, zero, goal, ours, verdict):
    skill = {row.name: (0.1, 1) for row in STUDIES["samples"].rows}
    skill |= {"zero-shot": (zero, 1), "GOAL, 100 %": (goal, 1), "HN-CLIP, 20 %": (ours, 1)}
    judged = judged_by(tmp_path, claim_of("A fifth of the data"), skill)
    assert judged.verdict == verdict
    assert judged.why.startswith(NOT_ABOVE_UNTRAINED) == (verdict == "undecided")


@pytest.mark.parametrize(("zero", "verdict"), [(0.4, "holds"), (0.6, "undecided")])
def test_a_lead_widens_only_over_what_learnt(tmp_path, zero, verdict):
    skill = {row.name: (0.1, 1) for row in STUDIES["samples"].rows}
    skill |= {"zero-shot": (zero, 1), "GOAL, 100 %": (0.5, 1), "HN-CLIP, 100 %": (0.6, 1), "HN-CLIP, 20 %": (0.5, 1)}
    assert judged_by(tmp_path, claim_of("The lead over GOAL widens"), skill).verdict == verdict


@pytest.mark.parametrize(
    ("alone", "whole", "verdict"),
    [
        (0.65, 0.7, "holds"),
        (0.55, 0.8, "does not hold"),  # a gain, but a sixth of the whole
        (0.6, 0.4, "does not hold"),  # there is no whole gain that it could be the bulk of
        (0.5, 0.5, "undecided"),
    ],
)
def test_the_bulk_of_a_gain_is_half_of_it(tmp_path, alone, whole, verdict):
    skill = {"InfoNCE": (0.5, 1), "InfoNCE + L_tok": (0.5, 1), "L_HN": (alone, 1), "L_HN + L_tok": (whole, 1)}
    judged = judged_by(tmp_path, claim_of("brings the bulk"), skill)
    assert judged.verdict == verdict
    assert "a, L_HN − 0.5 · InfoNCE − 0.5 · L_HN + L_tok: " in judged.measured


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ((0.7, 0.9), "holds"),
        ((0.6, 0.99), "does not hold"),  # a lead that grows with depth
        ((0.5, 0.8), "undecided"),  # no lead: nothing that could shrink
        ((0.3, 0.8), "undecided"),
    ],
)
def test_a_lead_shrinks_with_depth_only_where_there_is_one(tmp_path, ours, verdict):
    skill = {row.name: (0.5, 0.8) for row in STUDIES["ranks"].rows}
    skill |= {"HN-CLIP": ours, "InfoNCE": (0.9, 1), "zero-shot": (0.9, 1)}  # not among its competitors
    judged = judged_by(tmp_path, claim_of("largest at R@1"), skill)
    assert "a, HN-CLIP R@1 − FineLIP R@1 − HN-CLIP R@10 + FineLIP R@10: " in judged.measured
    assert judged.verdict == verdict
    assert judged.why.startswith("there is no clear lead") == (verdict == "undecided")


def test_every_claim_names_a_study_and_rows_that_it_has(tmp_path):
    """A claim about a row that its study lacks would raise."""
    for claim in CLAIMS:
        study = STUDIES[claim.study]
        domains = ("x",) if study.columns == "own" else ("x", "y")
        found = findings(tmp_path / claim.study, study, lambda *place: None, domains=domains)
        data = {"gradients": {"runs": {}}, "efficiency": {"rows": []}, "geometry": {"domains": {}}}
        assert claim.check(Evidence(found, data)).verdict == "undecided"
