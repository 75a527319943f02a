"""Figures of a study with the tables of their numbers: curves, convergence, shares of the data, gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hnclip.analysis.gradients import GradientSummary, gradient_summary
from hnclip.evaluate.bootstrap import crossed_bootstrap
from hnclip.evaluate.ranks import ARROWS
from hnclip.report.document import Block, Figure, Missing, Table
from hnclip.report.run_figures import (
    curve_figure,
    gradient_figure,
    sample_efficiency_figure,
    scale_grid_figure,
)
from hnclip.studies.paper import GRADIENTS, MISSING, runs_on_paper_data
from hnclip.studies.results import MEAN, Column, StudyResults, rounded
from hnclip.studies.spec import Domain
from hnclip.studies.tables import missing_note
from hnclip.util.text import slugify

_AXES = {"objective.gamma": "boost strength γ"}

Entries = Sequence[Mapping[str, Any]]
Curves = Mapping[str, Mapping[float, float]]
"""Average R@1 in percent by series and share of the training pairs."""


def curve(results: StudyResults) -> list[Block]:
    """Average R@1 over the setting that the rows differ by, such as γ, a panel for each column."""
    panels = {column.name: points for column in results.columns if (points := curve_points(results, column))}
    if not panels:
        return [Missing(missing_note(results) or "no row of this study is a point of a curve")]
    bars = "the 95 % interval over queries, which does not say how another seed would do"
    if len(results.seeds) > 1:
        bars = f"the standard deviation over {len(results.seeds)} seeds"
    return [
        Figure(
            f"{results.study.name}-curve",
            f"{results.study.title}. Average R@1",
            partial(curve_figure, panels, _axis(results)),
            f"Average of both directions. Bars: {bars}; every panel has its own scale.",
        )
    ]


def curve_points(results: StudyResults, column: Column) -> dict[str, list[tuple[float, ...]]]:
    """(x, R@1, low, high) of every series: ± the standard deviation over seeds, of one seed the interval over
    queries."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for row in sorted((row for row in results.study.rows if row.x is not None), key=lambda row: row.x or 0.0):
        if (recall := column.recall(row.name, MEAN, 1)) is None:
            continue
        point: tuple[float, ...] = (row.x or 0.0, recall.mean)
        first = next(iter(column.rows[row.name].values()))
        if recall.std is not None:
            point += (recall.mean - recall.std, recall.mean + recall.std)
        elif first.groups.unique().numel() > 1:  # a single group has no spread to measure
            hits = [100.0 * (getattr(first.ranks, direction) <= 1)[:, None] for direction in ARROWS]  # [n, 1] each
            point += crossed_bootstrap(hits, [first.groups_of(direction) for direction in ARROWS])[-1][1:3]
        found.setdefault(row.series or "", []).append(point)
    return found


def samples(results: StudyResults) -> list[Block]:
    """Average R@1 by share of the training pairs: a figure and a table for each column."""
    blocks: list[Block] = []
    # The rows that are compared with others are the method that the study is about.
    own = next((row.series for row in results.study.rows if row.against and row.series), None)
    for column in results.columns:
        curves = share_curves(results, column)
        if not curves:
            continue
        other = strongest_other(curves, own or "")
        points = {name: [(100 * x, recall) for x, recall in line.items()] for name, line in curves.items()}
        reference = None if other is None else (f"{other[0]}, all data", other[1])
        blocks += [
            Figure(
                slugify("samples", column.name),
                f"Sample efficiency: {column.name}",
                partial(sample_efficiency_figure, points, reference),
                "Average R@1 of both directions on the test gallery. Smaller shares lie inside larger ones, the same "
                "for every method.",
            ),
            share_table(results, column),
        ]
    return blocks or [Missing(missing_note(results))]


def share_curves(results: StudyResults, column: Column) -> Curves:
    """Means over the seeds that there are, in the order of the study's rows."""
    curves: dict[str, dict[float, float]] = {}
    for row in results.study.rows:
        if row.series is not None and row.x is not None and (recall := column.recall(row.name, MEAN, 1)) is not None:
            curves.setdefault(row.series, {})[row.x] = recall.mean
    return curves


def strongest_other(curves: Curves, series: str) -> tuple[str, float] | None:
    """The best other series with all training pairs, and its R@1."""
    whole = {name: curve[1.0] for name, curve in curves.items() if name != series and 1.0 in curve}
    return max(whole.items(), key=lambda item: item[1]) if whole else None


def sufficient_share(curve: Mapping[float, float], recall: float) -> float | None:
    """The smallest share whose R@1 is at least `recall`."""
    return next((share for share, value in sorted(curve.items()) if rounded(value) >= rounded(recall)), None)


