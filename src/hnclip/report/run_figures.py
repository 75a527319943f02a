"""Figures of runs: losses, gradients and saturation over steps, R@1 over epochs, training pairs and settings.

Entries are those of a run's `metrics.jsonl`, values are plain numbers. Log axes have no zero: smaller values are drawn
at `FLOOR`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hnclip.report.figure_style import (
    COLOURS,
    DASHES,
    MARKERS,
    NEUTRAL,
    WIDTH,
    add_grid,
    add_legend,
    add_panel_legend,
    blank_figure,
    line_styles,
    set_title,
    whole_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Entries = Sequence[Mapping[str, Any]]
Runs = Mapping[str, Entries]
Points = Sequence[Sequence[float]]
"""(x, recall), or (x, recall, low, high) with the ends of its interval."""

FLOOR = 1e-10
_FEW = 40  # measurements up to which each is marked: a single one has no line
_LOSSES: dict[str, dict[str, Any]] = {
    "infonce": {"label": "InfoNCE", "color": COLOURS[0], "linestyle": DASHES[0]},
    "hn": {"label": "L_HN", "color": COLOURS[1], "linestyle": DASHES[2]},
}
_DIRECTIONS = {
    "average of both directions": ("text_to_image", "image_to_text"),
    "text→image": ("text_to_image",),
    "image→text": ("image_to_text",),
}


def gradient_figure(entries: Entries, epochs: Entries | None) -> Figure:
    """One probed run: (a) both losses and how often they are saturated, (b) both gradient norms, (c) retrieval error.

    Losses are shown for each measurement (thin) and as a running median (thick), norms as the median of an epoch
    between its quartiles.

    Args:
        entries: of kind "gradients": "epoch", "step", "infonce", "hn", "infonce_norm", "hn_norm", "infonce_saturated"
            and "hn_saturated", the shares of loss evaluations below 0.001, and "dtype".
        epochs: entries of kind "evaluation"; None, where there was no run, leaves (c) out.

    Reference:
        HN-CLIP, figure gradient.
    """
    figure = blank_figure(7.6)
    (loss, share), (norm, error) = figure.subplots(2, 2)
    window = _window(len(entries))
    number = _values(entries, "epoch")
    every = np.unique(number)
    handles, zeros = {}, []
    for key, style in _LOSSES.items():
        handles[style["label"]] = _trace(loss, entries, key, window, style)
        norms, saturated = _values(entries, f"{key}_norm"), 100 * _values(entries, f"{key}_saturated")
        zeros.append(f"{100 * np.mean(norms == 0):.1f} % ({style['label']})")
        low, middle, high = zip(*(np.quantile(_clamp(norms[number == epoch]), (0.25, 0.5, 0.75)) for epoch in every))
        line = {**style, "linewidth": 2, "marker": "o" if key == "infonce" else "s"}
        if key == "hn":  # hollow: where both lie in one place, both are seen
            line |= {"markersize": 9, "markerfacecolor": "none"}
        norm.fill_between(every, low, high, color=style["color"], alpha=0.2, linewidth=0)
        norm.plot(every, middle, **line)
        share.plot(every, [np.mean(saturated[number == epoch]) for epoch in every], **line)
    dtypes = " and ".join(sorted({str(entry["dtype"]) for entry in entries}))
    titles = ("(a) losses", "(a) saturation", f"(b) gradient norms, computed in {dtypes}", "(c) retrieval error")
    for axes, title in zip((loss, share, norm, error), titles):
        axes.set_title(title, fontsize=10)
    loss.set(yscale="log", ylabel="loss on the batch (nats)")
    loss.set_xlabel(f"step\nthin: measurements; thick: running median of {window}")
    share.set(ylim=(-4, 104), ylabel="loss evaluations < 0.001 (%)")
    share.set_xlabel(f"epoch\nmean over its measurements, {len(entries)} in all")
    norm.set(yscale="log", ylabel="norm over all parameters")
    norm.set_xlabel(f"epoch\nmedian and quartiles; exactly zero:\n{' and '.join(zeros)}")
    if epochs is None:
        error.remove()
    else:
        for (name, keys), colour, marker in zip([*_DIRECTIONS.items()][1:], COLOURS[2:], MARKERS[2:]):
            wrong = [100 - recall for recall in _recalls(epochs, keys)]
            error.plot(_values(epochs, "epoch"), wrong, label=name, color=colour, marker=marker, linewidth=2)
        error.set(xlabel="epoch (0: before training)", ylabel="100 − validation R@1 (%)")
        error.legend(fontsize=9)
    for axes in figure.axes:
        whole_ticks(axes)
        add_grid(axes)
    add_legend(figure, handles)
    return figure


def scale_grid_figure(runs: Mapping[tuple[str, str], Entries]) -> Figure:
    """Gradients of several runs over optimiser steps, a cell for each, on common scales.

    In a cell, from the top: (a) both losses, (b) both gradient norms and their ratio (dashed) where that of InfoNCE is
    not zero, each thin with its running median, (c) the cosine between the gradients.

    Args:
        runs: entries as of `gradient_figure`, with "cosine", None where a gradient is zero, by fraction ("5 %") and
            data set: rows and columns of the grid.

    Reference:
        HN-CLIP, figure s-grid.
    """
    rows, columns = ([*dict.fromkeys(key[side] for key in runs)] for side in (0, 1))
    figure = blank_figure(0.6 + 3.3 * len(rows))
    ratios = (3, 3, 2) * len(rows)
    panels = figure.subplots(3 * len(rows), len(columns), squeeze=False, height_ratios=ratios)  # [3 rows, columns]
    handles: dict[str, Any] = {}
    cells: list[Any] = []
    for (fraction, data), entries in runs.items():
        top, column = 3 * rows.index(fraction), columns.index(data)
        cell = panels[top : top + 3, column]
        set_title(cell[0], f"{fraction} of {data}", WIDTH / len(columns) - 0.6)
        if not entries:
            cell[1].text(0.5, 0.5, "not measured", ha="center", transform=cell[1].transAxes)
            continue
        for axes, first in zip(cell, cells[0] if cells else ()):
            axes.sharey(first)
        for axes in cell[:2]:
            axes.sharex(cell[2])
        cells.append(cell)
        handles |= _draw_cell(cell, entries)
        for axes, label in zip(cell, ("loss (nats)", "norm, ratio", "cosine")):
            axes.tick_params(labelsize=8, labelbottom=axes is cell[2])
            axes.set_ylabel(label if column == 0 else "", fontsize=9)
            add_grid(axes)
        cell[2].set_xlabel("optimiser step", fontsize=9)
    for axes in panels.flat:
        if not axes.lines:
            axes.axis("off")
    add_legend(figure, handles)
    return figure


def saturation_figure(runs: Runs) -> Figure:
    """How much each run still has to learn from its batches, over optimiser steps.

    InfoNCE is measured in the same way in all runs, whatever they train with; the gradient norm is that of the run's
    own objective. Both are shown for each step (thin) and as a running median (thick).

    Args:
        runs: step entries by run, with "step", "infonce", "grad_norm" and "saturated", the share of the step's loss
            evaluations with an InfoNCE below 0.001.
    """
    figure = blank_figure(8.2)
    loss, norm, share = figure.subplots(3, sharex=True)
    window = _window(max(map(len, runs.values())))
    handles = {}
    for (name, entries), style in zip(runs.items(), line_styles()):
        style = {**style, "marker": ""}
        _trace(loss, entries, "infonce", window, style)
        _trace(norm, entries, "grad_norm", window, style)
        percent = _running(100 * _values(entries, "saturated"), window, np.mean)
        (handles[name],) = share.plot(_values(entries, "step"), percent, **style)
    loss.set(yscale="log", ylabel="InfoNCE on the run's\nbatches (nats)")
    norm.set(yscale="log", ylabel="gradient norm of the run's\nown objective, before clipping")
    share.set(xmargin=0.01, ylim=(-4, 104), ylabel="loss evaluations with\nInfoNCE < 0.001 (%)")
    share.set_xlabel(f"optimiser step\nthin: each step; thick: running median of {window} (lowest panel: running mean)")
    for axes in figure.axes:
        add_grid(axes)
    figure.align_ylabels()
    add_legend(figure, handles)
    return figure


def convergence_grid_figure(domains: Mapping[str, Runs]) -> Figure:
    """Validation R@1 after each epoch, a column for each domain: the mean of both directions, then each of them.

    Args:
        domains: by the name of their data, evaluation entries by run, with "epoch" (0: before training),
            "text_to_image" and "image_to_text", which hold "R@1" in percent. A run has one name in all domains.

    Reference:
        HN-CLIP, figures convergence and s-conv.
    """
    figure = blank_figure(0.8 + 2.6 * len(_DIRECTIONS))
    panels = figure.subplots(len(_DIRECTIONS), len(domains), sharex="col", sharey="col", squeeze=False)
    styles = dict(zip(dict.fromkeys(name for runs in domains.values() for name in runs), line_styles()))
    handles: dict[str, Any] = {}
    for (data, runs), column in zip(domains.items(), panels.T):
        set_title(column[0], data, WIDTH / len(domains) - 0.6)
        for axes, directions in zip(column, _DIRECTIONS.values()):
            for name, entries in runs.items():
                # A recall of 0 lies on the lower edge, where clipping would halve its marker.
                line = (_values(entries, "epoch"), _recalls(entries, directions))
                (handles[name],) = axes.plot(*line, clip_on=False, **styles[name])
            whole_ticks(axes)
            add_grid(axes)
        column[-1].set_xlabel("epoch (0: before training)")
    for axes, direction in zip(panels[:, 0], _DIRECTIONS):
        axes.set_ylabel(f"validation R@1 (%),\n{direction}")
    add_legend(figure, {name: handles[name] for name in styles})
    return figure


def sample_efficiency_figure(series: Mapping[str, Points], reference: tuple[str, float] | None = None) -> Figure:
    """Average R@1 over the share of the training data that was used, on a logarithmic axis.

    Args:
        series: points by name; x is the percentage of training pairs.
        reference: name and average R@1 of what is compared with, a dotted line.

    Reference:
        HN-CLIP, figure sampeff-main.
    """
    from matplotlib.ticker import NullLocator

    figure = blank_figure(4.4)
    axes = figure.subplots()
    axes.set(xscale="log", xlabel="training pairs used (%)", ylabel="average R@1 (%)", ymargin=0.1)
    handles = _curves(axes, series)
    if reference is not None:
        name, recall = reference
        handles[f"{name}: {recall:.1f} %"] = axes.axhline(recall, color=NEUTRAL, linestyle=":", linewidth=2)
    axes.xaxis.set_minor_locator(NullLocator())
    ticks = sorted({point[0] for points in series.values() for point in points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    add_legend(figure, handles)
    return figure


def curve_figure(panels: Mapping[str, Mapping[str, Points]], axis: str) -> Figure:
    """Average R@1 over a setting such as γ: a panel with its own scale and legend for each data set.

    Args:
        panels: points by data set and series.
        axis: what x is.
    """
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    figure = blank_figure(3.6 * down)
    grid = figure.subplots(down, across, squeeze=False).ravel()
    for axes, (title, series) in zip(grid, panels.items()):
        handles = _curves(axes, series)
        axes.set(xlabel=axis, ylabel="average R@1 (%)")
        if any(series):
            add_panel_legend(axes, title, handles, WIDTH / across)
        else:  # one line without a name
            set_title(axes, title, WIDTH / across - 0.6)
    for axes in grid[len(panels) :]:
        axes.remove()
    return figure


def _draw_cell(cell: Iterable[Axes], entries: Entries) -> dict[str, Any]:
    """Panels (a) to (c) of one run; what a legend names."""
    loss, norm, cosine = cell
    steps, window = _values(entries, "step"), _window(len(entries))
    handles = {}
    for key, style in _LOSSES.items():
        handles[style["label"]] = _trace(loss, entries, key, window, style)
        _trace(norm, entries, f"{key}_norm", window, style)
    infonce, hn = (_values(entries, f"{key}_norm") for key in _LOSSES)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(infonce > 0, _clamp(hn / infonce), np.nan)
    look: dict[str, Any] = {"linewidth": 1, "marker": ".", "markersize": 3}
    name = "ratio of the norms, L_HN / InfoNCE"
    (handles[name],) = norm.plot(steps, ratio, color=NEUTRAL, linestyle="--", **look)
    cosine.axhline(0, color=NEUTRAL, linewidth=0.8)
    cosine.plot(steps, _values(entries, "cosine"), color=COLOURS[2], **look)
    loss.set_yscale("log")
    norm.set_yscale("log")
    cosine.set(ylim=(-1.1, 1.1), yticks=(-1, 0, 1))
    return handles


def _curves(axes: Axes, series: Mapping[str, Points]) -> dict[str, Any]:
    """Lines of points with their intervals; what a legend names."""
    handles = {}
    for (name, points), style in zip(series.items(), line_styles()):
        points = sorted(points, key=lambda point: point[0])
        (handles[name],) = axes.plot([point[0] for point in points], [point[1] for point in points], **style)
        for x, _, low, high in (point for point in points if len(point) == 4 and point[3] > point[2]):
            axes.plot([x, x], [low, high], color=style["color"], linewidth=1.2, marker="_", markersize=8)
    add_grid(axes)
    return handles


def _trace(axes: Axes, entries: Entries, key: str, window: int, style: Mapping[str, Any]) -> Any:
    """Thin, each value; thick, their running median, which is returned."""
    steps, values = _values(entries, "step"), _clamp(_values(entries, key))
    marker = "." if len(entries) <= _FEW else ""
    axes.plot(steps, values, color=style["color"], linewidth=0.7, alpha=0.4, marker=marker)
    (line,) = axes.plot(steps, _running(values, window, np.median), **{"linewidth": 2, **style})
    return line


def _values(entries: Iterable[Mapping[str, Any]], key: str) -> np.ndarray:
    """[n], NaN for None."""
    return np.array([entry[key] for entry in entries], dtype=float)


def _recalls(entries: Entries, keys: Sequence[str]) -> list[float]:
    return [float(np.mean([entry[key]["R@1"] for key in keys])) for entry in entries]


def _clamp(values: np.ndarray) -> np.ndarray:
    """Between `FLOOR` and its reciprocal; NaN stays a gap."""
    return np.clip(values, FLOOR, 1 / FLOOR)


def _window(count: int) -> int:
    """A twentieth of the longest run, and odd, so that it has a middle."""
    return max(3, count // 20) | 1


def _running(values: np.ndarray, window: int, statistic: Callable[[np.ndarray], Any]) -> list[float]:
    """`statistic` of the `window` values around each value; at both ends, of those that exist."""
    half = window // 2
    return [float(statistic(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]
