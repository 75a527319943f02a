"""One report in every format: nothing lost, nothing interpreted, files replaced all or not at all."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import pytest
from every_block import HOSTILE, every_block

from hnclip.report.document import FORMATS, Figure, Report, Section


@pytest.mark.parametrize(
    ("suffix", "marked"), [("txt", "35.2]*"), ("md", "**30.00"), ("html", "<b>30.00"), ("tex", r"\textbf{30.00")]
)
def test_every_block_is_in_every_format(suffix: str, marked: str) -> None:
    text = every_block().to_latex("study") if suffix == "tex" else every_block().render(suffix)
    words = ["Recall in percent", "30.00 [25.1, 35.2]", marked]
    if suffix != "tex":  # which holds tables and figures alone
        words += ["12 of 340", "One paragraph.", "Average of both directions.", "was not evaluated", "cosine 0.953"]
    assert [word for word in words if word not in text] == []


def test_hostile_text_is_text() -> None:
    page = every_block().to_html()
    assert "<script" not in page
    assert page.count(str(escape(HOSTILE)).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")) >= 8
    for address in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert address.startswith(("data:image/", "#section-"))


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


def test_one_file_in_the_format_of_its_ending(tmp_path: Path) -> None:
    report = Report("half \ud800 character", [], [], {"a": float("nan")})
    report.write_file(tmp_path / "out.md")
    assert (tmp_path / "out.md").read_text(encoding="utf-8") == "# half ? character\n"
    for name, word in (("out.csv", "csv"), ("out.json", "JSON")):
        with pytest.raises(ValueError, match=word):
            report.write_file(tmp_path / name)
        assert not (tmp_path / name).exists()
