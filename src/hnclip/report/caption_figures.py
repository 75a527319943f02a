"""Figures of captions: how similar they are to an encoder, near-duplicates, and what models retrieve for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL.Image import Image

from hnclip.data.images import to_rgb
from hnclip.report.document import CaptionedImage, CaptionRow
from hnclip.report.figure_style import (
    COLOURS,
    CORRECT,
    HATCHES,
    NEUTRAL,
    WIDTH,
    WRONG,
    add_grid,
    add_legend,
    add_panel_legend,
    blank_figure,
    line_styles,
    user_text,
    wrap,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BARS = 80  # of a histogram, over the range that is shown
_TAIL = 0.001  # the share at either end of a distribution that is not shown
_IN_BAR = 0.06  # the smallest share whose number fits into its part of a bar
_CAPTION_WIDTH = 3.5  # inches of the captions of `retrieval_figure`
_LINE_HEIGHT = 0.15  # inches of a caption's line
_IMAGE_PIXELS = 600  # of an image's longer side


class Distribution(NamedTuple):
    """How many values lie between neighbouring edges.

    Shape:
        counts [B], edges [B + 1].
    """

    counts: np.ndarray
    edges: np.ndarray

    @property
    def mean(self) -> float:
        """To the width of a bin."""
        return float(np.average((self.edges[1:] + self.edges[:-1]) / 2, weights=self.counts))

    def range(self, tail: float) -> tuple[float, float]:
        """The ends, without this share of the values on either side."""
        cumulated = np.cumsum(self.counts) / self.counts.sum()  # [B]
        first, last = np.searchsorted(cumulated, (tail + 1e-9, 1 - tail - 1e-9))
        return float(self.edges[first]), float(self.edges[last + 1])

    def merged(self, width: float) -> Distribution:
        """The same in bins of about this width."""
        merge = max(1, round(width * len(self.counts) / (self.edges[-1] - self.edges[0])))
        starts = np.arange(0, len(self.counts), merge)
        return Distribution(np.add.reduceat(self.counts, starts), self.edges[[*starts, -1]])


Distributions = Mapping[str, tuple[Distribution, Distribution]]
"""By the name of a data set or model: cosines of all pairs of captions, and of each with its hardest negative."""


class Example(NamedTuple):
    """A caption, its image, and by model the image that it ranks first with whether that is the caption's own."""

    caption: str
    right: Image
    answers: Mapping[str, tuple[Image, bool]]


def motivation_figure(sets: Distributions) -> Figure:
    """How similar captions are: (a) all pairs, (b) each caption and its hardest negative, means dotted.

    Up to 0.1 % of the values at either end lie outside the panels.

    Reference:
        HN-CLIP, figure motivation.
    """
    figure = blank_figure(3.6 + 0.2 * len(sets))
    titles = ("(a) all pairs of captions", "(b) each caption and its hardest negative")
    for number, (axes, title) in enumerate(zip(figure.subplots(1, 2), titles)):
        found = {name: both[number] for name, both in sets.items()}
        lows, highs = zip(*(one.range(_TAIL) for one in found.values()))
        low, high = min(lows) - 0.01, max(highs) + 0.01
        handles = {}
        for (name, one), style in zip(found.items(), line_styles()):
            merged = one.merged((high - low) / _BARS)
            shares = merged.counts / (100 * merged.counts.sum() * np.diff(merged.edges))  # of 1 for 0.01 of cosine
            colour = style["color"]
            axes.stairs(100 * shares, merged.edges, fill=True, color=colour, alpha=0.15)
            handles[f"{name}, mean {one.mean:.3f}"] = axes.stairs(
                100 * shares, merged.edges, color=colour, linestyle=style["linestyle"], linewidth=1.8
            )
            axes.axvline(one.mean, color=colour, linestyle=":", linewidth=1.5)
        axes.set(xlim=(low, high), xlabel="cosine", ylabel="share for each 0.01 of cosine (%)")
        axes.set_ylim(bottom=0)
        add_grid(axes)
        add_panel_legend(axes, title, handles, WIDTH / 2)
    return figure


