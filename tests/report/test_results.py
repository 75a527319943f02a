"""Reports of evaluations: each number in its place, no mark that the queries do not support, the paper's rows apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hnclip.evaluation import Ranks, compare_ranks, published, summarize
from hnclip.evaluation.retrieval import EvaluationResult
from hnclip.report.document import FORMATS, Report, Table
from hnclip.report.results import comparison_report, evaluation_report, recall_table

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
    """The files in golden/ were read line by line; after an intended change write them anew and read the difference."""
    path = tmp_path / f"results.{suffix}"
    evaluation_report(two_data_sets()).write_file(path)
    assert path.read_text(encoding="utf-8") == (GOLDEN / path.name).read_text(encoding="utf-8")


def test_plain_recalls() -> None:
    metrics = {"R@1": 9.04, "R@5": 80.0, "R@1_interval": [7.0, 11.46], "R@5_interval": [70.0, 90.0]}
    table = recall_table({"InfoNCE": {"text_to_image": metrics, "image_to_text": {"R@1": 4.5, "R@5": 80.0}}}, (1, 5))
    assert table.headers == ["model", "T→I R@1", "T→I R@5", "I→T R@1", "I→T R@5"]
    assert table.rows == [["InfoNCE", "9.04 [7.0, 11.5]", "80.00", "4.50", "80.00"]]


def test_rows_of_the_paper_are_as_published_and_only_on_test_splits() -> None:
    (ours,) = published("docci", table="1", method="HN-CLIP")
    (table,) = tables(evaluation_report([result("base", "docci", 10)]))
    assert table.rows[1] == []
    printed = dict(zip(table.headers, table.rows[-1]))
    assert printed["model"] == "paper, Table 1: HN-CLIP"
    for arrow, direction in (("T→I", "text_to_image"), ("I→T", "image_to_text")):
        assert printed[f"{arrow} R@10"] == f"{ours.recall[direction][10]:.2f}"
        assert printed[f"{arrow} R@50"] == "–"
    for split, with_paper in (("test", False), ("validation", True)):
        report = evaluation_report([result("base", "docci", 10, split)], with_paper=with_paper)
        assert "Table 1" not in report.to_text()


def test_data_are_complete_and_keep_the_paper_apart() -> None:
    results = two_data_sets()
    data = evaluation_report(results).data
    assert data["results"] == [one.to_dict() for one in results]
    first = data["comparisons"][0]
    names = {"data": "docci", "split": "test", "held_out": False, "model": "tuned", "against": "base"}
    assert {key: first[key] for key in names} == names
    assert first["difference"]["mean"] == 50.0
    assert {row["benchmark"] for row in data["paper"]} == {"DOCCI"}
    assert "{best} {x} test" in evaluation_report([result("m", "{best} {x}", 3)]).to_markdown()  # names with braces


@pytest.mark.parametrize(
    ("hits", "at", "marks"),
    [
        ((180, 100, 40), (0, 0, 0), ["best", "second", None]),
        ((180, 40, 41), (0, 0, 100), ["best", None, None]),
        ((100, 92, 91), (0, 0, 100), [None] * 3),  # the third answers others, so the lead over it is noise
        ((100, 100), (0, 100), [None] * 2),
    ],
)
def test_a_mark_needs_a_clear_difference_from_every_other_model(hits, at, marks) -> None:
    results = [result(str(row), "x", *one, at=start, images=200) for row, (*one, start) in enumerate(zip(hits, at))]
    (table,) = tables(evaluation_report(results))
    assert [table.marks.get((row, 1)) for row in range(len(hits))] == marks
    assert [row[1].split()[0] for row in table.rows] == [f"{count / 2:.2f}" for count in hits]
    (table,) = tables(evaluation_report([replace(one, groups=torch.zeros(200)) for one in results]))
    assert table.marks == {}  # one group has no spread


def test_a_held_out_part_has_its_own_table_columns_and_marks() -> None:
    found = [
        replace(result(model, "long-dci", hits, images=60), held_out=result(model, "", part))
        for model, hits, part in (("good", 50, 20), ("bad", 10, 19))
    ]
    report = evaluation_report([*found, result("good", "other", 1)])
    whole, part, _, every = tables(report)
    assert "held-out" in part.title
    assert part.rows[0][1].startswith("50.00 [")
    assert set(whole.marks) > set(part.marks) == set()
    assert "held-out, text→image: bad minus good -2.5" in report.to_text()
    assert every.flat_headers[1:5] == [
        f"long-dci{name} {way} R@1" for name in ("", " held-out") for way in ("T→I", "I→T")
    ]
    assert every.rows[0][1:5] == ["83.33", "83.33", "50.00", "50.00"]
    assert {place for place in every.marks if place[1] < 5} == {(0, 1), (0, 2)}
    assert next(row for row in every.rows if row and "GOAL" in row[0])[1:5] == ["74.11", "73.29", "–", "–"]


def test_comparisons_count_queries_and_give_the_interval() -> None:
    a, b = result("a", "x", 30), result("b", "x", 10)
    found = compare_ranks(a.ranks, b.ranks, ks=(1, 5))
    report = comparison_report(found, "a.jsonl", "b.jsonl")
    (table,) = tables(report)
    assert [row[0] for row in table.rows] == ["T→I R@1", "T→I R@5", "I→T R@1", "I→T R@5"]
    low, high = found[0].difference.low, found[0].difference.high
    assert table.rows[0][1:4] == ["75.00", "25.00", f"+50.00 [{low:+.1f}, {high:+.1f}]"]
    assert table.rows[0][5:] == ["10", "20", "0", "10"]
    assert "text→image: a minus b +50.0 points" in report.to_text()
    assert json.loads(report.to_json())["comparisons"][0]["only_a"] == 20
