"""What a section of a report is made of. All text is plain text and escaped here.

Every block has `html(heading, files)`: its part of the page, under that heading; files that belong beside the page are
added to `files`, by name.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Protocol

from hnclip.analysis.shown import CompanionRow, Finding, Passage, Shown

from .pictures import picture_address, png_address

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 180  # of the files; sharp on a dense screen at the full width of the page
SCREEN_DPI = 100  # an inch of a figure on the page, in pixels of the style
LONG_CELL = 40  # characters beyond which the cells of a table's column are broken into lines
LONGEST_CAPTION = 2000  # characters of a caption that are shown; a row of longer ones could not be compared by eye

_ICONS = {
    "good": '<circle cx="12" cy="12" r="9"/><path d="m8 12.5 2.8 2.8L16 9.5"/>',
    "note": '<circle cx="12" cy="12" r="9"/><path d="M12 11v5.5M12 7.5v.01"/>',
    "act": '<path d="M12 3.5 2.5 20h19L12 3.5ZM12 10v4.5M12 17.2v.01"/>',
    "gap": '<circle cx="12" cy="12" r="9" stroke-dasharray="3.2 2.45"/><path d="M8.5 12h7"/>',
}
_LEVELS = {"good": "Good", "note": "Worth knowing", "act": "Act first"}


class Block(Protocol):
    def html(self, heading: str, files: dict[str, bytes]) -> str: ...


@dataclass(frozen=True, init=False)
class Text:
    """Paragraphs."""

    paragraphs: tuple[str, ...]

    def __init__(self, *paragraphs: str) -> None:
        object.__setattr__(self, "paragraphs", paragraphs)

    def html(self, heading: str, files: dict[str, bytes]) -> str:
        return "\n".join(f'<p dir="auto">{escape(text)}</p>' for text in self.paragraphs)


@dataclass(frozen=True)
class Table:
    """Cells. The first row names the columns, the first column names the rows, and all others are aligned to the
    right, as in `text_table`, unless they are long."""

    rows: Sequence[Sequence[str]]
    note: str = ""

    def html(self, heading: str, files: dict[str, bytes]) -> str:
        if not self.rows or not self.rows[0] or any(len(row) != len(self.rows[0]) for row in self.rows):
            raise ValueError(
                f"the table under {heading!r} needs a first row of column names and rows of the same length"
            )
        names, *rows = self.rows
        long = [any(len(cell) > LONG_CELL for cell in column) for column in zip(*self.rows)]
        head = _cells(names, long, first="th scope=col", rest="th scope=col")
        body = "\n".join(_cells(row, long, first="th scope=row", rest="td") for row in rows)
        table = f"<table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"
        none = "" if rows else "\n" + Gap("this table has no rows").html(heading, files)
        return _scroll(heading, table, "table") + none + _remark(self.note)


@dataclass(frozen=True)
class Drawing:
    """A figure with its caption. `name` says what it is, also to who cannot see it, and names the file: "First steps"
    is first-steps.png."""

    name: str
    figure: Figure
    caption: str

    def html(self, heading: str, files: dict[str, bytes]) -> str:
        png = _save(self.name, self.figure, files)
        width, height = (round(SCREEN_DPI * inches) for inches in self.figure.get_size_inches())
        image = (
            f'<img alt="{escape(self.name)}" width="{width}" height="{height}" style="--width: {width}px" '
            f'src="{png_address(png)}">'
        )
        caption = f'<figcaption dir="auto">{escape(self.caption)}</figcaption>'
        return f'<figure class="drawing">\n{_scroll(self.name, image, "paper")}\n{caption}\n</figure>'


@dataclass(frozen=True)
class Beside:
    """A figure in a file alone: what the page shows otherwise."""

    name: str
    figure: Figure

    def html(self, heading: str, files: dict[str, bytes]) -> str:
        _save(self.name, self.figure, files)
        return ""


@dataclass(frozen=True)
class Companions:
    """Captions beside the captions that are nearest to them, with pictures."""

    rows: Sequence[CompanionRow]
    note: str = ""

    def html(self, heading: str, files: dict[str, bytes]) -> str:
        if not self.rows:
            return Gap("there are no rows to show").html(heading, files) + _remark(self.note)
        rows = []
        for number, row in enumerate(self.rows, start=1):
            others = [_shown(companion) for companion in row.companions]
            others = others or [Gap("this caption has no companions").html(heading, files)]
            name = f"{heading}, row {number} of {len(self.rows)}"
            rows.append(_scroll(name, "\n".join([_shown(row.query, "shown query"), *others]), "row"))
        return "\n".join(rows) + _remark(self.note)


@dataclass(frozen=True)
class Findings:
    """Cards: how much it matters, the number, what it means, what to do."""

    items: Sequence[Finding]

    def html(self, heading: str, files: dict[str, bytes]) -> str:
        if not self.items:
            return Gap("there are no findings").html(heading, files)
        return '<div class="findings">\n' + "\n".join(_finding(item) for item in self.items) + "\n</div>"


@dataclass(frozen=True)
class Gap:
    """A box in place of something that could not be shown: what is missing, and why."""

    reason: str

    def html(self, heading: str, files: dict[str, bytes]) -> str:
        return f'<p class="gap" role="note">{_icon("gap")}<span><b>Not shown:</b> {escape(self.reason)}</span></p>'


def _save(name: str, figure: Figure, files: dict[str, bytes]) -> bytes:
    """The figure as a file of that name."""
    stem = re.sub(r"\W+", "-", name.lower()).strip("-")
    if not stem or f"{stem}.png" in files:
        raise ValueError(f"drawings need names that differ in more than signs and case, got {name!r}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    files[f"{stem}.png"] = buffer.getvalue()
    return buffer.getvalue()


def _cells(row: Sequence[str], long: Sequence[bool], *, first: str, rest: str) -> str:
    """A row of a table; cells of long columns are broken into lines."""
    cells = []
    for column, (text, wide) in enumerate(zip(row, long)):
        tag = rest if column else first
        look = ' class="long" dir="auto"' if wide else ""
        cells.append(f"<{tag}{look}>{escape(text)}</{tag[:2]}>")
    return f"<tr>{''.join(cells)}</tr>"


def _finding(item: Finding) -> str:
    # Options are to be copied, so no line breaks after their hyphens.
    said = re.sub(r"(?<!\S)--[\w.-]*\w", r"<code>\g<0></code>", escape(item.advice))
    advice = f'<p class="advice"><b>What to do</b>{said}</p>' if item.advice else ""
    return (
        f'<article class="finding {item.level}">\n'
        f'<p class="level">{_icon(item.level)}{_LEVELS[item.level]}</p>\n'
        f"<h3>{escape(item.title)}</h3>\n"
        f'<p class="number">{escape(item.number)}</p>\n'
        f"<p>{escape(item.meaning)}</p>\n{advice}\n</article>"
    )


def _shown(shown: Shown, kind: str = "shown") -> str:
    if shown.picture is None:
        picture = f'<div class="gap">{_icon("gap")}no picture</div>'
    else:
        address, width, height = picture_address(shown.picture)
        alt = escape(f"Picture of the caption: {shown.label}")
        picture = f'<img alt="{alt}" width="{width}" height="{height}" src="{address}">'
    return (
        f'<figure class="{kind}">\n{picture}\n<figcaption><p class="label">{escape(shown.label)}</p>\n'
        f"{_caption(shown.text)}</figcaption>\n</figure>"
    )


def _caption(text: Passage) -> str:
    """The text with its highlights, up to `LONGEST_CAPTION`, and how much was left out."""
    left, pieces = LONGEST_CAPTION, []
    for piece, highlighted in text:
        part = escape(piece[:left])
        pieces.append(f"<mark>{part}</mark>" if highlighted and part else part)
        left -= len(piece[:left])
    total = sum(len(piece) for piece, _ in text)
    if not total:
        return '<p class="cut">no text</p>'
    cut = f'\n<p class="cut">… and {total - LONGEST_CAPTION:,} more characters</p>' if total > LONGEST_CAPTION else ""
    return f'<p dir="auto">{"".join(pieces)}</p>{cut}'


def _scroll(name: str, content: str, kind: str) -> str:
    """A box that scrolls sideways on a narrow screen, also by keyboard."""
    return f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{escape(name)}">\n{content}\n</div>'


def _remark(text: str) -> str:
    return f'\n<p class="remark" dir="auto">{escape(text)}</p>' if text else ""


def _icon(name: str) -> str:
    return f'<svg viewBox="0 0 24 24" aria-hidden="true">{_ICONS[name]}</svg>'
