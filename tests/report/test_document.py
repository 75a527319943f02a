"""One report in every format: nothing lost, nothing interpreted, files replaced all or not at all."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path

import pytest
from every_block import HOSTILE, caption_row, every_block
from matplotlib.figure import Figure as Drawing
from PIL import Image

from hnclip.report.document import FORMATS, CaptionedImage, CaptionRow, CaptionRows, Figure, Report, Section, Table
from hnclip.report.figure_style import blank_figure


@pytest.mark.parametrize("suffix", ["txt", "md", "html"])
def test_every_block_is_in_every_format(suffix: str) -> None:
    text = every_block().render(suffix)
    said = [
        "Findings", "12 of 340", "Two images share a caption.", "Recall in percent", "30.00 [25.1, 35.2]",
        "One paragraph.", "Average of both directions.", "the run was not evaluated", "cosine 0.953",
    ]  # fmt: skip
    assert [words for words in said if words not in text] == []
    marked = {"txt": ("35.2]*", "35.2]+"), "md": ("**30.00", "*30.00"), "html": ("<b>30.00", "<i>30.00")}[suffix]
    named = {"txt": ("* ", "+"), "md": ("bold", "italic"), "html": ("bold", "italic")}[suffix]
    assert all(mark in text for mark in marked)
    assert "The best number is {}, the second {}.".format(*(name.strip() for name in named)) in text


def test_latex_has_tables_and_figures_with_labels() -> None:
    latex = every_block().to_latex("study")
    assert re.findall(r"\\label{(.*)}", latex) == ["tab:study-1", "tab:study-2", "fig:study-3", "tab:study-4"]
    assert r"\textbf{30.00 [25.1, 35.2]}" in latex
    assert r"& \multicolumn{5}{c}{scenes/park} & \multicolumn{5}{c}{scenes/street} \\" in latex
    assert r"\includegraphics[width=\linewidth]{efficiency}" in latex


def test_hostile_text_is_text() -> None:
    page = every_block().to_html()
    assert "<script" not in page
    assert HOSTILE not in page
    assert page.count(str(escape(HOSTILE)).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")) >= 8
    for address in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert address.startswith(("data:image/", "#section-"))
    assert json.loads(every_block().to_json())["name"] == HOSTILE


def test_spans_are_headers_over_headers_only_where_they_differ() -> None:
    table = Table(["m", "R@1", "R@1"], [["x", "1", "2"]], spans=[("a", 1), ("b", 1)])
    assert table.flat_headers == ["m", "a R@1", "b R@1"]
    assert replace(table, spans=[("a", 2)]).flat_headers == ["m", "R@1", "R@1"]


def test_captions_are_highlighted_and_images_are_small() -> None:
    large = CaptionedImage("c", (("a < b", True),), Image.effect_noise((900, 600), 90))
    page = Report("t", [], [Section("s", [CaptionRows([CaptionRow(large, ()), caption_row()])])]).to_html()
    assert "<mark>a &lt; b</mark>" in page
    assert 'width="320" height="213" src="data:image/webp' in page
    assert "no image" in page


def test_files_are_written_together_and_the_same_each_time(tmp_path: Path) -> None:
    written = every_block().write(tmp_path / "a", "study", formats=FORMATS, figures=("png", "svg", "pdf"))
    assert {path.name for path in written} == {
        *(f"study.{suffix}" for suffix in FORMATS), "efficiency.png", "efficiency.svg", "efficiency.pdf"
    }  # fmt: skip
    every_block().write(tmp_path / "b", "study", formats=FORMATS, figures=("png", "svg", "pdf"))
    assert all((tmp_path / "b" / path.name).read_bytes() == path.read_bytes() for path in written)

    failing = Report("new", [], [Section("", [Figure("efficiency", "t", lambda: 1 / 0)])])  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        failing.write(tmp_path / "a", "study")
    assert all((tmp_path / "b" / path.name).read_bytes() == path.read_bytes() for path in written)


def test_a_figure_is_drawn_once_and_only_if_it_is_needed() -> None:
    drawn: list[int] = []
    figure = Figure("f", "title", lambda: drawn.append(1) or blank_figure(1.0))  # type: ignore[func-returns-value]
    assert "f.svg" in Report("t", [], [Section("s", [figure])]).to_markdown()
    assert drawn == []
    assert figure.render("png") != figure.render("svg")
    assert drawn == [1]


def test_the_last_bits_of_a_layout_do_not_change_a_figure() -> None:
    def draw(shift: float) -> Drawing:
        figure = Drawing()
        figure.add_axes((0.1 + shift, 0.1, 0.5, 0.5)).plot([0, 1])
        return figure

    first, second = (Figure("f", "t", partial(draw, shift)).render("svg") for shift in (0.0, 1e-15))
    assert first == second


def test_one_file_in_the_format_of_its_ending(tmp_path: Path) -> None:
    report = Report("half \ud800 character", [], [], {"a": 1})
    report.write_file(tmp_path / "out.md")
    assert (tmp_path / "out.md").read_text(encoding="utf-8") == "# half ? character\n"
    with pytest.raises(ValueError, match=r"out\.csv"):
        report.write_file(tmp_path / "out.csv")
    with pytest.raises(ValueError, match="JSON"):
        Report("t", [], [], {"a": float("nan")}).write_file(tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()