def share_table(results: StudyResults, column: Column) -> Table:
    """Average R@1 by share of the training pairs, and the share with which each series reaches the strongest other one
    with all of them (the paper's Table A9 and its claim of 20 %)."""
    curves = share_curves(results, column)
    shares = sorted({share for curve in curves.values() for share in curve})
    lines = []
    for row in results.study.rows:
        if not row.trained and (recall := column.recall(row.name, MEAN, 1)) is not None:
            lines.append((f"{row.name} (no training)", *[f"{recall.mean:.2f}"] * len(shares), MISSING, MISSING))
    for name, curve in curves.items():
        cells = [f"{curve[share]:.2f}" if share in curve else MISSING for share in shares]
        other = strongest_other(curves, name)
        reached = None if other is None else sufficient_share(curve, other[1])
        said = MISSING if other is None else f"{other[0]} {other[1]:.2f}"
        lines.append((name, *cells, said, "none" if reached is None else f"{100 * reached:g} %"))
    return Table(
        ("", *(f"{100 * share:g} %" for share in shares), "strongest other, 100 %", "reached with"),
        lines,
        title=f"{results.study.title}. R@1 in percent, average of both directions, {column.name}",
        notes=[
            "Reached with: the smallest share as good as the strongest other row, as measured, without an interval."
        ],
    )


GRADIENT_HEADERS = (
    "",
    "measured",
    "InfoNCE < 0.001, epoch 1",
    "all epochs",
    "L_HN < 0.001",
    "zero gradient, InfoNCE",
    "L_HN",
    "ratio of norms",
    "cosine",
    "cosine > 0",
)


def gradients(results: StudyResults) -> list[Block]:
    """Losses and gradients of InfoNCE and L_HN along the runs: the run with all data, all runs as a grid, a table."""
    entries = gradient_entries(results)
    if not entries:
        return [Missing(missing_note(results) or "no run measured its gradients")]
    blocks: list[Block] = []
    whole = {domain: found for (row, domain), found in entries.items() if results.study.row(row).x in (None, 1.0)}
    for domain, (first, *_) in whole.items():
        row = next(row for row, name in entries if name == domain and results.study.row(row).x in (None, 1.0))
        evaluations = results.metrics(row, _domain(results, domain), results.seeds[0], "evaluation")
        name = slugify("gradients", domain)
        draw = partial(gradient_figure, first, evaluations or None)
        blocks.append(Figure(name, f"Gradients: {domain}", draw, f"{row}, seed {results.seeds[0]}."))
    grid = {(_share_name(results, row), domain): found[0] for (row, domain), found in entries.items()}
    blocks.append(
        Figure(
            "gradients",
            "Gradients across data scales",
            partial(scale_grid_figure, grid),
            "From the top of each cell: both losses on the batch of a step, both gradient norms and their ratio, the "
            f"cosine between both gradients. Seed {results.seeds[0]}.",
        )
    )
    found = gradient_summaries(results)
    lines = [_gradient_row(f"{domain}, {_share_name(results, row)}", one) for (row, domain), one in found.items()]
    lines += [(), _gradient_row("all", all_gradients(results))]
    lines += [(), *GRADIENTS] if runs_on_paper_data(results.setting) else []
    notes = [
        "Shares are of the measurements, each of one batch; a gradient is zero if it is exactly that. Ratio of the "
        "norms (L_HN over InfoNCE, where that is not zero) and cosine are medians.",
        *all_gradients(results).notes()[1:],
        *filter(None, [missing_note(results)]),
    ]
    title = "Gradients of InfoNCE and of L_HN on the batches of the same runs"
    return [*blocks, Table(GRADIENT_HEADERS, lines, title=title, notes=notes)]


def gradient_entries(results: StudyResults) -> dict[tuple[str, str], list[Entries]]:
    """Measurements of every seed that has some, by row and domain."""
    found: dict[tuple[str, str], list[Entries]] = {
        (row.name, domain.name): [results.metrics(row.name, domain, seed, "gradients") for seed in results.seeds]
        for row in results.study.rows
        for domain in results.domains
    }
    return {key: [one for one in entries if one] for key, entries in found.items() if any(entries)}


def gradient_summaries(results: StudyResults) -> dict[tuple[str, str], GradientSummary]:
    """All seeds of a row and domain together."""
    return {key: gradient_summary(_joined(seeds)) for key, seeds in gradient_entries(results).items()}


def all_gradients(results: StudyResults) -> GradientSummary:
    return gradient_summary(_joined([entries for seeds in gradient_entries(results).values() for entries in seeds]))


def _joined(parts: Sequence[Entries]) -> list[Mapping[str, Any]]:
    return [entry for entries in parts for entry in entries]


def _gradient_row(name: str, found: GradientSummary) -> tuple[str, ...]:
    every, start = found.overall, found.epochs.get(1)

    def percent(share: float | None) -> str:
        return MISSING if share is None else f"{100 * share:.0f} %"

    return (
        name,
        f"{every['measurements']:,}",
        percent(None if start is None else start["infonce_solved"]),
        *(percent(every[key]) for key in ("infonce_solved", "hn_solved", "infonce_zero", "hn_zero")),
        MISSING if every["ratio"] is None else f"{every['ratio'][1]:.2g}",
        MISSING if every["cosine"] is None else f"{every['cosine'][1]:.2f}",
        percent(every["cosine_positive"]),
    )


def _share_name(results: StudyResults, row: str) -> str:
    x = results.study.row(row).x
    return row if x is None else f"{100 * x:g} %"


def _domain(results: StudyResults, name: str) -> Domain:
    return next(domain for domain in results.domains if domain.name == name)


def _axis(results: StudyResults) -> str:
    """The field whose value is x."""
    fields = [name for row in results.study.rows for name, value in row.set.items() if value == row.x]
    return _AXES.get(fields[0], fields[0]) if fields else "x"
