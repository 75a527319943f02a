"""What all figures share: size, colours that colour-blind readers tell apart, legends, log axes with a floor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from hnclip.analysis.figures.words import drawable, look, width, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLOOR = 1e-10  # a log axis has no zero; values below this are drawn here
# Okabe–Ito, told apart by colour-blind readers. Dashes and markers say the same once more, for grey prints.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1)), (0, (1, 1)), "-.")
MARKERS = ("o", "s", "^", "D", "v")  # one more than dashes: more pairs of both
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
CORRECT, WRONG, NEUTRAL = "#009E73", "#D55E00", "#777777"
WIDTH = 9.0  # inches of every figure: 900 pixels at 100 dpi

_LEGEND_SIZE = 10  # points
_HANDLE_ROOM = 0.8  # inches of a legend that are not an entry's name: its handle, and the space around


def blank_figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def words_figure(text: str) -> Figure:
    """A figure that says in words why it shows nothing else."""
    figure = blank_figure(1.0)
    figure.text(0.5, 0.5, text, ha="center", va="center", fontsize=10)
    return figure


def styles() -> Iterator[tuple[str, Any, str]]:
    """Colour, dashes and marker of the first run, the second, … without end."""
    return zip(cycle(COLOURS), cycle(DASHES), cycle(MARKERS))


def finish(figure: Figure, handles: Mapping[str, Any]) -> None:
    """Quiet axes, and one legend above all panels, which show the same things.

    Args:
        handles: what the legend names, by name.
    """
    for axes in figure.axes:
        quiet(axes)
    figure.align_ylabels()
    add_legend(figure, handles)


def quiet(axes: Axes) -> None:
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """A legend above all panels, in as many columns as the longest name leaves room for."""
    names = [wrapped(name, WIDTH - _HANDLE_ROOM, _LEGEND_SIZE, 1) for name in handles]
    widest = max(width(name, _LEGEND_SIZE) for name in names)
    columns = max(1, min(len(names), int(WIDTH / (widest + _HANDLE_ROOM))))
    _legend(figure, handles, names, loc="outside upper center", ncols=columns, fontsize=_LEGEND_SIZE)


def panel_legend(axes: Axes, title: str, handles: Mapping[str, Any], room: float, size: float = 9) -> None:
    """A title above a panel that is `room` inches wide, and under it a legend of its own."""
    names = [wrapped(name, room - _HANDLE_ROOM, size, 2) for name in handles]
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "alignment": "left"}
    _legend(axes, handles, names, title=title, title_fontsize=10, fontsize=size, **place)


def _legend(owner: Any, handles: Mapping[str, Any], names: Sequence[str], **options: Any) -> None:
    # Names are put in afterwards: matplotlib leaves out labels that begin with an underscore.
    numbered = [str(number) for number in range(len(names))]
    legend = owner.legend([*handles.values()], numbered, frameon=False, handlelength=3, **options)
    for text, name in zip(legend.get_texts(), names):
        text.set(text=name, **look())


def running(values: Any, window: int, statistic: Callable[[Any], Any]) -> list[float]:
    """`statistic` of the `window` values around each value; at both ends, of those that exist."""
    half = window // 2
    return [float(statistic(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def running_window(longest: int) -> int:
    """A twentieth of the longest run, and odd, so that it has a middle."""
    return max(3, longest // 20) | 1


def numbers(entries: Iterable[Any], key: str) -> np.ndarray:
    """That value of all entries, NaN where there is none."""
    return np.array([entry[key] for entry in entries], dtype=float)


def clamped(values: Any) -> np.ndarray:
    """Values as a log axis shows them, between `FLOOR` and its reciprocal; NaN stays a gap."""
    return np.clip(np.asarray(values, dtype=float), FLOOR, 1 / FLOOR)


def log_axis(panels: Iterable[Axes], values: Any) -> None:
    """One logarithmic scale for all panels, from these values, with whole decades as ticks.

    If one of the values lies at `FLOOR`, this is a tick, named as the bound that it is.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    low, high = (finite.min(), finite.max()) if finite.size else (FLOOR, 1.0)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 2)
    stride = math.ceil((last - first) / 6)
    decades = range(first, last + 1, stride)
    floored = low <= FLOOR

    def name(value: float, _: int) -> str:
        power = f"10^{{{round(math.log10(value))}}}"
        return f"$\\leq {power}$" if floored and value <= FLOOR * 1.01 else f"${power}$"

    for axes in panels:
        axes.set_yscale("log")
        margin = 0.06 * (last - first)
        axes.set_ylim(10 ** (first - margin), 10 ** (last + margin))
        axes.set_yticks([10.0**decade for decade in decades])
        axes.yaxis.set(major_formatter=FuncFormatter(name), minor_formatter=NullFormatter())
        axes.yaxis.set_minor_locator(NullLocator())


def whole_ticks(axes: Axes) -> None:
    """Whole numbers on the horizontal axis, also where there is only one."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim()
    if high - low < 1:
        axes.set_xlim(low - 1, high + 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def named_ticks(axes: Axes, names: Iterable[str], room: float, size: float = 9) -> None:
    """The user's names on the vertical axis, one under the other from the top, in at most two lines each."""
    labels = [wrapped(name, room, size, 2) for name in names]
    axes.set_yticks(range(len(labels)), labels, fontsize=size, **look())
    axes.set_ylim(len(labels) - 0.4, -0.6)


def user_title(axes: Axes, text: str, room: float, size: float = 9) -> None:
    axes.set_title(wrapped(text, room, size, 3), fontsize=size, **look())


def gap(axes: Axes, text: str) -> None:
    """A panel that says in words why it is empty."""
    axes.axis("off")
    axes.text(0.5, 0.5, drawable(text), ha="center", va="center", fontsize=9, transform=axes.transAxes, **look())
