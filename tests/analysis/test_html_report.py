"""The report: one page that needs nothing else, and never half a file."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from hnclip.analysis import report
from hnclip.analysis.report import write_report

ROWS = [["model", "R@1"], ["InfoNCE", "9.0"], ["HN-CLIP", "41.3 [39.0, 43.5]"]]


def figure() -> Figure:
    drawn = Figure(figsize=(1, 1))
    drawn.subplots().plot([0, 1])
    return drawn


def write(out: Path, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "title": "Title",
        "summary": "One paragraph.",
        "tables": {"Recall": ROWS},
        "figures": {"First steps": (figure(), "What it shows.")},
        "data": {"recall": [9.0, 41.3]},
    }
    return write_report(out, **arguments | changes)


class Page(HTMLParser):
    """Tags with their attributes, and the text inside each."""

    VOID = ("meta", "img")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data)


def test_the_page_holds_everything(tmp_path):
    path = write(tmp_path / "new" / "folder", summary=["One.", "Two."])
    assert path == tmp_path / "new" / "folder" / "report.html"
    assert sorted(file.name for file in path.parent.iterdir()) == ["first-steps.png", "report.html", "report.json"]
    page = Page(path)
    assert page.open == []
    assert page.texts["h1"] == page.texts["title"] == ["Title"]
    assert page.texts["p"] == ["One.", "Two."]
    assert page.texts["h2"] == ["Recall", "First steps"]
    assert page.texts["th"] == ["model", "R@1", "InfoNCE", "HN-CLIP"]
    assert page.texts["td"] == ["9.0", "41.3 [39.0, 43.5]"]
    assert page.texts["figcaption"] == ["What it shows."]
    (image,) = (attributes for tag, attributes in page.tags if tag == "img")
    assert image["alt"] == "First steps"
    png = base64.b64decode(image["src"].removeprefix("data:image/png;base64,"))
    assert png == (path.parent / "first-steps.png").read_bytes()
    assert png.startswith(b"\x89PNG")


def test_the_page_asks_for_nothing(tmp_path):
    path = write(tmp_path)
    page = Page(path)
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe")
        assert "href" not in attributes
        assert (attributes.get("src") or "data:").startswith("data:")
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_text_is_text(tmp_path):
    evil = "<script>alert('x')</script> & \"{braces}\""
    path = write(
        tmp_path,
        title=evil,
        summary=evil,
        tables={evil: [[evil, "n"], [evil, evil]]},
        figures={evil: (figure(), evil)},
    )
    page = Page(path)
    assert "script" not in [tag for tag, _ in page.tags]
    for tag in ("title", "h1", "p", "td", "figcaption"):
        assert page.texts[tag] == [evil]
    assert page.texts["h2"] == [evil, evil]
    assert [attributes["alt"] for tag, attributes in page.tags if tag == "img"] == [evil]
    assert (tmp_path / "script-alert-x-script-braces.png").exists()


def test_data_survives(tmp_path):
    data = {"counts": {"both": 1, "only HN-CLIP": 2}, "text→image": [1.5, None, "é"]}
    write(tmp_path, data=data)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == data


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"loss": float("nan")}}, "not JSON compliant"),
        ({"tables": {"Recall": [["model", "R@1"], ["InfoNCE"]]}}, "'Recall' needs"),
        ({"tables": {"Recall": []}}, "'Recall' needs"),
        ({"figures": {"A b": (figure(), ""), "a, b": (figure(), "")}}, "headings that differ"),
    ],
    ids=["not a number", "ragged table", "empty table", "same file twice"],
)
def test_what_cannot_be_rendered_leaves_the_old_report(tmp_path, changes, message):
    write(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        write(tmp_path, title="New", **changes)
    assert contents(tmp_path) == before


def test_a_page_is_never_half_written(tmp_path, monkeypatch):
    write(tmp_path)
    before = contents(tmp_path)
    whole = Path.write_bytes

    def disk_full(self: Path, content: bytes) -> int:
        if "report.html" not in self.name:
            return whole(self, content)
        whole(self, content[:100])
        raise OSError("No space left on device")

    monkeypatch.setattr(report.Path, "write_bytes", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, title="New")
    assert contents(tmp_path) == before
