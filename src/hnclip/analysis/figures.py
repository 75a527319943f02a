"""The figures of a report, one function each, from plain entries of `metrics.jsonl` or from examples.

A figure belongs to whoever asked for it: nothing here touches the global state of matplotlib, which is imported only
when a figure is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[Mapping[str, Any]]]

FLOOR = 1e-10  # a log axis has no zero; values below this are drawn here
# Okabe–Ito, told apart by colour-blind readers. Dashes and markers say the same once more, for grey prints.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1)), (0, (1, 1)), "-.")
MARKERS = ("o", "s", "^", "D")
CORRECT, WRONG, NEUTRAL = "#009E73", "#D55E00", "#777777"

WIDTH = 9.0  # inches of every figure: 900 pixels at 100 dpi
_TEXT_WIDTH, _LINE_CHARACTERS, _LINE_HEIGHT = 3.6, 54, 0.15  # the caption column of `retrieval_figure`, 8 point


@dataclass(frozen=True)
class Example:
    """One caption, its picture, and by the model's name the picture it puts first and whether that is the right one."""

    caption: str
    right: Image.Image
    answers: Mapping[str, tuple[Image.Image, bool]]


def saturation_figure(runs: Runs) -> Figure:
    """How much each run still has to learn from its batches, over optimiser steps.

    InfoNCE is measured the same way in all runs, whatever they train with; the gradient norm is that of the run's own
    objective. Both are shown step by step (thin) and as a running median (thick), values below `FLOOR` at `FLOOR`.

    Args:
        runs: the step entries of each run by its name, with "step", "infonce", "grad_norm" and "saturated", the share
            of the step's loss evaluations with an InfoNCE below 0.001.
    """
    _check(runs)
    figure = _figure(8.2)
    loss, norm, share = figure.subplots(3, sharex=True)
    longest = max(len(entries) for entries in runs.values())
    window = max(3, longest // 20) | 1  # odd, so that it has a middle
    for (name, entries), (colour, dash, _) in zip(runs.items(), _styles()):
        steps = [entry["step"] for entry in entries]
        line = {"color": colour, "linestyle": dash, "linewidth": 2, "label": name}
        for axes, key in ((loss, "infonce"), (norm, "grad_norm")):
            values = np.maximum([entry[key] for entry in entries], FLOOR)
            axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.4)
            axes.plot(steps, running(values, window, np.median), **line)
        percent = 100 * np.array([entry["saturated"] for entry in entries])
        share.plot(steps, running(percent, window, np.mean), **line)
    loss.set(yscale="log", ylabel="InfoNCE on the run's\nbatches (nats)")
    norm.set(yscale="log", ylabel="gradient norm of the run's\nown objective, before clipping")
    share.set(xmargin=0.01, ylim=(-4, 104), ylabel="loss evaluations with\nInfoNCE < 0.001 (%)")
    share.set_xlabel(
        f"optimiser step\nthin: every step; thick: running median of {window} steps (lowest panel: running mean)"
    )
    _finish(figure)
    return figure


def convergence_figure(runs: Runs) -> Figure:
    """Validation R@1 after every epoch, text to image and image to text, on one scale.

    Args:
        runs: the evaluation entries of each run by its name, with "epoch" (0 is before training), "text_to_image" and
            "image_to_text", the last two with "R@1" in percent.
    """
    from matplotlib.ticker import MaxNLocator

    _check(runs)
    figure = _figure(4.0)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, direction in zip(panels, ("text_to_image", "image_to_text")):
        for (name, entries), (colour, dash, marker) in zip(runs.items(), _styles()):
            epochs = [entry["epoch"] for entry in entries]
            recalls = [entry[direction]["R@1"] for entry in entries]
            # A recall of 0 lies on the lower edge, where clipping would halve its marker.
            look = {"color": colour, "linestyle": dash, "linewidth": 2, "marker": marker, "clip_on": False}
            axes.plot(epochs, recalls, label=name, **look)
        axes.set(xlabel="epoch (0: before training)", ylabel=f"validation R@1, {direction.replace('_to_', '→')} (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_tick_params(labelleft=True)
    panels[0].set_ylim(bottom=0)
    _finish(figure)
    return figure


def retrieval_figure(examples: Sequence[Example]) -> Figure:
    """One row per example: the caption, its picture, and the picture each model puts first, marked as correct or wrong.

    Rows are as high as their caption needs. Without examples the figure says so in words.
    """
    if not examples:
        figure = _figure(1.0)
        text = "No examples: for every caption both models put the right picture first, or neither did."
        figure.text(0.5, 0.5, text, ha="center", va="center", fontsize=10)
        return figure
    captions = [textwrap.wrap(example.caption, _LINE_CHARACTERS, break_on_hyphens=False) for example in examples]
    columns = 1 + max(len(example.answers) for example in examples)
    side = (WIDTH - _TEXT_WIDTH) / columns
    heights = [max(side + 0.25, _LINE_HEIGHT * len(lines) + 0.3) for lines in captions]
    figure = _figure(sum(heights))
    figure.set_layout_engine("constrained", w_pad=0.05, h_pad=0.05)
    grid = figure.add_gridspec(
        len(examples), 1 + columns, width_ratios=[_TEXT_WIDTH, *[side] * columns], height_ratios=heights
    )
    for row, (example, lines) in enumerate(zip(examples, captions)):
        words = figure.add_subplot(grid[row, 0])
        words.axis("off")
        # A caption may hold dollar signs; they are no formula.
        words.text(0, 1, "\n".join(lines), va="top", fontsize=8, linespacing=1.3, parse_math=False)
        _picture(figure.add_subplot(grid[row, 1]), example.right, "the caption's picture", NEUTRAL)
        for column, (name, (picture, correct)) in enumerate(example.answers.items(), start=2):
            label, colour = (f"{name} ✓ correct", CORRECT) if correct else (f"{name} ✗ wrong", WRONG)
            _picture(figure.add_subplot(grid[row, column]), picture, label, colour)
    return figure


def running(values: Any, window: int, statistic: Callable[[Any], Any]) -> list[float]:
    """`statistic` of the `window` values around each value; at both ends, of those that exist."""
    half = window // 2
    return [float(statistic(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def _check(runs: Runs) -> None:
    if not runs:
        raise ValueError("runs is empty: there is nothing to draw")
    for name, entries in runs.items():
        if not entries:
            raise ValueError(f"run {name!r} has no entries: there is nothing to draw")


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _styles() -> Iterator[tuple[str, Any, str]]:
    """Colour, dashes and marker of the first run, the second, … without end."""
    return zip(cycle(COLOURS), cycle(DASHES), cycle(MARKERS))


def _finish(figure: Figure) -> None:
    """Quiet axes, and one legend above all panels, which show the same runs."""
    for axes in figure.axes:
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    lines, names = figure.axes[0].get_legend_handles_labels()
    figure.align_ylabels()
    figure.legend(lines, names, loc="outside upper center", ncols=len(names), frameon=False, handlelength=3)


def _picture(axes: Axes, picture: Image.Image, label: str, colour: str) -> None:
    axes.imshow(picture)
    axes.set(xticks=[], yticks=[], anchor="N")
    axes.spines[:].set(color=colour, linewidth=3)
    axes.set_xlabel(label, color=colour, fontsize=9, parse_math=False)
