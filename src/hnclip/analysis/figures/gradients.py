"""Gradient dynamics of probed runs: both losses, both gradient norms, and the angle between the gradients.

All figures here are drawn from a run's entries of kind "gradients", each one measurement: "epoch" (from 1), "step",
"infonce" and "hn" (the losses on the batch), "infonce_norm" and "hn_norm" (norms of their gradients), "cosine" (between
the two; None where one of them is exactly zero), "infonce_saturated" and "hn_saturated" (shares of the measurement's
loss evaluations below 0.001) and "dtype" (of the computation, on which exact zeros depend).

Reference:
    HN-CLIP, section 2.4 and appendix C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hnclip.analysis.figures.style import (
    COLOURS,
    DASHES,
    MARKERS,
    NEUTRAL,
    WIDTH,
    add_legend,
    blank_figure,
    clamped,
    finish,
    gap,
    log_axis,
    numbers,
    quiet,
    running,
    running_window,
    user_title,
    whole_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Entries = Sequence[Mapping[str, Any]]

_NAMES = {"infonce": "InfoNCE", "hn": "L_HN"}
_LINES: dict[str, dict[str, Any]] = {
    "infonce": {"color": COLOURS[0], "linestyle": DASHES[0]},
    "hn": {"color": COLOURS[1], "linestyle": DASHES[2]},
}
# Hollow over filled: where both lie in one place, both are seen.
_POINTS: dict[str, dict[str, Any]] = {
    "infonce": {"marker": MARKERS[0], "markersize": 5},
    "hn": {"marker": MARKERS[1], "markersize": 9, "markerfacecolor": "none"},
}
_RATIO = "ratio of the norms, L_HN / InfoNCE"
_FEW = 40  # up to so many measurements are also marked as points: a single one has no line


def gradient_figure(entries: Entries, epochs: Entries | None, *, unit: str = "optimiser step") -> Figure:
    """One probed run: (a) both losses and how often they are saturated, (b) both gradient norms, (c) retrieval error.

    Losses are shown per measurement (thin) and as a running median (thick), norms as the median of an epoch between
    its quartiles. Values below `FLOOR` are drawn there; how many norms are exactly zero is said below their panel.

    Args:
        entries: the measurements, as this module describes them.
        epochs: the run's evaluation entries, as `convergence_figure` takes them; without any, panel (c) says so. None
            leaves the panel out, where there was no run.
        unit: what the measurements were made at.

    Reference:
        HN-CLIP, figure gradient.
    """
    if not entries:
        raise ValueError("entries is empty: the run has no gradient measurements to draw")
    figure = blank_figure(7.6)
    (loss, share), (norm, error) = figure.subplots(2, 2)
    window = running_window(len(entries))
    handles = {}
    for key, name in _NAMES.items():
        handles[name] = _traces(loss, entries, key, window)
        _saturation(share, entries, key)
        _norms(norm, entries, key)
    log_axis([loss], clamped([numbers(entries, key) for key in _NAMES]))
    log_axis([norm], clamped([numbers(entries, f"{key}_norm") for key in _NAMES]))
    loss.set_title("(a) losses", fontsize=10)
    loss.set_ylabel("loss on the batch (nats)")
    loss.set_xlabel(f"{unit}\nthin: every measurement;\nthick: running median of {window}")
    share.set_title("(a) saturation", fontsize=10)
    share.set(ylim=(-4, 104), ylabel="loss evaluations < 0.001 (%)")
    share.set_xlabel(f"epoch\nmean over its measurements, {len(entries)} in all")
    norm.set_title(f"(b) gradient norms, computed in {_dtypes(entries)}", fontsize=10)
    norm.set_ylabel("norm over all parameters")
    norm.set_xlabel(f"epoch\nmedian and quartiles; exactly zero in {_zeros(entries)}")
    error.set_title("(c) retrieval error", fontsize=10)
    if epochs is None:
        error.remove()
    elif epochs:
        _errors(error, epochs)
    else:
        gap(error, "The run was not evaluated after its epochs.")
    for axes in figure.axes:
        whole_ticks(axes)
    finish(figure, handles)
    return figure


def scale_grid_figure(runs: Mapping[tuple[str, str], Entries]) -> Figure:
    """Gradient dynamics of several runs, one cell each, over optimiser steps and on common scales.

    In each cell, from the top: (a) both losses, raw (thin) and as running medians (thick), (b) both gradient norms and
    their ratio (dashed) where that of InfoNCE is not zero, (c) the cosine between the gradients. Log axes in (a) and
    (b), where values below `FLOOR` are drawn there, and ratios above its reciprocal there.

    Args:
        runs: the measurements, as this module describes them, by fraction ("5 %") and data set. Fractions are rows and
            data sets are columns, in the order in which they first appear; a pair that is missing or has no
            measurements is an empty cell that says so.

    Reference:
        HN-CLIP, figure s-grid.
    """
    measured = {key: entries for key, entries in runs.items() if entries}
    if not measured:
        raise ValueError("runs is empty: there are no gradient measurements to draw")
    rows, columns = ([*dict.fromkeys(key[side] for key in runs)] for side in (0, 1))
    figure = blank_figure(0.6 + 3.3 * len(rows))
    panels = figure.subplots(3 * len(rows), len(columns), squeeze=False, height_ratios=(3, 3, 2) * len(rows))
    room = WIDTH / len(columns) - 0.6
    cells: list[Sequence[Axes]] = []
    handles: dict[str, Any] = {}
    for row, fraction in enumerate(rows):
        labelled = False  # scales are common: the first cell of a row names them
        for column, data in enumerate(columns):
            cell = [*panels[3 * row : 3 * row + 3, column]]
            user_title(cell[0], f"{fraction} of {data}", room)
            if (fraction, data) in measured:
                cells.append(cell)
                handles = _draw_cell(cell, measured[fraction, data])
                _label_cell(cell, labelled)
                labelled = True
            else:
                for axes in cell:
                    axes.axis("off")
                gap(cell[1], "not measured")
    _common_scales(cells, [entry for entries in measured.values() for entry in entries])
    add_legend(figure, handles)
    return figure


def _draw_cell(cell: Sequence[Axes], entries: Entries) -> dict[str, Any]:
    """Draw (a), (b) and (c) of one run; what a legend names."""
    loss, norm, cosine = cell
    steps = numbers(entries, "step")
    window = running_window(len(entries))
    handles = {name: _traces(loss, entries, key, window) for key, name in _NAMES.items()}
    for key in _NAMES:
        _traces(norm, entries, f"{key}_norm", window)
    ratios = _ratio(entries)
    alone = [*np.flatnonzero(_alone(ratios))]  # a value between gaps has no line
    look: dict[str, Any] = {"color": NEUTRAL, "linestyle": "--", "linewidth": 1.2}
    (handles[_RATIO],) = norm.plot(steps, ratios, marker=".", markersize=3, markevery=alone, **look)
    cosines = numbers(entries, "cosine")
    cosine.axhline(0, color=NEUTRAL, linewidth=0.8)
    cosine.plot(steps, cosines, color=COLOURS[2], linewidth=0.8, marker=".", markersize=3)
    if np.isnan(cosines).all():
        cosine.text(0.5, 0.55, "none: a gradient is zero", ha="center", fontsize=8, transform=cosine.transAxes)
    return handles


def _label_cell(cell: Sequence[Axes], labelled: bool) -> None:
    for axes, label in zip(cell, ("loss (nats)", "norm, ratio", "cosine")):
        quiet(axes)
        lowest = axes is cell[-1]
        axes.tick_params(labelsize=8, labelbottom=lowest, labelleft=not labelled)
        if not labelled:
            axes.set_ylabel(label, fontsize=9)
        if not lowest:
            axes.sharex(cell[-1])
    cell[-1].set_xlabel("optimiser step", fontsize=9)
    whole_ticks(cell[-1])


def _common_scales(cells: Sequence[Sequence[Axes]], entries: Entries) -> None:
    losses, norms, cosines = zip(*cells)
    log_axis(losses, clamped([numbers(entries, key) for key in _NAMES]))
    log_axis(norms, clamped([*(numbers(entries, f"{key}_norm") for key in _NAMES), _ratio(entries)]))
    for axes in cosines:
        axes.set(ylim=(-1.1, 1.1), yticks=(-1, 0, 1))


def _traces(axes: Axes, entries: Entries, key: str, window: int) -> Any:
    """Thin, every measurement; thick, the running median, which is returned."""
    steps, values = numbers(entries, "step"), clamped(numbers(entries, key))
    look = _LINES[key.removesuffix("_norm")]
    marker = "." if len(entries) <= _FEW else None
    axes.plot(steps, values, color=look["color"], linewidth=0.7, alpha=0.4, marker=marker, markersize=5)
    (line,) = axes.plot(steps, running(values, window, _median), linewidth=2, **look)
    return line


def _saturation(axes: Axes, entries: Entries, key: str) -> None:
    epochs = _by_epoch(entries, f"{key}_saturated")
    means = [100 * float(np.mean(values)) if len(values) else np.nan for values in epochs.values()]
    axes.plot([*epochs], means, linewidth=2, **_POINTS[key], **_LINES[key])


def _norms(axes: Axes, entries: Entries, key: str) -> None:
    epochs = {epoch: clamped(values) for epoch, values in _by_epoch(entries, f"{key}_norm").items()}
    low, middle, high = zip(*(_quartiles(values) for values in epochs.values()))
    axes.fill_between([*epochs], low, high, color=_LINES[key]["color"], alpha=0.2, linewidth=0)
    axes.plot([*epochs], middle, linewidth=2, **_POINTS[key], **_LINES[key])


def _errors(axes: Axes, epochs: Entries) -> None:
    directions = {"text→image": ("text_to_image", 2), "image→text": ("image_to_text", 3)}
    for name, (key, style) in directions.items():
        errors = [100 - entry[key]["R@1"] for entry in epochs]
        look: dict[str, Any] = {"color": COLOURS[style], "linestyle": DASHES[style], "marker": MARKERS[style]}
        axes.plot([entry["epoch"] for entry in epochs], errors, label=name, linewidth=2, **look)
    axes.set(xlabel="epoch (0: before training)", ylabel="100 − validation R@1 (%)")
    axes.legend(fontsize=9, framealpha=0.8, handlelength=3)


def _by_epoch(entries: Entries, key: str) -> dict[int, np.ndarray]:
    """The finite values of each epoch, in order."""
    epochs, values = numbers(entries, "epoch"), numbers(entries, key)
    finite = np.isfinite(values)
    return {int(epoch): values[finite & (epochs == epoch)] for epoch in np.unique(epochs)}


def _quartiles(values: np.ndarray) -> np.ndarray:
    return np.quantile(values, (0.25, 0.5, 0.75)) if len(values) else np.full(3, np.nan)


def _median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else np.nan


def _ratio(entries: Entries) -> np.ndarray:
    """How many times the gradient of L_HN is as long as that of InfoNCE, NaN where the latter is zero."""
    plain, hard = numbers(entries, "infonce_norm"), numbers(entries, "hn_norm")
    nonzero = np.where(plain > 0, plain, np.nan)
    with np.errstate(over="ignore"):  # a denormal divisor: the quotient is drawn at the upper bound
        return clamped(hard / nonzero)


def _alone(values: np.ndarray) -> np.ndarray:
    """Which values have none beside them."""
    gaps = np.isnan(np.r_[np.nan, values, np.nan])
    return ~gaps[1:-1] & gaps[:-2] & gaps[2:]


def _dtypes(entries: Entries) -> str:
    return " and ".join(sorted({str(entry["dtype"]) for entry in entries}))


def _zeros(entries: Entries) -> str:
    """How often each gradient is exactly zero, in words."""
    shares = (100 * float(np.mean(numbers(entries, f"{key}_norm") == 0)) for key in _NAMES)
    parts = [f"{share:.1f} % ({name})" for share, name in zip(shares, _NAMES.values())]
    return f"{parts[0]}\nand {parts[1]} of measurements"
