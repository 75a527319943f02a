"""Captions beside their pictures: what models put first, and which captions are nearly the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image

from hnclip.analysis.figures.style import COLOURS, CORRECT, NEUTRAL, WIDTH, WRONG, blank_figure, words_figure
from hnclip.analysis.figures.words import joined, look, right_to_left, width, wrap, wrapped
from hnclip.analysis.shown import CompanionRow, Passage, Shown
from hnclip.data.images import to_rgb

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HIGHLIGHT = "#FBD9A5"  # light enough for black words, and grey on a grey print

_PIXELS = 600  # of a picture's longest side: no figure shows more
_SIZE, _LINE_HEIGHT = 8, 0.15  # points of captions, inches of their lines
_CAPTION_ROOM = 3.5  # inches of the caption column of `retrieval_figure`
_CAPTION_LINES = 40  # no figure grows without end
_PASSAGE_LINES = 16
_AIR = 0.12  # inches between columns and between rows


@dataclass(frozen=True)
class Example:
    """One caption, its picture, and by the model's name the picture it puts first and whether that is the right one."""

    caption: str
    right: Image.Image
    answers: Mapping[str, tuple[Image.Image, bool]]


def retrieval_figure(examples: Sequence[Example]) -> Figure:
    """One row per example: the caption, its picture, and the picture each model puts first, marked as correct or wrong.

    Rows are as high as their caption needs, up to 40 lines. Without examples the figure says so in words.

    Reference:
        HN-CLIP, figure s-qual.
    """
    if not examples:
        return words_figure("No examples: for every caption both models put the right picture first, or neither did.")
    captions = [wrapped(example.caption, _CAPTION_ROOM, _SIZE, _CAPTION_LINES) for example in examples]
    columns = 1 + max(len(example.answers) for example in examples)
    side = (WIDTH - _CAPTION_ROOM - 0.1) / columns
    heights = [max(side + 0.25, _LINE_HEIGHT * (caption.count("\n") + 1) + 0.3) for caption in captions]
    figure = blank_figure(sum(heights))
    figure.set_layout_engine("constrained", w_pad=0.05, h_pad=0.05)
    ratios = [_CAPTION_ROOM + 0.1, *[side] * columns]
    grid = figure.add_gridspec(len(examples), 1 + columns, width_ratios=ratios, height_ratios=heights)
    for row, (example, caption) in enumerate(zip(examples, captions)):
        words = figure.add_subplot(grid[row, 0])
        words.axis("off")
        words.text(0, 1, caption, va="top", fontsize=_SIZE, linespacing=1.3, **look())
        _picture(figure.add_subplot(grid[row, 1]), example.right, "the caption's picture", NEUTRAL, side)
        for column, (name, (picture, correct)) in enumerate(example.answers.items(), start=2):
            label, colour = (f"{name} ✓ correct", CORRECT) if correct else (f"{name} ✗ wrong", WRONG)
            _picture(figure.add_subplot(grid[row, column]), picture, label, colour, side)
    return figure


