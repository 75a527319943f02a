"""Tables hold the numbers and marks of the results, and say what is missing; the paper's rows stand on its own data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from small_studies import evaluation, queries, study_results

from hnclip.evaluation.retrieval import EvaluationResult
from hnclip.report.document import Block, Table
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.figures import convergence, epochs, selection
from hnclip.studies.results import MEAN
from hnclip.studies.spec import Study, Variant
from hnclip.studies.tables import brief_recalls, difference_cell, held_out, recalls, spread_cell
from hnclip.util.tables import mark_of

SKILL = {"start": 0.2, "a": 0.5, "b": 0.9, "c": 0.3, "d": 0.7}
ROWS = (Variant("start", trained=False), Variant("a"), Variant("b", against=("a",)))
STUDY = Study("duel", "Duel", "Which is better?", ROWS, parts=("recalls",))
WAYS = ("text_to_image", "image_to_text")


def evaluate(row: str, domain: str, gallery: str, seed: int) -> EvaluationResult:
    return queries(SKILL[row], 100 * seed + round(10 * SKILL[row]))


def cells(table: Block, name: str) -> tuple[str, ...]:
    assert isinstance(table, Table)
    return next(tuple(row[1:]) for row in table.rows if row and row[0] == name)


def test_numbers_and_marks_are_those_of_the_results() -> None:
    results = study_results(STUDY, evaluate, domains=("x", "y"), seeds=(1, 2))
    mean, *tables = recalls(results)
    assert len(tables) == 2
    for number, column in enumerate(results.columns):
        found = column.difference("b", "a", MEAN, 1)
        assert [cells(mean, row)[number] for row in "ab"] == [spread_cell(column.recall(row, MEAN, 1)) for row in "ab"]
        assert cells(mean, "b − a")[number] == difference_cell(found)
        marked = {row[0] for row in mean.rows if row and mark_of(row[number + 1])}
        assert ("b" in marked) == (column.marks([row.name for row in ROWS], MEAN, 1).get("b") == "best")
        assert ("b − a" in marked) == found.clear
        at = [(way, k) for way in WAYS for k in (1, 5, 10)]
        assert list(cells(tables[number], "b")) == [spread_cell(column.recall("b", *one)) for one in at]
    assert cells(brief_recalls(results), "b")[:3] == ("a", cells(mean, "b")[0], cells(mean, "b − a")[0])


def test_the_papers_rows_stand_below_its_own_benchmarks() -> None:
    found = study_results(STUDIES["main"], lambda *at: queries(0.5, 1), domains=("dci", "x"))
    (table, *_), (other, *_) = ([one for one in recalls(found) if one.title.endswith(f", {at}")] for at in ("dci", "x"))
    names = [line[0] if line else "" for line in table.rows]
    first = names.index("paper, Table 1: HN-CLIP")
    assert not any(mark_of(cell) for line in table.rows[first:] for cell in line)  # neither marked nor compared
    assert not any("paper" in line[0] for line in other.rows if line)


def test_an_advantage_on_training_pairs_alone_is_shown() -> None:
    """Row b knows the images that are not held out, and no others."""
    base, alone = queries(0.3, 1, images=60), queries(0.3, 2, images=20)

    def known(row: str, domain: str, gallery: str, seed: int) -> EvaluationResult:
        ranks = {way: getattr(base.ranks, way).clone() for way in WAYS}
        for one in ranks.values():
            one[20:] = 1 if row == "b" else one[20:]
        part = replace(alone, ids=base.ids[:20]) if "all pairs" in gallery else None
        return replace(base, ranks=replace(base.ranks, **ranks), held_out=part)

    (table,) = held_out(study_results(replace(STUDY, parts=("held_out",), whole=True), known))
    whole, other, unseen, apart = cells(table, "b − a")
    assert unseen == apart == "+0.0 [+0.0, +0.0]"
    assert float(other.split()[0]) > float(whole.split()[0]) > 20


def test_epochs_and_convergence_are_read_from_logs() -> None:
    learnt = {"InfoNCE": {1: (10.0, 40.0, 50.0), 2: (10.0, 60.0, 70.0)}, "a": {1: (10.0, 60.0, 70.0)}}

    def logs(row: str, domain: str, seed: int) -> list[dict[str, Any]]:
        recalls = [*enumerate(learnt[row].get(seed, ()))]
        return [evaluation(n, recall, kind) for kind in ("evaluation", "watched") for n, recall in recalls]

    results = study_results(replace(STUDY, rows=(Variant("InfoNCE"), Variant("a"))), logs=logs, seeds=(1, 2))
    _, table = convergence(results)
    assert cells(table, "InfoNCE") == ("10.0", "50.0", "60.0")
    (chosen,) = epochs(results)
    assert [row[0] for row in chosen.rows] == ["InfoNCE, a, seed 1", "InfoNCE, a, seed 2", "a, a, seed 1"]
    (table,) = selection(results)
    assert cells(table, "a, a, seed 1") == ("60.00 (epoch 1)", "70.00 (epoch 2)", "70.00 (epoch 2)", "10.00")
