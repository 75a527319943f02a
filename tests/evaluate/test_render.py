"""Reports in every form: our numbers, comparisons, and the paper's numbers apart from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hnclip.evaluate.compare import compare_ranks
from hnclip.evaluate.matrix import Results
from hnclip.evaluate.metrics import summarize
from hnclip.evaluate.protocol import Compared
from hnclip.evaluate.published import published
from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.render import FORMS, Report, to_dict, to_latex, to_markdown, to_text, write_report
from hnclip.evaluate.result import PerQuery, Result


def result(model: str, data: str, hits: int, split: str = "test", *, held_out: bool = False) -> Result:
    """Of 40 pictures the first `hits` are found at rank 1, the others at rank 7."""
    rank = torch.where(torch.arange(40) < hits, 1, 7)
    ranks = Ranks(rank, rank, torch.arange(40))
    metrics = summarize(ranks, intervals=True).to_dict()
    return Result(
        model,
        data,
        split,
        40,
        40,
        3,
        0,
        metrics,
        held_out=metrics if held_out else None,
        caption_similarity={"pairwise": 0.5, "hardest": 0.9},
        queries=PerQuery(ranks, torch.arange(40)),
    )


@pytest.fixture
def report() -> Report:
    results = [result("base", "docci", 10), result("tuned", "docci", 30), result("base", "my_data", 12)]
    base, tuned = (found.queries.ranks for found in results[:2])  # type: ignore[union-attr]
    compared = [Compared("docci", "test", False, "tuned", "base", found) for found in compare_ranks(tuned, base)]
    return Report(Results(tuple(results)), compared)


def test_text_says_what_was_measured_and_what_was_not(report: Report) -> None:
    first, second, matrix = to_text(report).split("\n\n", 2)
    assert "docci test: 40 images, 40 captions" in first
    assert "warning: 3 captions are cut at the context of tuned" in first
    assert "caption similarity to base: 0.50 on average, 0.90 to the hardest companion" in first
    assert "25.0 [" in first  # 10 of 40, with its interval
    assert "text→image: tuned minus base +50.0 points of R@1" in first
    assert "tuned is better" in first
    assert first.index("published in the paper, not measured here") < first.index("paper, Table 1: HN-CLIP")
    assert "paper" not in second
    assert "my_data test" in second
    assert matrix.startswith("all data sets")


def test_the_papers_numbers_are_those_of_its_table(report: Report) -> None:
    (ours,) = published("docci", table="1", method="HN-CLIP")
    line = next(line for line in to_text(report).splitlines() if "Table 1: HN-CLIP" in line)
    assert line.split()[-6:] == [
        f"{ours.recall[way][k]:.1f}" for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)
    ]


@pytest.mark.parametrize("form", [".txt", ".md", ".tex", ".json"])
def test_without_the_paper_nothing_of_it_is_shown(report: Report, form: str) -> None:
    assert "Table 1" in FORMS[form](report)
    assert "Table 1" not in FORMS[form](replace(report, with_paper=False))
    validation = Report(Results((result("base", "docci", 10, "validation"),)), [])
    assert "Table 1" not in FORMS[form](validation)  # the paper evaluates on test splits


def test_held_out_pictures_have_a_table_of_their_own() -> None:
    text = to_text(Report(Results((result("base", "long-dci", 10, held_out=True),)), [], with_paper=False))
    assert "among the 40 held-out pictures alone" in text
    assert text.count("25.0 [") == 4


def test_markdown_and_latex_hold_every_table(report: Report) -> None:
    markdown, latex = to_markdown(report), to_latex(report)
    assert [line for line in markdown.splitlines() if line.startswith("#")] == [
        "## docci test",
        "## my_data test",
        "## All data sets",
    ]
    assert "- text→image: tuned minus base" in markdown
    assert "**75.00**" in markdown
    assert markdown.count("| model | T→I R@1 |") == 2  # its heading names the data set; the matrix has to itself
    assert "| model | docci T→I R@1 | docci I→T R@1 | my_data T→I R@1 |" in markdown
    assert latex.count(r"\begin{table}") == latex.count(r"\end{table}") == 3
    assert r"\label{tab:docci-test}" in latex
    assert r"\textbf{75.00}" in latex


def test_json_is_complete_and_keeps_the_paper_apart(report: Report) -> None:
    found = json.loads(json.dumps(to_dict(report)))
    assert [(row["model"], row["data"]) for row in found["results"]] == [
        ("base", "docci"),
        ("tuned", "docci"),
        ("base", "my_data"),
    ]
    assert found["results"][1]["text_to_image"]["R@1"] == 75.0
    first = found["comparisons"][0]
    assert (first["model"], first["against"], first["difference"]["mean"]) == ("tuned", "base", 50.0)
    assert {row["benchmark"] for row in found["paper"]} == {"DOCCI"}


def test_files_are_written_in_the_form_of_their_names(report: Report, tmp_path: Path) -> None:
    for suffix, form in FORMS.items():
        write_report(tmp_path / f"out{suffix}", report)
        assert (tmp_path / f"out{suffix}").read_text(encoding="utf-8") == form(report)
    with pytest.raises(ValueError, match=r"out\.csv: results are written as \.txt, \.md, \.tex, \.json"):
        write_report(tmp_path / "out.csv", report)
