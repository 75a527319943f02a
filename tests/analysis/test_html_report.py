"""The report: one page that needs nothing else, and never half a file."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from hnclip.analysis.report import (
    Beside,
    Block,
    Companions,
    Drawing,
    Findings,
    Gap,
    Section,
    Table,
    Text,
    page,
    write_report,
)
from hnclip.analysis.report.blocks import LONG_CELL, LONGEST_CAPTION
from hnclip.analysis.report.pictures import FLAT, SIDE, picture_address
from hnclip.analysis.report.style import STYLE
from hnclip.analysis.shown import CompanionRow, Finding, Shown

ROWS = [["model", "R@1"], ["InfoNCE", "9.0"], ["HN-CLIP", "41.3 [39.0, 43.5]"]]
EVIL = "<script>alert('x')</script> & \"{braces}\""


def figure() -> Figure:
    drawn = Figure(figsize=(1, 1.5))
    drawn.subplots().plot([0, 1])
    return drawn


def drawing(name: str) -> Drawing:
    return Drawing(name, figure(), "What it shows.")


def write(out: Path, *blocks: Block, **changes: Any) -> Path:
    """A report whose only section, Recall, holds these blocks."""
    arguments: dict[str, Any] = {
        "title": "Title",
        "summary": "One paragraph.",
        "sections": [Section("Recall", blocks)],
        "data": {"recall": [9.0, 41.3]},
    }
    return write_report(out, **arguments | changes)


class Page(HTMLParser):
    """Tags with their attributes, and texts by tag, also with its class: "p.label"."""

    VOID = ("meta", "img", "path", "circle")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[tuple[str, str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in self.VOID:
            self.open.append((tag, attributes.get("class") or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            tag, kind = self.open[-1]
            for key in {tag, f"{tag}.{kind}" if kind else tag}:
                self.texts.setdefault(key, []).append(data)


def decoded(address: str | None) -> Image.Image:
    assert address is not None
    return Image.open(io.BytesIO(base64.b64decode(address.split(",")[1])))


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_the_page_holds_everything(tmp_path):
    path = write(
        tmp_path / "new" / "folder",
        summary=["One.", "Two."],
        sections=[
            Section("Recall", [Text("Three.", "Four."), Table(ROWS, "Of 24 captions.")]),
            Section("First", [drawing("First steps"), Gap("the model has no image tower")]),
        ],
    )
    assert path == tmp_path / "new" / "folder" / "report.html"
    assert sorted(file.name for file in path.parent.iterdir()) == ["first-steps.png", "report.html", "report.json"]
    page = Page(path)
    assert page.open == []
    assert page.all("html") == [{"lang": "en"}]
    assert page.texts["h1"] == page.texts["title"] == ["Title"]
    assert page.texts["p"] == ["One.", "Two.", "Three.", "Four.", "Of 24 captions."]
    assert page.texts["h2"] == ["Recall", "First"]
    assert page.texts["th"] == ["model", "R@1", "InfoNCE", "HN-CLIP"]
    assert [cell["scope"] for cell in page.all("th")] == ["col", "col", "row", "row"]
    assert page.texts["td"] == ["9.0", "41.3 [39.0, 43.5]"]
    assert page.texts["figcaption"] == ["What it shows."]
    assert (page.texts["b"], page.texts["span"]) == (["Not shown:"], [" the model has no image tower"])
    assert page.texts["footer"] == ["Beside this page: report.json, first-steps.png."]
    (image,) = page.all("img")
    assert (image["alt"], image["width"], image["height"]) == ("First steps", "100", "150")
    png = base64.b64decode((image["src"] or "").removeprefix("data:image/png;base64,"))
    assert png == (path.parent / "first-steps.png").read_bytes()
    assert png.startswith(b"\x89PNG")


def test_what_scrolls_can_be_reached_and_has_a_name(tmp_path):
    rows = (CompanionRow(Shown("a", ()), ()), CompanionRow(Shown("b", ()), ()))
    page = Page(write(tmp_path, Table(ROWS), drawing("First steps"), Companions(rows)))
    boxes = [box for box in page.all("div") if (box.get("class") or "").startswith("scroll")]
    assert [box["aria-label"] for box in boxes] == ["Recall", "First steps", "Recall, row 1 of 2", "Recall, row 2 of 2"]
    assert {(box["tabindex"], box["role"]) for box in boxes} == {("0", "region")}


@pytest.mark.parametrize(("count", "listed"), [(3, False), (4, True)])
def test_contents_lead_to_sections(tmp_path, count, listed):
    headings = [f"Part {number}" for number in range(count)]
    page = Page(write(tmp_path, sections=[Section(heading, []) for heading in headings]))
    anchors = [f"#{section['id']}" for section in page.all("section")]
    assert len(set(anchors)) == count
    assert [link["href"] for link in page.all("a")] == (anchors if listed else [])
    assert page.texts.get("a", []) == (headings if listed else [])
    assert len(page.all("nav")) == listed


def test_the_page_asks_for_nothing(tmp_path):
    path = write(tmp_path, drawing("First steps"), sections=[Section(str(n), [drawing(f"d{n}")]) for n in range(5)])
    for tag, attributes in Page(path).tags:
        assert tag not in ("script", "link", "iframe")
        assert (attributes.get("href") or "#").startswith("#")
        assert (attributes.get("src") or "data:").startswith("data:")
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_text_is_text(tmp_path):
    shown = Shown(EVIL, ((EVIL, False), (EVIL, True)), Image.new("RGB", (2, 2)))
    path = write(
        tmp_path,
        title=EVIL,
        summary=EVIL,
        sections=[
            Section(EVIL, [Text(EVIL), Table([[EVIL, "n"], [EVIL, EVIL]], EVIL), Gap(EVIL)]),
            Section(EVIL, [Drawing(EVIL, figure(), EVIL), Findings([Finding("act", EVIL, EVIL, EVIL, EVIL)])]),
            Section(EVIL, [Companions([CompanionRow(shown, (shown,))], EVIL)]),
            Section(EVIL, []),
        ],
    )
    page = Page(path)
    assert page.open == []
    assert "script" not in [tag for tag, _ in page.tags]
    for tag, times in {
        "title": 1, "h1": 1, "h2": 4, "h3": 1, "a": 4, "td": 1, "mark": 2, "figcaption": 1,
        "p.number": 1, "p.label": 2, "p.remark": 2, "p.advice": 1,
    }.items():  # fmt: skip
        assert page.texts[tag] == [EVIL] * times
    assert page.texts["span"] == [" " + EVIL]
    assert [image["alt"] for image in page.all("img")] == [EVIL] + 2 * [f"Picture of the caption: {EVIL}"]
    assert {str(box.get("aria-label", EVIL))[: len(EVIL)] for box in page.all("div")} == {EVIL}
    assert (tmp_path / "script-alert-x-script-braces.png").exists()


def test_a_finding_says_its_level_in_a_word(tmp_path):
    findings = [
        Finding("act", "Duplicates", "38", "The same text twice.", "Remove them."),
        Finding("note", "Sampled", "± 0.2 %", "Not all pairs.", "Nothing."),
        Finding("good", "Pictures", "0", "None is missing.", ""),
    ]
    page = Page(write(tmp_path, Findings(findings)))
    assert page.texts["p.level"] == ["Act first", "Worth knowing", "Good"]
    assert len(page.all("svg")) == 3
    assert all(icon["aria-hidden"] == "true" for icon in page.all("svg"))
    assert [card["class"] for card in page.all("article")] == ["finding act", "finding note", "finding good"]
    assert page.texts["h3"] == ["Duplicates", "Sampled", "Pictures"]
    assert page.texts["p.number"] == ["38", "± 0.2 %", "0"]
    assert page.texts["p.advice"] == ["Remove them.", "Nothing."]
    assert page.texts["b"] == ["What to do"] * 2  # no empty box under the last one
    assert {"The same text twice.", "Not all pairs.", "None is missing."} <= set(page.texts["p"])


def test_companions_are_pictures_above_their_labels_and_captions(tmp_path):
    query = Shown("caption 7", (("a ", False), ("red boat", True)), Image.new("RGB", (30, 20), "red"))
    other = Shown("cosine 0.934", (("red boat", True), (" and سفينة", False)), Image.new("RGB", (20, 30), "blue"))
    path = write(tmp_path, Companions([CompanionRow(query, (other, Shown("cosine 0.9", ())))], "By cosine."))
    page = Page(path)
    assert [decoded(image["src"]).convert("RGB").getpixel((0, 0)) for image in page.all("img")] == [
        (255, 0, 0),
        (0, 0, 255),
    ]
    assert [(image["width"], image["height"]) for image in page.all("img")] == [("30", "20"), ("20", "30")]
    assert page.texts["p.label"] == ["caption 7", "cosine 0.934", "cosine 0.9"]
    assert '<p dir="auto">a <mark>red boat</mark></p>' in path.read_text(encoding="utf-8")
    assert '<p dir="auto"><mark>red boat</mark> and سفينة</p>' in path.read_text(encoding="utf-8")
    assert page.texts["div.gap"] == ["no picture"]
    assert page.texts["p.cut"] == ["no text"]
    assert [box["class"] for box in page.all("figure")] == ["shown query", "shown", "shown"]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Findings([]), "no findings"),
        (Companions([]), "no rows"),
        (Companions([CompanionRow(Shown("a", ()), ())]), "no companions"),
        (Table(ROWS[:1]), "no rows"),
    ],
    ids=["findings", "rows", "companions", "table"],
)
def test_nothing_to_show_is_a_marked_gap(tmp_path, block, reason):
    page = Page(write(tmp_path, block))
    assert page.texts["b"] == ["Not shown:"]
    assert reason in page.texts["span"][0]


@pytest.mark.parametrize("extra", [-1, 0, 1, 10_000_000])
def test_a_long_caption_is_cut_and_says_so(tmp_path, extra):
    head, tail = "x" * 100, "y" * (LONGEST_CAPTION - 100 + extra)
    shown = Shown("caption", ((head, False), (tail, True), ("", True)))
    path = write(tmp_path, Companions([CompanionRow(shown, ())]))
    page = Page(path)
    (marked,) = page.texts["mark"]
    assert marked == tail[: LONGEST_CAPTION - 100]
    assert page.texts.get("p.cut", []) == ([f"… and {extra:,} more characters"] if extra > 0 else [])
    assert path.stat().st_size < 40_000


def test_columns_of_long_cells_break_into_lines(tmp_path):
    page = Page(write(tmp_path, Table([["n", "text"], ["1", "x" * LONG_CELL], ["2", "y" * (LONG_CELL + 1)]])))
    looks = [attributes.get("class") for tag, attributes in page.tags if tag in ("th", "td")]
    assert looks == [None, "long", None, "long", None, "long"]
    assert "long" not in str(Page(write(tmp_path, Table([["n"], ["x" * LONG_CELL]]))).all("th"))


class TestPictures:
    """What is embedded is a small copy that looks like the picture."""

    @pytest.mark.parametrize(
        ("size", "small"), [((640, 480), (320, 240)), ((100, 2000), (16, 320)), ((7, 5), (7, 5)), ((4000, 1), (320, 1))]
    )
    def test_large_ones_shrink_and_small_ones_stay(self, size, small):
        address, *stated = picture_address(Image.new("RGB", size, "red"))
        assert tuple(stated) == decoded(address).size == small

    def test_a_photo_is_jpeg_and_a_drawing_png(self):
        assert picture_address(noise(SIDE, SIDE))[0].startswith("data:image/jpeg;base64,")
        for flat in (Image.new("RGB", (2000, 2000), "teal"), noise(40, 40)):
            address = picture_address(flat)[0]
            assert address.startswith("data:image/png;base64,")
            assert len(address) < 1.4 * FLAT
        assert np.array_equal(decoded(picture_address(noise(40, 40))[0]), noise(40, 40))

    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
    def test_every_mode_keeps_its_colours(self, mode):
        grey = Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode)
        before = grey.copy()
        assert decoded(picture_address(grey)[0]).convert("RGB").getpixel((1, 1)) == (255, 255, 255)
        assert grey == before

    def test_the_picture_of_the_caller_stays_whole(self):
        picture = noise(400, 400)
        picture_address(picture)
        assert picture.size == (400, 400)

    def test_transparency_lies_on_white(self):
        clear = Image.new("RGBA", (3, 3), (0, 0, 0, 0))
        assert decoded(picture_address(clear)[0]).getpixel((1, 1)) == (255, 255, 255)

    def test_a_turned_photo_stands_upright(self):
        picture = Image.new("RGB", (30, 20))
        picture.getexif()[0x0112] = 6
        assert picture_address(picture)[1:] == (20, 30)


def test_data_survives(tmp_path):
    data = {"counts": {"both": 1, "only HN-CLIP": 2}, "text→image": [1.5, None, "é", "half of a character: \ud83d"]}
    write(tmp_path, Text("\ud83d"), data=data)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == data
    assert Page(tmp_path / "report.html").texts["p"] == ["One paragraph.", "?"]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("blocks", "data", "message"),
    [
        ([], {"loss": float("nan")}, "not JSON compliant"),
        ([Table([["model", "R@1"], ["InfoNCE"]])], {}, "'Recall' needs"),
        ([Table([])], {}, "'Recall' needs"),
        ([Table([[]])], {}, "'Recall' needs"),
        ([drawing("A b"), drawing("a, b")], {}, "names that differ .* 'a, b'"),
        ([drawing("…")], {}, "names that differ .* '…'"),
    ],
    ids=["not a number", "ragged table", "empty table", "no columns", "same file twice", "no name"],
)
def test_what_cannot_be_rendered_leaves_the_old_report(tmp_path, blocks, data, message):
    write(tmp_path, drawing("A b"))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        write(tmp_path, *blocks, title="New", data=data)
    assert contents(tmp_path) == before


def test_a_page_is_never_half_written(tmp_path, monkeypatch):
    write(tmp_path, drawing("A b"))
    before = contents(tmp_path)
    whole = Path.write_bytes

    def disk_full(self: Path, content: bytes) -> int:
        if "report.html" not in self.name:
            return whole(self, content)
        whole(self, content[:100])
        raise OSError("No space left on device")

    monkeypatch.setattr(page.Path, "write_bytes", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, drawing("A b"), title="New")
    assert contents(tmp_path) == before


def palettes() -> dict[str, dict[str, str]]:
    texts = re.findall(r":root \{([^}]*)\}", STYLE)
    return {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text)) for name, text in zip(("light", "dark"), texts)
    }


def contrast(one: str, other: str) -> float:
    """WCAG 2.2: (L₁ + 0.05) / (L₂ + 0.05) of the two relative luminances, from 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_contrast_of_known_colours():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(scheme):
    colours = palettes()[scheme]
    assert palettes()["light"].keys() == palettes()["dark"].keys()
    pairs = [(ink, ground) for ink in ("ink", "quiet", "link") for ground in ("page", "card", "stripe")]
    pairs += [(level, ground) for level in ("good", "note", "act") for ground in ("card", f"{level}-tint")]
    pairs += [("ink", f"{level}-tint") for level in ("good", "note", "act")] + [("mark-ink", "mark")]
    for ink, ground in pairs:
        assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)


def test_a_figure_may_lie_beside_the_page_alone(tmp_path: Path) -> None:
    path = write(tmp_path, Beside("Near-duplicates", figure()))
    assert (tmp_path / "near-duplicates.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png" not in path.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="names that differ"):
        write(tmp_path, Beside("One", figure()), Drawing("one!", figure(), "Twice."))


def test_options_in_advice_are_not_broken(tmp_path: Path) -> None:
    advice = "Use --optim.negatives batch, or --cluster 4; a -- b <--x>."
    path = write(tmp_path, Findings([Finding("act", "Title", "1", "Meaning.", advice)]))
    page_text = path.read_text(encoding="utf-8")
    assert "<code>--optim.negatives</code> batch, or <code>--cluster</code> 4; a -- b &lt;--x&gt;." in page_text