def near_duplicate_figure(rows: Sequence[CompanionRow]) -> Figure:
    """One row per caption: its picture and those of its nearest companions, each over its label and its text.

    Words that a passage highlights stand on a tint. Texts are cut after 16 lines, with an ellipsis. Without rows the
    figure says so in words; a picture that is None is a grey box that says so. Up to four companions are wide enough
    to be read.

    Reference:
        HN-CLIP, figures s-nd-docci, s-nd-dci, s-nd-ldci and s-nd-urban.
    """
    if not rows:
        return words_figure("No near-duplicate captions to show.")
    columns = 1 + max(len(row.companions) for row in rows)
    side = (WIDTH - _AIR * (columns + 1)) / columns
    laid = [_lay_out(row, side) for row in rows]
    height = sum(row.height for row in laid)
    figure = blank_figure(height)
    figure.set_layout_engine("none")
    # One canvas in inches from the upper left corner: text is placed to the width of its letters.
    canvas = figure.add_axes((0, 0, 1, 1))
    canvas.set(xlim=(0, WIDTH), ylim=(height, 0))
    canvas.axis("off")
    top = _AIR
    for number, row in enumerate(laid):
        if number:
            canvas.plot([_AIR, WIDTH - _AIR], [top - _AIR, top - _AIR], color="#DDDDDD", linewidth=0.8)
        for column, cell in enumerate(row.cells):
            left = _AIR + column * (side + _AIR)
            box = (left / WIDTH, 1 - (top + row.picture) / height, side / WIDTH, row.picture / height)
            colour = COLOURS[0] if column else NEUTRAL
            _picture(figure.add_axes(box), cell.shown.picture, None, colour, side)
            below = top + row.picture + 0.2
            canvas.text(left, below, cell.label, va="baseline", fontsize=9, color=colour, **look())
            _write(canvas, cell.lines, left, below + 0.18, side)
        top += row.height
    return figure


@dataclass(frozen=True)
class _Cell:
    shown: Shown
    label: str
    lines: Sequence[Passage]


@dataclass(frozen=True)
class _Row:
    """Cells of one row, and in inches the height of its pictures and of all of it."""

    cells: Sequence[_Cell]
    picture: float
    height: float


def _lay_out(row: CompanionRow, side: float) -> _Row:
    cells = [
        _Cell(shown, wrapped(shown.label, side, 9, 1), wrap(shown.text, side, _SIZE, _PASSAGE_LINES))
        for shown in (row.query, *row.companions)
    ]
    shapes = [shown.picture.height / shown.picture.width for shown in (row.query, *row.companions) if shown.picture]
    picture = side * min(1.0, max([0.4, *shapes]))  # a tall picture is made narrower, not the row higher
    text = _LINE_HEIGHT * max(len(cell.lines) for cell in cells)
    return _Row(cells, picture, picture + 0.3 + text + 2.5 * _AIR)


def _write(canvas: Axes, lines: Sequence[Passage], left: float, top: float, side: float) -> None:
    """Lines of a passage below each other, highlights on a tint; from the right in scripts that begin there.

    Every word is placed for itself: letters are as wide as pixels allow, which over a line would add up.
    """
    from matplotlib.patches import Rectangle

    backwards = right_to_left("".join(joined(line) for line in lines))
    for number, line in enumerate(lines):
        baseline = top + number * _LINE_HEIGHT
        place = left + side if backwards else left
        for text, highlighted in line:
            for word in re.findall(r"\S+ ?| ", text):
                wide = width(word, _SIZE)
                if highlighted:
                    corner = (place - wide if backwards else place, baseline - 0.75 * _LINE_HEIGHT)
                    canvas.add_patch(Rectangle(corner, wide, _LINE_HEIGHT, color=HIGHLIGHT, linewidth=0))
                if word != " ":
                    side_of = "right" if backwards else "left"
                    canvas.text(place, baseline, word.rstrip(), ha=side_of, va="baseline", fontsize=_SIZE, **look())
                place += -wide if backwards else wide


def _picture(axes: Axes, picture: Image.Image | None, label: str | None, colour: str, side: float) -> None:
    axes.set(xticks=[], yticks=[], anchor="N")
    axes.spines[:].set(color=colour, linewidth=3)
    if picture is None:
        axes.set_facecolor("#E5E5E5")
        axes.text(0.5, 0.5, "no picture", ha="center", va="center", fontsize=9, transform=axes.transAxes)
    else:
        axes.imshow(_small(picture))
    if label is not None:
        axes.set_xlabel(wrapped(label, side, 9, 2), color=colour, fontsize=9, **look())


def _small(picture: Image.Image) -> Any:
    """The picture in RGB, no larger than a figure shows it."""
    picture = to_rgb(picture)
    picture.thumbnail((_PIXELS, _PIXELS))
    return picture
