"""Caption geometry: how alike captions are to an encoder."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from hnclip.analysis.figures.style import (
    COLOURS,
    HATCHES,
    WIDTH,
    blank_figure,
    finish,
    named_ticks,
    panel_legend,
    quiet,
    styles,
    user_title,
)
from hnclip.analysis.figures.words import look, wrapped
from hnclip.analysis.histogram import Histogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Distributions = Mapping[str, tuple[Histogram, Histogram]]
"""By the name of a data set or model: cosines of all pairs of captions, and of each with its hardest companion."""

_UNIT = 0.01  # of cosine: the width that a share is given for
_TAIL = 0.001  # the share on either side that must not decide over the axis
_IN_CELLS = 10  # up to so many captions a heat map has room for its numbers
_IN_BAR = 0.08  # the smallest share whose number fits into its part of a bar
_NAME_ROOM = 2.0  # inches for a name beside its bar


def motivation_figure(sets: Distributions) -> Figure:
    """How similar captions are: (a) all pairs, (b) every caption and its hardest companion, means dotted.

    The horizontal axis holds what the data holds, apart from a tail of at most 0.1 % on either side, and says how much
    lies beyond it.

    Reference:
        HN-CLIP, figure motivation.
    """
    _check(sets)
    figure = blank_figure(4.0 + 0.2 * len(sets))
    panels = figure.subplots(1, 2)
    titles = ("(a) all pairs of captions", "(b) each caption and its hardest companion")
    for number, (axes, title, what) in enumerate(zip(panels, titles, ("pairs", "captions"))):
        histograms = {name: both[number] for name, both in sets.items()}
        low, high = _range(histograms.values())
        handles = {}
        for (name, histogram), (colour, dash, _) in zip(histograms.items(), styles()):
            edges, density = _density(histogram, high - low)
            axes.stairs(density, edges, fill=True, color=colour, alpha=0.15)
            handles[f"{name}, mean {histogram.mean:.3f}"] = axes.stairs(
                density, edges, color=colour, linestyle=dash, linewidth=1.8
            )
            axes.axvline(histogram.mean, color=colour, linestyle=":", linewidth=1.5)
        beyond = max(_beyond(histogram, low, high) for histogram in histograms.values())
        note = f"\nup to {100 * beyond:.2g} % of a set lie beyond the axis" if beyond else ""
        axes.set(xlim=(low, high), xlabel=f"cosine{note}", ylabel=f"share of {what} per {_UNIT} of cosine (%)")
        axes.set_ylim(bottom=0)
        quiet(axes)
        panel_legend(axes, title, handles, WIDTH / 2 - 0.8)
    return figure


def statistics_figure(sets: Distributions) -> Figure:
    """Mean cosine (A) of all pairs of captions and (B) of every caption and its hardest companion, one bar per set.

    Reference:
        HN-CLIP, figure s-stats, A and B. C is `bucket_figure`.
    """
    _check(sets)
    figure = blank_figure(1.2 + 0.45 * len(sets))
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("(A) all pairs of captions", "(B) hardest companion")
    every = [histogram.mean for both in sets.values() for histogram in both]
    low, high = min(every), max(0.1, *every)
    air = 0.25 * (high - min(0.0, low))  # for the numbers at the ends of the bars
    for number, (axes, title) in enumerate(zip(panels, titles)):
        means = [both[number].mean for both in sets.values()]
        bars = axes.barh(range(len(means)), means, height=0.6, color=COLOURS[number])
        axes.bar_label(bars, [f"{mean:.3f}" for mean in means], padding=3, fontsize=9)
        axes.set(xlim=(low - air if low < 0 else 0, high + air), xlabel="mean cosine")
        axes.set_title(title, fontsize=10)
        quiet(axes)
    named_ticks(panels[0], sets, _NAME_ROOM)
    return figure


def bucket_figure(sets: Mapping[str, Sequence[float]], labels: Sequence[str]) -> Figure:
    """What in-batch negatives consist of, by how similar their captions are: one bar of shares per set.

    Args:
        sets: shares of the buckets by the name of a data set or model, each of a sum of 1.
        labels: names of the buckets, from easy to hard: "below 0.8", "0.8 to 0.9", "0.9 and above".

    Reference:
        HN-CLIP, figure s-stats, C.
    """
    from matplotlib import colormaps

    if not sets or not labels:
        raise ValueError("sets or labels are empty: there is nothing to draw")
    for name, shares in sets.items():
        if len(shares) != len(labels):
            raise ValueError(f"{name!r} has {len(shares)} shares for {len(labels)} labels")
        if min(shares) < 0 or not abs(sum(shares) - 1) < 1e-3:
            raise ValueError(f"the shares of {name!r} must not be negative and must sum to 1, got {list(shares)}")
    narrowest = max(sum(share < _IN_BAR for share in shares) for shares in sets.values())
    figure = blank_figure(1.4 + max(0.5, 0.15 * narrowest + 0.1) * len(sets))
    axes = figure.subplots()
    # The order of the buckets is that of the colours, from light to dark, also to colour-blind readers.
    colours = colormaps["cividis_r"](np.linspace(0.1, 0.95, len(labels)))
    handles = {}
    narrow: list[list[str]] = [[] for _ in sets]
    left = np.zeros(len(sets))
    for number, (label, colour, hatch) in enumerate(zip(labels, colours, cycle(HATCHES))):
        column = np.array([shares[number] for shares in sets.values()], dtype=float)  # [N]
        options: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        handles[label] = axes.barh(range(len(sets)), 100 * column, left=100 * left, height=0.6, **options)
        for row, share in enumerate(column):
            if share < _IN_BAR:
                narrow[row].append(f"{100 * share:.1f} % {label}")
                continue
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85}
            place = (100 * (left[row] + share / 2), row)
            axes.text(*place, f"{100 * share:.1f} %", ha="center", va="center", fontsize=9, bbox=box)
        left += column
    for row, notes in enumerate(narrow):
        note = "\n".join(wrapped(note, 1.8, 8, 1) for note in notes)
        axes.text(101, row, note, va="center", fontsize=8, **look())
    named_ticks(axes, sets, _NAME_ROOM)
    axes.set(xlim=(0, 100), xlabel="share of in-batch negatives (%)")
    finish(figure, handles)
    return figure


def batch_figure(matrices: Mapping[str, np.ndarray]) -> Figure:
    """Cosines between the captions of one batch, a heat map for each, the diagonal left out, the highest marked.

    Dark is hard, on one scale for all maps. Up to 10 captions the numbers stand in the cells.

    Shape:
        matrices: [B, B] each, B at least 2. Entries that are not finite are grey, like the diagonal, and count for
            nothing.

    Reference:
        HN-CLIP, figure s-batchg: the matrix Ḡ.
    """
    from matplotlib import colormaps

    if not matrices:
        raise ValueError("matrices is empty: there is nothing to draw")
    masked = {name: _off_diagonal(name, matrix) for name, matrix in matrices.items()}
    low = min(matrix.min() for matrix in masked.values())
    high = max(matrix.max() for matrix in masked.values())
    columns = 1 if len(masked) == 1 else 2
    rows = math.ceil(len(masked) / columns)
    figure = blank_figure(0.3 + rows * (6.4 if columns == 1 else 4.2))
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    palette = colormaps["cividis_r"].with_extremes(bad="#D0D0D0")
    for axes, (name, matrix) in zip(panels, masked.items()):
        image = axes.imshow(matrix, cmap=palette, vmin=low, vmax=high, interpolation="nearest")
        _label_map(axes, name, matrix, WIDTH / columns - 1.2)
        _mark_highest(axes, matrix)
        if len(matrix) <= _IN_CELLS:
            _number_cells(axes, matrix, image)
    for axes in panels[len(masked) :]:
        axes.axis("off")
    figure.colorbar(image, ax=figure.axes, label="cosine of two captions (dark: hard)", shrink=0.8)
    return figure


def _check(sets: Distributions) -> None:
    if not sets:
        raise ValueError("sets is empty: there is nothing to draw")
    for name, both in sets.items():
        if any(not histogram.total or not math.isfinite(histogram.mean) for histogram in both):
            raise ValueError(f"a histogram of {name!r} is empty or has no finite mean: there is nothing to draw")


def _range(histograms: Collection[Histogram]) -> tuple[float, float]:
    """Limits of an axis: what all sets hold apart from their tails, and some air."""
    low = min(histogram.quantile(_TAIL) for histogram in histograms)
    high = max(histogram.quantile(1 - _TAIL) for histogram in histograms)
    air = max(0.06 * (high - low), 0.02)
    least, most = min(histogram.low for histogram in histograms), max(histogram.high for histogram in histograms)
    edge = 0.2 * air  # where nothing can lie, a line on the bound still shows
    return max(low - air, least - edge), min(high + air, most + edge)


def _beyond(histogram: Histogram, low: float, high: float) -> float:
    middles = (histogram.edges[1:] + histogram.edges[:-1]) / 2  # [K]
    return float(histogram.counts[(middles < low) | (middles > high)].sum() / histogram.total)


def _density(histogram: Histogram, span: float) -> tuple[np.ndarray, np.ndarray]:
    """Edges of bins, as many over `span` as the values can fill, and the percentage of values per `_UNIT` in each."""
    wanted = span / min(80, max(20, 2 * histogram.total ** (1 / 3)))
    fine = len(histogram.counts)
    whole = histogram.high - histogram.low
    divisors = (bins for bins in range(1, fine + 1) if fine % bins == 0)
    merged = histogram.merged(min(divisors, key=lambda bins: abs(math.log(whole / bins / wanted))))
    edges = merged.edges  # [K + 1]
    return edges, 100 * merged.counts / merged.total * _UNIT / (edges[1] - edges[0])


def _off_diagonal(name: str, matrix: np.ndarray) -> np.ma.MaskedArray:
    """[B, B], the diagonal and what is not finite masked."""
    matrix = np.asarray(matrix, dtype=float)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
        raise ValueError(f"{name!r} must be a square matrix of at least 2 captions, got the shape {matrix.shape}")
    masked = np.ma.masked_where(np.eye(len(matrix), dtype=bool) | ~np.isfinite(matrix), matrix)
    if masked.mask.all():
        raise ValueError(f"{name!r} holds no finite similarity of two captions: does the encoder return NaN?")
    return masked


def _highest(matrix: np.ma.MaskedArray) -> tuple[int, int]:
    """Row and column of the highest entry."""
    row, column = np.unravel_index(matrix.argmax(), matrix.shape)
    return int(row), int(column)


def _label_map(axes: Axes, name: str, matrix: np.ma.MaskedArray, room: float) -> None:
    from matplotlib.ticker import MaxNLocator

    user_title(axes, name, room, size=10)
    first, second = _highest(matrix)
    numbers = f"mean {matrix.mean():.3f}, highest {matrix.max():.3f} at {first}, {second}"
    axes.set_title(f"{axes.get_title()}\n{wrapped(numbers, room, 10, 2)}", fontsize=10, **look())
    axes.set(xlabel="caption of the batch, by number", ylabel="caption of the batch, by number")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def _mark_highest(axes: Axes, matrix: np.ma.MaskedArray) -> None:
    """A frame around the highest entry, and where cells are too small to hold it, its number with an arrow."""
    from matplotlib.patches import Rectangle

    row, column = _highest(matrix)
    size = len(matrix)
    frame = max(1.0, size / 32)  # a single cell of many could not be seen
    corner = (column - frame / 2, row - frame / 2)
    axes.add_patch(Rectangle(corner, frame, frame, fill=False, edgecolor=COLOURS[1], linewidth=2.5))
    if size > _IN_CELLS:
        # Towards the centre, so that the number stays within the map.
        x, y = (middle + (0.2 * size if middle < size / 2 else -0.2 * size) for middle in (column, row))
        box = {"facecolor": "white", "edgecolor": COLOURS[1], "pad": 2}
        arrow = {"arrowstyle": "-", "color": COLOURS[1], "linewidth": 1.5}
        text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9}
        axes.annotate(f"{matrix.max():.3f}", (column, row), (x, y), bbox=box, arrowprops=arrow, **text)


def _number_cells(axes: Axes, matrix: np.ma.MaskedArray, image: Any) -> None:
    for row, column in zip(*np.nonzero(~matrix.mask)):
        red, green, blue, _ = image.cmap(image.norm(matrix[row, column]))
        bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
        colour = "black" if bright else "white"
        axes.text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center", fontsize=8, color=colour)
