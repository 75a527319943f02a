"""Tables of results in every format: each number in its place, no mark that the queries do not support, the paper's
numbers apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hnclip.evaluate import Ranks, published, summarize
from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.report.results import FORMATS, EvaluationReport, format_results, result_rows


def result(model: str, data: str, hits: int, split: str = "test", *, at: int = 0, images: int = 40) -> EvaluationResult:
    """Of the images `hits`, from number `at` on, have rank 1, the others rank 7."""
    place = torch.arange(images)
    rank = torch.where((place >= at) & (place < at + hits), 1, 7)
    ranks, ids = Ranks(rank, rank, place), tuple(map(str, range(images)))
    metrics = summarize(ranks, intervals=True)
    return EvaluationResult(ranks, place, ids, metrics, model=model, data=data, split=split)


def cells(text: str) -> list[list[str]]:
    """The first table in a Markdown text."""
    lines = [line for line in text.split("\n\n## ")[0].split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:1] + lines[2:]]


@pytest.fixture
def report() -> EvaluationReport:
    similar = {"pairwise": 0.5, "hardest": 0.9}
    tuned = replace(result("tuned", "docci", 30), truncated=3, skipped=2, unread=1, caption_similarity=similar)
    return EvaluationReport(
        [replace(result("base", "docci", 10), skipped=2, unread=1), tuned, result("base", "my_data", 12)]
    )


def test_rows_of_results():
    metrics = {"R@1": 9.04, "R@5": 80.0, "R@1_interval": [7.0, 11.46], "R@5_interval": [70.0, 90.0]}
    results = {"InfoNCE": {"text_to_image": metrics, "image_to_text": {"R@1": 4.5, "R@5": 80.0}}}
    headers, row = result_rows(results, ks=(1, 5))
    assert headers == ["model", "T→I R@1", "T→I R@5", "I→T R@1", "I→T R@5"]
    assert row == ["InfoNCE", "9.0 [7.0, 11.5]", "80.0", "4.5", "80.0"]
    assert format_results(results, ks=(1,)).split("\n")[2] == "InfoNCE  9.0 [7.0, 11.5]      4.5"


def test_text_says_what_was_measured_and_what_was_not(report: EvaluationReport) -> None:
    first, second, table = report.to_text().split("\n\n", 2)
    lines = first.split("\n")
    assert lines[0] == "docci test: 40 images, 40 captions"
    for warning in ("1 rows", "2 invalid records", "3 captions are truncated at the context of tuned"):
        assert any(line.startswith(f"warning: {warning}") for line in lines)
    assert "caption similarity to tuned: 0.50 on average, 0.90 to the hardest negative" in lines
    assert "25.0 [" in first  # 10 of 40, with its interval
    assert "text→image: tuned minus base +50.0 points of R@1" in first
    assert lines.index("published in the paper, not measured here") < len(lines) - 5
    (ours,) = published("docci", table="1", method="HN-CLIP")
    assert lines[-1].split()[-6:] == [
        f"{ours.recall[way][k]:.1f}" for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)
    ]
    assert "paper" not in second
    assert table.startswith("all data sets\nmodel")


def test_markdown(report: EvaluationReport) -> None:
    text = report.to_markdown()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "## docci test",
        "## my_data test",
        "## All data sets",
    ]
    found = cells(text)
    assert found[0] == ["model", *(f"{way} R@{k}" for way in ("T→I", "I→T") for k in (1, 5, 10, 25, 50))]
    assert found[1][:4] == ["base", "25.00", "25.00", "100.00"]
    assert found[2][:4] == ["tuned", "**75.00**", "**75.00**", "100.00"]
    assert found[3] == [""] * 11
    assert found[-1][:5] == ["paper, Table 1: HN-CLIP", "88.25", "98.45", "99.43", "–"]
    assert "- text→image: tuned minus base" in text
    assert "docci test: 40 images, 40 captions. 2 invalid records are skipped. Captions truncated" in text
    assert "Bold: above every other model" in text
    assert "they were not measured here" in text
    assert "| model | docci T→I R@1 | docci I→T R@1 | my_data T→I R@1 | my_data I→T R@1 |" in text
    assert "| tuned | **75.00** | **75.00** | – | – |" in text


def test_latex(report: EvaluationReport) -> None:
    latex = report.to_latex()
    assert latex.count(r"\begin{table}") == latex.count(r"\end{table}") == 3
    assert r"\label{tab:docci-test}" in latex
    assert r"\caption{Recall in percent. docci test: 40 images, 40 captions." in latex
    assert r"tuned & \textbf{75.00} & \textbf{75.00} & \textendash{} & \textendash{} \\" in latex
    assert r"& \multicolumn{2}{c}{docci} & \multicolumn{2}{c}{my\_data} \\" in latex


def test_json_is_complete_and_keeps_the_paper_apart(report: EvaluationReport) -> None:
    found = report.to_dict()
    assert found["results"] == [one.to_dict() for one in report.results]
    first = found["comparisons"][0]
    names = {"data": "docci", "split": "test", "held_out": False, "model": "tuned", "against": "base"}
    assert {key: first[key] for key in names} == names
    assert first["difference"]["mean"] == 50.0
    assert {row["benchmark"] for row in found["paper"]} == {"DOCCI"}
    assert json.loads(json.dumps(found))["results"] == found["results"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_files_are_written_in_the_format_of_their_names(report: EvaluationReport, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"out{suffix}"
    report.write(path)
    assert "Table 1" in path.read_text(encoding="utf-8")
    for without in (replace(report, with_paper=False), EvaluationReport([result("base", "docci", 10, "validation")])):
        without.write(path)  # the paper evaluates on test splits
        assert "Table 1" not in path.read_text(encoding="utf-8")


def test_other_formats_are_refused(report: EvaluationReport, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"out\.csv"):
        report.write(tmp_path / "out.csv")


@pytest.mark.parametrize(
    ("hits", "at", "marks"),
    [
        ((180, 100, 40), (0, 0, 0), ["**", "*", ""]),
        ((180, 40, 41), (0, 0, 100), ["**", "", ""]),
        ((100, 92, 91), (0, 0, 100), ["", "", ""]),  # the third answers others, so the lead over it is noise
        ((100, 100), (0, 100), ["", ""]),
    ],
)
def test_a_mark_needs_a_clear_difference_from_every_other_model(hits, at, marks) -> None:
    results = [result(str(row), "x", *one, at=start, images=200) for row, (*one, start) in enumerate(zip(hits, at))]
    column = [row[1] for row in cells(EvaluationReport(results).to_markdown())[1:]]
    assert column == [f"{mark}{count / 2:.2f}{mark}" for count, mark in zip(hits, marks)]
    one_group = [replace(found, groups=torch.zeros(200)) for found in results]
    assert "*" not in "".join(row[1] for row in cells(EvaluationReport(one_group).to_markdown()))


def test_a_held_out_part_has_its_own_table_columns_and_marks() -> None:
    found = [
        replace(result(model, "long-dci", hits, images=60), held_out=result(model, "", part))
        for model, hits, part in (("good", 50, 20), ("bad", 10, 19))
    ]
    report = EvaluationReport(found)
    text = report.to_text()
    assert "among the 40 held-out images alone" in text
    assert "held-out, text→image: bad minus good -2.5" in text
    rows = cells(EvaluationReport([*found, result("good", "other", 1)]).to_markdown().split("## All data sets")[1])
    assert rows[0][1:5] == [f"long-dci{part} {way} R@1" for part in ("", " held-out") for way in ("T→I", "I→T")]
    assert rows[1][1:5] == ["**83.33**", "**83.33**", "50.00", "50.00"]
    assert next(row for row in rows if "GOAL" in row[0])[1:5] == ["74.11", "73.29", "–", "–"]
    assert "the 40 images kept from training" in report.to_markdown()
    assert r"\multicolumn{10}{c}{long-dci held-out}" in report.to_latex()


def test_names_with_braces_stay_as_they_are() -> None:
    assert "{best} {x} test: 40 images" in EvaluationReport([result("m", "{best} {x}", 3)]).to_markdown()