def statistics_figure(sets: Distributions) -> Figure:
    """Mean cosine (A) of all pairs of captions and (B) of each caption and its hardest negative, a bar for each set.

    Reference:
        HN-CLIP, figure s-stats, A and B. C is `bucket_figure`.
    """
    figure = blank_figure(1.2 + 0.45 * len(sets))
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("(A) all pairs of captions", "(B) hardest negatives")
    for number, (axes, title) in enumerate(zip(panels, titles)):
        means = [both[number].mean for both in sets.values()]
        bars = axes.barh(range(len(means)), means, height=0.6, color=COLOURS[number])
        axes.bar_label(bars, [f"{mean:.3f}" for mean in means], padding=3, fontsize=9)
        axes.set(xlabel="mean cosine", xlim=(min(0.0, 1.3 * min(means)), max(0.1, 1.25 * max(means))))
        axes.set_title(title, fontsize=10)
        add_grid(axes)
    _name_bars(panels[0], sets)
    return figure


def bucket_figure(sets: Mapping[str, Sequence[float]], labels: Sequence[str]) -> Figure:
    """In-batch negatives by how similar their captions are: a bar of shares for each set.

    Args:
        sets: shares of the buckets, which sum to 1, by the name of a data set or model.
        labels: of the buckets, from easy to hard: "below 0.8", "0.8 to 0.9", "0.9 and above".

    Reference:
        HN-CLIP, figure s-stats, C.
    """
    from matplotlib import colormaps

    figure = blank_figure(1.4 + 0.5 * len(sets))
    axes = figure.subplots()
    colours = colormaps["cividis_r"](np.linspace(0.1, 0.95, len(labels)))  # from light to dark, as from easy to hard
    shares = 100 * np.array(list(sets.values()), dtype=float)  # [N, B]
    starts = np.cumsum(shares, axis=1) - shares
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85}
    handles = {}
    for number, (label, colour, hatch) in enumerate(zip(labels, colours, cycle(HATCHES))):
        bars = axes.barh(
            range(len(sets)),
            shares[:, number],
            left=starts[:, number],
            height=0.6,
            color=colour,
            hatch=hatch,
            ec="white",
        )
        numbers = [f"{share:.1f} %" if share >= 100 * _IN_BAR else "" for share in shares[:, number]]
        for text in axes.bar_label(bars, numbers, label_type="center", fontsize=9):
            text.set_bbox(box if text.get_text() else None)
        handles[label] = bars
    _name_bars(axes, sets)
    axes.set(xlim=(0, 100), xlabel="share of in-batch negatives (%)")
    add_grid(axes)
    add_legend(figure, handles)
    return figure


