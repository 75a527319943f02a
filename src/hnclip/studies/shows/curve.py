"""Average R@1 over the number that rows of a study differ by, such as γ; the paper's curve beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hnclip.evaluate.bootstrap import crossed_bootstrap
from hnclip.evaluate.published import paper_title
from hnclip.evaluate.ranks import ARROWS
from hnclip.studies.findings import Findings
from hnclip.studies.measured import Measured, measure
from hnclip.studies.notes import missing_note, versions_note
from hnclip.studies.paper_rows import BENCHMARKS, paper_rows
from hnclip.studies.parts import FigurePart, Part, Shown, WordsPart
from hnclip.studies.statistics import MEAN, Runs, recalls
from hnclip.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AXES = {"objective.gamma": "boost strength γ"}
_ACROSS = 3  # panels beside each other
_QUERIES = "the 95 % interval over queries, which does not tell how another seed would do"


class Point(NamedTuple):
    """A row of a curve: where it is, its average R@1, and the ends of its bar, equal to it where it has none."""

    x: float
    recall: float
    low: float
    high: float


Curves = Mapping[str, Sequence[Point]]


def show(findings: Findings) -> Shown:
    """A panel per column with a curve per series, and one with the paper's curves on its own benchmarks."""
    study = findings.study
    measured = [measure(findings, column) for column in findings.columns]
    ours = {column.column.name: curves for column in measured if (curves := curves_of(study, column))}
    printed = paper_curves(study)
    if not ours:
        return Shown((WordsPart(missing_note(findings) or ("No row of this study is a point of a curve.",)),))
    bars = (
        f"the standard deviation over {len(findings.seeds)} seeds, of a point that has one seed {_QUERIES}"
        if len(findings.seeds) > 1
        else _QUERIES
    )
    sentences = [f"Average of both directions. Bars: {bars}; every panel has its own scale."]
    if printed:
        sentences.append(
            f"The panel “paper” is drawn from the numbers of “{paper_title()}”; nothing of it was measured."
        )
    sentences += [*missing_note(findings), *versions_note(findings)]
    part: Part = FigurePart(
        f"{study.name}-curve",
        f"{study.title}. Average R@1",
        figure_of(ours, printed, _axis(study)),
        " ".join(sentences),
    )
    data = {
        "columns": {name: _plain(curves) for name, curves in ours.items()},
        "paper": _plain(printed),
    }
    return Shown((part,), data)


def curves_of(study: Study, column: Measured) -> dict[str, list[Point]]:
    """The points of every series on a column, in the order of x: those that were measured."""
    standing = column.standings()
    found: dict[str, list[Point]] = {}
    for row in sorted((row for row in study.rows if row.x is not None), key=lambda row: row.x or 0.0):
        if runs := standing.rows[row.name]:
            found.setdefault(row.series or "", []).append(_point(row.x or 0.0, runs))
    return found


def _point(x: float, runs: Runs) -> Point:
    """Over several seeds with their standard deviation; of one with its interval over queries."""
    spread = recalls(runs, MEAN, 1)
    assert spread is not None  # there are runs
    if spread.std is not None:
        return Point(x, spread.mean, spread.mean - spread.std, spread.mean + spread.std)
    queries = next(iter(runs.values()))
    if queries.groups.unique().numel() < 2:  # a single family has no spread to measure
        return Point(x, spread.mean, spread.mean, spread.mean)
    hits = [100.0 * (getattr(queries.ranks, direction) <= 1)[:, None] for direction in ARROWS]  # [n, 1] each
    interval = crossed_bootstrap(hits, [queries.groups_of(direction) for direction in ARROWS])[-1]
    return Point(x, spread.mean, interval.low, interval.high)


def paper_curves(study: Study) -> dict[str, list[Point]]:
    """What the paper printed for the same rows, a curve per benchmark and series."""
    rows = {row.name: row for row in study.rows if row.x is not None}
    several = len({row.series for row in rows.values()}) > 1
    found: dict[str, dict[float, Point]] = {}
    for benchmark in BENCHMARKS:
        for printed in paper_rows(study, (benchmark,)):
            row = rows.get(printed.row)
            if row is None or row.x is None:
                continue
            recall = math.fsum(printed.result.recall[direction][1] for direction in ARROWS) / len(ARROWS)
            name = f"{benchmark}, {row.series}" if several else benchmark
            found.setdefault(name, {}).setdefault(row.x, Point(row.x, recall, recall, recall))
    return {name: [points[x] for x in sorted(points)] for name, points in found.items()}


def figure_of(ours: Mapping[str, Curves], printed: Curves, axis: str) -> Figure:
    """A panel per column, then one of the paper's, each with its own legend where it has several curves.

    Args:
        ours: curves by column.
        printed: curves of the paper.
        axis: what the horizontal axis shows.
    """
    from hnclip.analysis.figures.style import WIDTH, blank_figure, panel_legend, quiet, styles

    panels = [*ours.items(), *([("paper (not measured here)", printed)] if printed else [])]
    across = min(_ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    figure = blank_figure(3.6 * down)
    grid = figure.subplots(down, across, squeeze=False).flat
    for axes, (title, curves) in zip(grid, panels):
        handles = {}
        for (name, points), (colour, dash, marker) in zip(curves.items(), styles()):
            x = [point.x for point in points]
            look: dict[str, Any] = {"color": colour, "linestyle": dash, "linewidth": 2, "marker": marker}
            (handles[name],) = axes.plot(x, [point.recall for point in points], **look)
            for point in points:
                if point.high > point.low:
                    ends = {"color": colour, "linewidth": 1.2, "marker": "_", "markersize": 8}
                    axes.plot([point.x, point.x], [point.low, point.high], **ends)
        axes.set(
            xlabel=axis, ylabel="average R@1 (%)", xticks=sorted({p.x for points in curves.values() for p in points})
        )
        quiet(axes)
        panel_legend(axes, title, handles, WIDTH / across)
    for axes in list(grid):
        axes.remove()
    return figure


def _axis(study: Study) -> str:
    """The setting that x is the value of."""
    for row in study.rows:
        for name, value in row.set.items():
            if row.x is not None and value == row.x:
                return _AXES.get(name, name)
    return "x"


def _plain(curves: Curves) -> dict[str, list[dict[str, float]]]:
    return {name: [point._asdict() for point in points] for name, points in curves.items()}
