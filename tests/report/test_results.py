"""Reports of evaluations: each number in its place, no mark that the queries do not support, the paper's rows apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hnclip.evaluation import Ranks, summarize
from hnclip.evaluation.retrieval import EvaluationResult
from hnclip.report.document import FORMATS, Report, Table
from hnclip.report.results import evaluation_report
from hnclip.util.tables import mark_of

GOLDEN = Path(__file__).parent / "golden"


def result(model: str, data: str, hits: int, split: str = "test", *, at: int = 0, images: int = 40) -> EvaluationResult:
    """Of the images `hits`, from number `at` on, have rank 1, the others rank 7."""
    place = torch.arange(images)
    rank = torch.where((place >= at) & (place < at + hits), 1, 7)
    ranks, ids = Ranks(rank, rank, place), tuple(map(str, range(images)))
    metrics = summarize(ranks, intervals=True)
    return EvaluationResult(ranks, place, ids, metrics, model=model, data=data, split=split)


def two_data_sets() -> list[EvaluationResult]:
    similar = {"pairwise": 0.5, "hardest": 0.9}
    base = replace(result("base", "docci", 10), skipped=2, unread=1)
    tuned = replace(result("tuned", "docci", 30), truncated=3, skipped=2, unread=1, caption_similarity=similar)
    part = result("tuned", "", 30)
    return [base, tuned, replace(result("base", "my_data", 12, images=60), held_out=part)]


def tables(report: Report) -> list[Table]:
    return [block for block in report.blocks if isinstance(block, Table)]


@pytest.mark.parametrize("suffix", FORMATS[:3])
def test_each_format(suffix: str, tmp_path: Path) -> None:
    """The files in golden/ were read line by line; after an intended change write them again and read the diff."""
    path = tmp_path / f"results.{suffix}"
    evaluation_report(two_data_sets()).write_file(path)
    assert path.read_text(encoding="utf-8") == (GOLDEN / path.name).read_text(encoding="utf-8")


def test_a_gallery_of_one_image_has_no_intervals() -> None:
    assert "interval" in evaluation_report([result("base", "x", 1, images=2)]).to_text()
    assert "interval" not in evaluation_report([result("base", "x", 1, images=1)]).to_text()


@pytest.mark.parametrize(("split", "with_paper"), [("test", True), ("test", False), ("validation", True)])
def test_rows_of_the_paper_are_added_on_test_splits_if_asked_for(split: str, with_paper: bool) -> None:
    report = evaluation_report([result("base", "docci", 10, split)], with_paper=with_paper)
    assert ("Table 1: HN-CLIP" in report.to_text()) == (split == "test" and with_paper)


@pytest.mark.parametrize(
    ("hits", "at", "marks"),
    [
        ((180, 100, 40), (0, 0, 0), ["best", "second", None]),
        ((180, 40, 41), (0, 0, 100), ["best", None, None]),
        ((100, 92, 91), (0, 0, 100), [None] * 3),  # the third answers others, so the lead over it is noise
    ],
)
def test_a_mark_needs_a_clear_difference_from_every_other_model(hits, at, marks) -> None:
    results = [result(str(row), "x", *one, at=start, images=200) for row, (*one, start) in enumerate(zip(hits, at))]
    (table,) = tables(evaluation_report(results))
    assert [mark_of(row[1]) for row in table.rows] == marks
    assert [row[1].split()[0] for row in table.rows] == [f"{count / 2:.2f}" for count in hits]


def test_a_held_out_part_has_its_own_table_columns_and_marks() -> None:
    found = [
        replace(result(model, "long-dci", hits, images=60), held_out=result(model, "", part))
        for model, hits, part in (("good", 50, 20), ("bad", 10, 19))
    ]
    whole, part, _, every = tables(evaluation_report([*found, result("good", "other", 1)]))
    assert part.rows[0][1].startswith("50.00 [")
    assert any(map(mark_of, whole.rows[0]))
    assert not any(mark_of(cell) for row in part.rows for cell in row)
    assert every.rows[0][1:5] == ["83.33", "83.33", "50.00", "50.00"]
    assert [mark_of(cell) for row in every.rows[:2] for cell in row[1:5]] == ["best"] * 2 + [None] * 6


def test_models_on_different_records_are_not_compared() -> None:
    one, other = result("one", "x", 10), result("other", "x", 10)
    with pytest.raises(ValueError, match="records"):
        evaluation_report([one, replace(other, ids=other.ids[::-1])])
