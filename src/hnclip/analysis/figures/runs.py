"""What runs did: saturation over steps, R@1 over epochs and over the size of the training data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hnclip.analysis.figures.style import (
    NEUTRAL,
    WIDTH,
    blank_figure,
    clamped,
    finish,
    numbers,
    running,
    running_window,
    styles,
    user_title,
    whole_ticks,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[Mapping[str, Any]]]

_CLOSEST = 1.12  # neighbouring ticks of a log axis at least this factor apart do not touch
_DIRECTIONS = {"text→image": ("text_to_image",), "image→text": ("image_to_text",)}
_AVERAGE = {"average of both directions": ("text_to_image", "image_to_text")}


def saturation_figure(runs: Runs) -> Figure:
    """How much each run still has to learn from its batches, over optimiser steps.

    InfoNCE is measured the same way in all runs, whatever they train with; the gradient norm is that of the run's own
    objective. Both are shown step by step (thin) and as a running median (thick), values below `FLOOR` at `FLOOR`.

    Args:
        runs: the step entries of each run by its name, with "step", "infonce", "grad_norm" and "saturated", the share
            of the step's loss evaluations with an InfoNCE below 0.001.
    """
    _check(runs)
    figure = blank_figure(8.2)
    loss, norm, share = figure.subplots(3, sharex=True)
    window = running_window(max(len(entries) for entries in runs.values()))
    handles = {}
    for (name, entries), (colour, dash, _) in zip(runs.items(), styles()):
        steps = [entry["step"] for entry in entries]
        line = {"color": colour, "linestyle": dash, "linewidth": 2}
        for axes, key in ((loss, "infonce"), (norm, "grad_norm")):
            values = clamped(numbers(entries, key))
            axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.4)
            axes.plot(steps, running(values, window, np.median), **line)
        percent = 100 * numbers(entries, "saturated")
        (handles[name],) = share.plot(steps, running(percent, window, np.mean), **line)
    loss.set(yscale="log", ylabel="InfoNCE on the run's\nbatches (nats)")
    norm.set(yscale="log", ylabel="gradient norm of the run's\nown objective, before clipping")
    share.set(xmargin=0.01, ylim=(-4, 104), ylabel="loss evaluations with\nInfoNCE < 0.001 (%)")
    share.set_xlabel(
        f"optimiser step\nthin: every step; thick: running median of {window} steps (lowest panel: running mean)"
    )
    finish(figure, handles)
    return figure


def convergence_figure(runs: Runs, *, average: bool = False) -> Figure:
    """Validation R@1 after every epoch, text to image and image to text, on one scale.

    Args:
        runs: the evaluation entries of each run by its name, with "epoch" (0 is before training), "text_to_image" and
            "image_to_text", the last two with "R@1" in percent.
        average: one panel with the mean of both directions instead.

    Reference:
        HN-CLIP, figure s-conv; with `average`, figure convergence.
    """
    _check(runs)
    figure = blank_figure(4.0)
    shown = _AVERAGE if average else _DIRECTIONS
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    handles = {}
    for axes, (direction, keys) in zip(panels, shown.items()):
        for (name, entries), (colour, dash, marker) in zip(runs.items(), styles()):
            epochs = [entry["epoch"] for entry in entries]
            recalls = [float(np.mean([entry[key]["R@1"] for key in keys])) for entry in entries]
            # A recall of 0 lies on the lower edge, where clipping would halve its marker.
            look = {"color": colour, "linestyle": dash, "linewidth": 2, "marker": marker, "clip_on": False}
            (handles[name],) = axes.plot(epochs, recalls, **look)
        axes.set(xlabel="epoch (0: before training)", ylabel=f"validation R@1, {direction} (%)")
        whole_ticks(axes)
        axes.yaxis.set_tick_params(labelleft=True)
    panels[0].set_ylim(bottom=0)
    finish(figure, handles)
    return figure


def convergence_grid_figure(domains: Mapping[str, Runs]) -> Figure:
    """Validation R@1 after every epoch: one column per domain; from the top the mean of both directions, text to image
    and image to text, on one scale in a column, which need not begin at 0.

    Args:
        domains: runs as `convergence_figure` takes them, by the name of their data. The same run has the same name in
            all of them.

    Reference:
        HN-CLIP, figures convergence and s-conv.
    """
    if not domains:
        raise ValueError("domains is empty: there is nothing to draw")
    for runs in domains.values():
        _check(runs)
    shown = {**_AVERAGE, **_DIRECTIONS}
    figure = blank_figure(0.8 + 2.6 * len(shown))
    panels = figure.subplots(len(shown), len(domains), sharex="col", sharey="col", squeeze=False)
    looks = dict(zip(dict.fromkeys(name for runs in domains.values() for name in runs), styles()))
    handles: dict[str, Any] = {}
    for (title, runs), column in zip(domains.items(), panels.T):
        user_title(column[0], title, WIDTH / len(domains) - 0.6, size=10)
        for axes, (direction, keys) in zip(column, shown.items()):
            for name, entries in runs.items():
                colour, dash, marker = looks[name]
                recalls = [float(np.mean([entry[key]["R@1"] for key in keys])) for entry in entries]
                look = {"color": colour, "linestyle": dash, "linewidth": 1.8, "marker": marker, "markersize": 5}
                (handles[name],) = axes.plot([entry["epoch"] for entry in entries], recalls, **look)
            if axes in panels[:, 0]:
                axes.set_ylabel(f"validation R@1 (%),\n{direction}")
        column[-1].set_xlabel("epoch (0: before training)")
        whole_ticks(column[-1])
    finish(figure, {name: handles[name] for name in looks})
    return figure


def sample_efficiency_figure(
    series: Mapping[str, Sequence[Sequence[float]]], reference: tuple[str, float] | None = None
) -> Figure:
    """Average R@1 over how much of the training data was used, the latter on a logarithmic axis.

    Args:
        series: points by name, each (percent of the training pairs, average R@1 in percent), or the same with the
            lower and the upper end of the recall's interval behind.
        reference: name and average R@1 of what is compared with, a dotted line.

    Reference:
        HN-CLIP, figure sampeff-main.
    """
    from matplotlib.ticker import NullFormatter, NullLocator

    _check(series)
    for name, points in series.items():
        _check_points(name, points)
    figure = blank_figure(4.4)
    axes = figure.subplots()
    handles: dict[str, Any] = {}
    for (name, points), (colour, dash, marker) in zip(series.items(), styles()):
        points = sorted(points, key=lambda point: point[0])
        fractions, recalls = [point[0] for point in points], [point[1] for point in points]
        look = {"color": colour, "linestyle": dash, "linewidth": 2, "marker": marker}
        (handles[name],) = axes.plot(fractions, recalls, **look)
        for fraction, _, low, high in (point for point in points if len(point) == 4):
            axes.plot([fraction, fraction], [low, high], color=colour, linewidth=1.2, marker="_", markersize=8)
    if reference is not None:
        name, recall = reference
        handles[f"{name}: {recall:.1f} %"] = axes.axhline(recall, color=NEUTRAL, linestyle=":", linewidth=2)
    ticks = sorted({point[0] for points in series.values() for point in points})
    axes.set(xscale="log", xlabel="training pairs used (%)", ylabel="average R@1 (%)", ymargin=0.1)
    axes.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.25)
    axes.xaxis.set(minor_locator=NullLocator(), minor_formatter=NullFormatter())
    axes.set_xticks(ticks, _tick_names(ticks))
    finish(figure, handles)
    return figure


def _check(runs: Mapping[str, Sequence[Any]]) -> None:
    if not runs:
        raise ValueError("runs is empty: there is nothing to draw")
    for name, entries in runs.items():
        if not entries:
            raise ValueError(f"run {name!r} has no entries: there is nothing to draw")


def _check_points(name: str, points: Sequence[Sequence[float]]) -> None:
    for point in points:
        if len(point) not in (2, 4):
            raise ValueError(f"a point of {name!r} must be (fraction, recall) or (fraction, recall, low, high)")
        if not 0 < point[0] <= 100 or not all(math.isfinite(number) for number in point):
            raise ValueError(
                f"a point of {name!r} must hold finite numbers, the first a percentage above 0 and at most 100, "
                f"got {tuple(point)}"
            )


def _tick_names(ticks: Sequence[float]) -> list[str]:
    """Names of ticks of a log axis, empty where one would touch the one to the right; the last always has its own."""
    names, right = [], math.inf
    for tick in reversed(ticks):
        fits = tick * max(_CLOSEST, (ticks[-1] / ticks[0]) ** 0.06) <= right
        names.append(f"{tick:g}" if fits else "")
        right = tick if fits else right
    return names[::-1]
