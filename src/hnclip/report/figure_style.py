"""What all figures share: their width, colours that colour-blind readers tell apart, legends and text of users.

A figure is a `matplotlib.figure.Figure` of its own, without pyplot's global state, and matplotlib is imported only when
one is drawn. Dashes, markers and hatches repeat what colours say, for prints in grey.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import cycle
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

WIDTH = 9.0  # inches of every figure
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
DASHES: tuple[Any, ...] = ("-", (0, (5, 1)), (0, (1, 1)), "-.")
MARKERS = ("o", "s", "^", "D", "v")  # one more than dashes: more pairs of both
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
CORRECT, WRONG, NEUTRAL = "#009E73", "#D55E00", "#777777"

_LETTERS_PER_INCH = 12  # of text in 9 points, on average
# Of captions and names: matplotlib takes each letter from the first installed font that has it.
_FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC", "Arial Unicode MS")


def blank_figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def line_styles() -> Iterator[dict[str, Any]]:
    """Colour, dashes and marker of the first line, the second, … without end."""
    for colour, dash, marker in zip(cycle(COLOURS), cycle(DASHES), cycle(MARKERS)):
        yield {"color": colour, "linestyle": dash, "marker": marker, "linewidth": 2}


def wrap(text: str, width: float, lines: int) -> str:
    """Text of a user in lines of about `width` inches, cut with an ellipsis; letters of East Asia count twice."""
    text = text.encode(errors="replace").decode()  # matplotlib cannot draw half of a character
    wide = sum(east_asian_width(letter) in "WF" for letter in text) / max(1, len(text))
    columns = max(8, int(width * _LETTERS_PER_INCH / (1 + wide)))
    return textwrap.fill(text, columns, max_lines=lines, placeholder=" …")


def user_text(size: float = 9) -> dict[str, Any]:
    """Options for text that a user wrote: a `$` starts no formula, and other scripts have a font."""
    return {"parse_math": False, "fontfamily": list(_installed_fonts()), "fontsize": size}


@cache
def _installed_fonts() -> tuple[str, ...]:
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return tuple(font for font in _FONTS if font in installed)


def set_title(axes: Axes, text: str, width: float, lines: int = 2) -> None:
    axes.set_title(wrap(text, width, lines), **user_text(10))


def add_grid(axes: Axes) -> None:
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """One legend above all panels, which show the same things: what handles stand for, by name."""
    longest = max(min(len(name), _LETTERS_PER_INCH * WIDTH) for name in handles) / _LETTERS_PER_INCH
    columns = max(1, min(len(handles), int(WIDTH / (longest + 0.8))))
    _legend(figure, handles, WIDTH - 1, loc="outside upper center", ncols=columns)


def add_panel_legend(axes: Axes, title: str, handles: Mapping[str, Any], width: float) -> None:
    """A title above one panel of this width, and below it a legend of its own."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "alignment": "left"}
    legend = _legend(axes, handles, width - 0.8, title=" ", **place)
    legend.get_title().set(text=wrap(title, width - 0.6, 2), **user_text(10))


def _legend(owner: Any, handles: Mapping[str, Any], width: float, **options: Any) -> Legend:
    # Names are set afterwards: some versions of matplotlib ignore those that begin with an underscore.
    numbers = [str(number) for number in range(len(handles))]
    legend = owner.legend(list(handles.values()), numbers, frameon=False, handlelength=3, **options)
    for text, name in zip(legend.get_texts(), handles):
        text.set(text=wrap(name, width, 2), **user_text())
    return legend


def whole_ticks(axes: Axes) -> None:
    """Whole numbers on the horizontal axis, also if there is only one."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim()
    if high - low < 1:
        axes.set_xlim(low - 1, high + 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