def batch_figure(matrices: Mapping[str, np.ndarray]) -> Figure:
    """Cosines between the captions of a batch, dark where they are high: a heat map for each set, on one scale.

    The diagonal is left out, and the highest cosine is framed.

    Shape:
        matrices: [B, B] each, with B at least 2.

    Reference:
        HN-CLIP, figure s-batchg: the matrix Ḡ.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    masked = {name: np.ma.masked_where(np.eye(len(one), dtype=bool), one) for name, one in matrices.items()}
    low, high = min(one.min() for one in masked.values()), max(one.max() for one in masked.values())
    columns = min(2, len(masked))
    rows = math.ceil(len(masked) / columns)
    figure = blank_figure(0.3 + rows * (6.4 if columns == 1 else 4.2))
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    palette = colormaps["cividis_r"].with_extremes(bad="#D0D0D0")
    for axes, (name, matrix) in zip(panels, masked.items()):
        image = axes.imshow(matrix, cmap=palette, vmin=low, vmax=high, interpolation="nearest")
        row, column = divmod(int(matrix.argmax()), len(matrix))
        frame = max(1.0, len(matrix) / 32)  # a single cell of many could not be seen
        corner = (column - frame / 2, row - frame / 2)
        axes.add_patch(Rectangle(corner, frame, frame, fill=False, edgecolor=COLOURS[1], linewidth=2.5))
        numbers = f"mean {matrix.mean():.3f}, highest {matrix.max():.3f} at {row}, {column}"
        axes.set_title(f"{wrap(name, WIDTH / columns - 1.2, 2)}\n{numbers}", **user_text(10))
        axes.set(xlabel="caption of the batch", ylabel="caption of the batch")
        axes.locator_params(integer=True)
    for axes in panels[len(masked) :]:
        axes.axis("off")
    figure.colorbar(image, ax=figure.axes, label="cosine of two captions", shrink=0.8)
    return figure


def near_duplicate_figure(rows: Sequence[CaptionRow]) -> Figure:
    """A row for each caption: its image and those of its nearest negatives, each over its label and its caption.

    Reference:
        HN-CLIP, figures s-nd-docci, s-nd-dci, s-nd-ldci and s-nd-urban.
    """
    columns = max(len(row.items) for row in rows)
    width = WIDTH / columns - 0.2
    texts = [[_label_and_caption(item, width) for item in row.items] for row in rows]
    lines = [max(text.count("\n") + 1.5 for text in row) for row in texts]
    heights = [height for count in lines for height in (0.75 * width, count * _LINE_HEIGHT)]
    figure = blank_figure(sum(heights))
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for number, (row, line) in enumerate(zip(rows, texts)):
        for column, (item, text) in enumerate(zip(row.items, line)):
            colour = COLOURS[0] if column else NEUTRAL
            _show_image(figure.add_subplot(grid[2 * number, column]), item.image, colour)
            _write(figure.add_subplot(grid[2 * number + 1, column]), text)
    return figure


def retrieval_figure(examples: Sequence[Example]) -> Figure:
    """A row for each example: the caption, its image, and the image that each model ranks first, correct or wrong.

    Reference:
        HN-CLIP, figure s-qual.
    """
    columns = 1 + len(examples[0].answers)
    width = (WIDTH - _CAPTION_WIDTH) / columns
    captions = [wrap(example.caption, _CAPTION_WIDTH * 1.3, 40) for example in examples]
    heights = [max(width + 0.2, _LINE_HEIGHT * (caption.count("\n") + 2)) for caption in captions]
    figure = blank_figure(sum(heights))
    ratios = [_CAPTION_WIDTH, *[width] * columns]
    grid = figure.add_gridspec(len(examples), 1 + columns, width_ratios=ratios, height_ratios=heights)
    for row, (example, caption) in enumerate(zip(examples, captions)):
        _write(figure.add_subplot(grid[row, 0]), caption)
        _show_image(figure.add_subplot(grid[row, 1]), example.right, NEUTRAL, "the caption's image")
        for column, (name, (image, correct)) in enumerate(example.answers.items(), start=2):
            label, colour = (f"{name} ✓ correct", CORRECT) if correct else (f"{name} ✗ wrong", WRONG)
            _show_image(figure.add_subplot(grid[row, column]), image, colour, wrap(label, width, 2))
    return figure


def _name_bars(axes: Axes, names: Mapping[str, Any]) -> None:
    axes.set_yticks(range(len(names)), [wrap(name, 2.0, 2) for name in names], **user_text())
    axes.set_ylim(len(names) - 0.4, -0.6)  # from the top


def _label_and_caption(item: CaptionedImage, width: float) -> str:
    return f"{wrap(item.label, width, 1)}\n{wrap(item.caption, width * 1.3, 16)}"


def _write(axes: Axes, text: str) -> None:
    axes.axis("off")
    words = axes.text(0, 1, text, va="top", linespacing=1.3, transform=axes.transAxes, **user_text(8))
    words.set_in_layout(False)  # its place is as large as it needs; measuring it would shrink the images


def _show_image(axes: Axes, image: Image | None, colour: str, label: str = "") -> None:
    axes.set(xticks=[], yticks=[], anchor="N" if label else "NW")
    axes.spines[:].set(color=colour, linewidth=3)
    axes.set_xlabel(label, color=colour, **user_text())
    if image is None:
        axes.set_facecolor("#E5E5E5")
        axes.text(0.5, 0.5, "no image", ha="center", va="center", fontsize=9, transform=axes.transAxes)
    else:
        image = to_rgb(image)
        image.thumbnail((_IMAGE_PIXELS, _IMAGE_PIXELS))
        axes.imshow(np.asarray(image))
