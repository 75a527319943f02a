"""Tables hold the numbers and marks of the results, and say what is missing; the paper's rows stand on its own data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_studies import evaluation, queries, study_results, training

from hnclip.evaluate.bootstrap import Estimate
from hnclip.report.document import Missing, Table
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.epochs import convergence, epoch_choice, epochs, selection
from hnclip.studies.figures import curve_points, samples, share_curves, strongest_other, sufficient_share
from hnclip.studies.results import MEAN, Spread
from hnclip.studies.spec import Study, Variant
from hnclip.studies.tables import (
    average,
    brief_recalls,
    difference_cell,
    held_out,
    only_queries,
    recalls,
    seeds,
    signed,
    spread_cell,
)

SKILL = {"start": 0.2, "a": 0.5, "b": 0.9}
STUDY = Study(
    "duel",
    "Duel",
    "Which is better?",
    (Variant("start", trained=False), Variant("a"), Variant("b", against=("a",))),
    parts=("recalls",),
)


def evaluate(row, domain, gallery, seed):
    return queries(SKILL[row], 100 * seed + round(10 * SKILL[row]))


def cells(table: Table, name: str) -> tuple[str, ...]:
    return next(tuple(row[1:]) for row in table.rows if row and row[0] == name)


def test_numbers_and_marks_are_those_of_the_results():
    results = study_results(STUDY, evaluate, domains=("x", "y"), seeds=(1, 2))
    mean, *tables = recalls(results)
    assert [table.title.rpartition(", ")[2] for table in tables] == ["x", "y"]
    for number, column in enumerate(results.columns, start=1):
        for row in SKILL:
            assert cells(mean, row)[number - 1] == spread_cell(column.recall(row, MEAN, 1))
        found = column.difference("b", "a", MEAN, 1)
        assert cells(mean, "b − a")[number - 1] == difference_cell(found)
        marked = {mean.rows[row][0] for row, place in mean.marks if place == number}
        assert ("b" in marked) == (column.marks([*SKILL], MEAN, 1).get("b") == "best")
        assert ("b − a" in marked) == found.clear
        printed = cells(tables[number - 1], "b")
        at = [(way, k) for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)]
        assert list(printed) == [spread_cell(column.recall("b", *one)) for one in at]
    brief = brief_recalls(results)
    assert cells(brief, "b")[:3] == ("a", cells(mean, "b")[0], cells(mean, "b − a")[0])


def test_missing_runs_are_said_and_leave_gaps():
    results = study_results(STUDY, lambda row, *place: evaluate(row, *place) if row != "a" else None)
    mean, table = recalls(results)
    assert cells(mean, "a") == cells(mean, "b − a") == ("–",)
    assert "1 of 3" in " ".join(mean.notes)
    assert set(cells(table, "a")) == {"–"}


def test_several_columns_are_averaged_over_common_seeds():
    columns = [Spread({1: 10.0, 2: 20.0}), Spread({2: 40.0, 3: 50.0})]
    assert average(columns).values == {2: 30.0}
    assert average([columns[0], None]) is None
    assert average([columns[0], Spread({3: 1.0})]) is None


def test_deep_ranks_take_a_table_for_each_direction_and_pairs_a_delta():
    pairs = replace(STUDY, rows=(Variant("a"), Variant("b", against=("a",))), ks=(1, 5, 10, 25, 50))
    _, first, second = recalls(study_results(pairs, evaluate))
    assert len(first.headers) == len(second.headers) == 6
    rows = (Variant("a"), Variant("b", against=("a",)), Variant("c"), Variant("d", against=("c",)))
    skill = dict(zip("abcd", (0.2, 0.8, 0.3, 0.7)))
    found = study_results(replace(STUDY, rows=rows), lambda row, *place: queries(skill[row], ord(row)))
    assert [row[0] for row in recalls(found)[0].rows if row] == ["a", "b", "Δ", "c", "d", "Δ"]


def test_an_interval_never_ends_at_a_printed_zero_if_it_excludes_zero():
    assert difference_cell(Estimate(0.9, 0.03, 1.8)) == "+0.9 [+0.03, +1.8]"
    assert difference_cell(Estimate(-0.9, -1.8, -0.004)) == "-0.9 [-1.8, -0.004]"
    assert difference_cell(Estimate(0.9, -0.03, 1.8)) == "+0.9 [+0.0, +1.8]"
    assert (signed(-0.01), difference_cell(None)) == ("+0.0", "–")


@pytest.mark.parametrize(
    ("name", "column", "row"),
    [
        ("main", "docci", "paper, Table 1: HN-CLIP"),
        ("main", "long-dci", "paper, Table 1: GOAL"),
        ("main", "urban-1k", "paper, Table A11: HN-CLIP, mean of 3 seeds"),
        ("cross-domain", "docci → dci", "paper, Table A10: GOAL"),
        ("cross-domain", "docci → long-dci", "paper, Table A7: GOAL"),
        ("gamma", "urban-1k", "paper, Table A6: HN-CLIP, γ = 0.25"),
    ],
)
def test_the_papers_rows_stand_below_its_own_benchmarks(name, column, row):
    galleries = {"docci": ("docci",), "dci": ("dci", "long-dci"), "vg-paragraphs": ("urban-1k",)}
    study = STUDIES[name]
    found = study_results(study, lambda *place: queries(0.5, 1), domains=(*galleries,), galleries=galleries)
    tables = [block for block in recalls(found) if block.title.endswith(f", {column}")]
    printed = [number for number, line in enumerate(tables[0].rows) if line and line[0] == row]
    assert printed
    assert all(place < printed[0] for table in tables for place, _ in table.marks)  # neither marked nor compared
    others = recalls(study_results(study, lambda *place: queries(0.5, 1), domains=("x", "y")))
    assert not any("paper" in line[0] for table in others for line in table.rows if line)


def test_every_seed_has_its_row_and_the_largest_difference_is_told():
    (table,) = seeds(study_results(STUDY, evaluate, seeds=(1, 2)))
    first, second = (float(cells(table, f"a, seed {seed}")[0]) for seed in (1, 2))
    gaps = [abs(float(one) - float(two)) for one, two in zip(*(cells(table, f"a, seed {seed}")[:6] for seed in (1, 2)))]
    assert float(cells(table, "a, mean ± std")[0].split()[0]) == pytest.approx((first + second) / 2, abs=0.01)
    assert float(cells(table, "a, mean ± std")[-1]) == pytest.approx(max(gaps), abs=0.02)
    assert seeds(study_results(STUDY, evaluate)) == []


def test_an_advantage_that_is_memory_of_training_pairs_is_seen():
    """Row b knows the images that are not held out, and no others."""
    study = replace(STUDY, parts=("held_out",), whole=True)
    base, alone = queries(0.3, 1, images=60), queries(0.3, 2, images=20)

    def known(row, domain, gallery, seed):
        found = base
        if row == "b":
            ranks = {way: getattr(base.ranks, way).clone() for way in ("text_to_image", "image_to_text")}
            for one in ranks.values():
                one[20:] = 1
            found = replace(base, ranks=replace(base.ranks, **ranks))
        return replace(found, held_out=replace(alone, ids=base.ids[:20]) if "all pairs" in gallery else None)

    (table,) = held_out(study_results(study, known))
    assert [header for header in table.headers if header] == [
        "all pairs",
        "other pairs",
        "held-out pairs",
        "held-out alone",
    ]
    whole, other, unseen, apart = cells(table, "b − a")
    assert unseen == apart == "+0.0 [+0.0, +0.0]"
    assert float(other.split()[0]) > float(whole.split()[0]) > 20
    assert isinstance(held_out(study_results(replace(study, whole=False), evaluate))[0], Missing)


def test_queries_of_some_images_keep_their_ranks_and_captions():
    found = queries(0.5, 1, images=4, captions=2)
    part = only_queries(found, {"r1", "r3"}, inside=True)
    assert part.ids == ("r1", "r3")
    assert part.ranks.owner.tolist() == [0, 0, 1, 1]
    assert part.ranks.text_to_image.tolist() == found.ranks.text_to_image[[2, 3, 6, 7]].tolist()
    assert only_queries(found, {"r1", "r3"}, inside=False).ids == ("r0", "r2")


def test_epochs_are_chosen_in_three_ways():
    watched = [{"epoch": epoch, "mean_R@1": recall} for epoch, recall in enumerate((90.0, 50.0, 60.0, 60.0, 55.0))]
    found = epoch_choice(1, watched)
    assert (found.by_validation, found.by_test, found.last) == ((1, 50.0), (2, 60.0), (4, 55.0))
    assert found.optimism == 10
    assert epoch_choice(5, watched) is None


def test_epochs_and_convergence_are_read_from_logs():
    study = replace(STUDY, rows=(Variant("InfoNCE"), Variant("a")), parts=("convergence",))
    learnt = {"InfoNCE": {1: (10.0, 40.0, 50.0), 2: (10.0, 60.0)}, "a": {1: (10.0, 60.0, 70.0), 2: (10.0, 40.0, 70.0)}}

    def logs(row, domain, seed):
        kinds = ("evaluation", "watched")
        return [evaluation(n, recall, kind) for kind in kinds for n, recall in enumerate(learnt[row][seed])]

    results = study_results(study, logs=logs, seeds=(1, 2))
    _, table = convergence(results)
    assert cells(table, "InfoNCE") == ("10.0", "50.0", "–", "1")  # of the epochs that both seeds have
    assert cells(table, "a") == ("10.0", "50.0", "70.0", "1")
    (chosen,) = epochs(results)
    assert [row[0] for row in chosen.rows] == [f"{row}, a, seed {seed}" for row in ("InfoNCE", "a") for seed in (1, 2)]
    (table,) = selection(results)
    assert cells(table, "a, a, seed 1") == ("60.00 (epoch 1)", "70.00 (epoch 2)", "70.00 (epoch 2)", "10.00")
    for part in (convergence, epochs, selection):
        assert isinstance(part(study_results(study))[0], Missing)
    assert training()["best"]["epoch"] == 1


def test_the_smallest_share_that_reaches_the_strongest_other_row():
    curves = {"a": {0.2: 50.0, 1.0: 60.0}, "b": {0.05: 40.0, 0.2: 60.0 - 1e-13, 1.0: 80.0}}
    assert strongest_other(curves, "b") == ("a", 60.0)
    assert sufficient_share(curves["b"], 60.0) == 0.2
    assert sufficient_share(curves["a"], 80.0) is None
    assert strongest_other({"a": curves["a"]}, "a") is None


def test_points_of_curves_are_the_recalls_of_their_rows():
    study = STUDIES["samples"]
    results = study_results(study, lambda row, *place: queries(0.4, 1), seeds=(1, 2))
    (column,) = results.columns
    curves = share_curves(results, column)
    assert {*curves} == {"InfoNCE", "GOAL", "HN-CLIP"}
    assert curves["GOAL"][0.2] == column.recall("GOAL, 20 %", MEAN, 1).mean
    figure, table = samples(results)
    assert figure.name == "samples-a"
    assert [row[0] for row in table.rows] == ["zero-shot (no training)", *curves]
    for seed_count in (1, 2):  # an interval over queries, or the deviation over seeds
        found = study_results(STUDIES["gamma"], lambda row, *place: queries(0.4, place[-1]), seeds=(1, 2)[:seed_count])
        for x, recall, low, high in curve_points(found, found.columns[0])["HN-CLIP"]:
            assert low < recall < high
            assert 0 <= x <= 1
