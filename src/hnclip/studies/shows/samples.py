"""Average R@1 over the share of the training data, and how much of it each method needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

from hnclip.analysis.figures import sample_efficiency_figure
from hnclip.studies.findings import Column, Findings
from hnclip.studies.notes import missing_note, versions_note
from hnclip.studies.paper_rows import MISSING, paper_rows
from hnclip.studies.parts import FigurePart, Part, Shown, TablePart
from hnclip.studies.shows.gaps import nothing_yet
from hnclip.studies.statistics import level
from hnclip.studies.study import Study
from hnclip.util.text import slugify

TABLE = "A9"
LAST = (
    "The last column: the smallest share of the training pairs with which a method is at least as good as the "
    "strongest other one with all of them, as measured, whatever the intervals say."
)

Curves = Mapping[str, Mapping[float, float]]
"""Average R@1 in percent by method and share of the training pairs."""


class Need(NamedTuple):
    """What a method is measured by: the strongest other one with all data, and the smallest share that reaches it."""

    rival: str
    value: float
    share: float | None


def show(findings: Findings) -> Shown:
    """For each gallery a figure and a table, and the paper's own numbers in the same form."""
    parts: list[Part] = []
    data = {}
    methods = list(dict.fromkeys(row.series for row in findings.study.rows if row.series is not None))
    # The method that the study is about is the one that others are compared with.
    own = next((row.series for row in findings.study.rows if row.against and row.series), None)
    notes = (LAST, *missing_note(findings), *versions_note(findings))
    untrained = [row.name for row in findings.study.rows if not row.trained]
    for column in findings.columns:
        curves = _curves(findings, column)
        if not curves:
            continue
        found = needs(curves)
        need = found.get(own or "")
        reference = None if need is None else (f"{need.rival}, all data", need.value)
        parts.append(
            FigurePart(
                slugify("samples", column.name),
                f"Sample efficiency: {column.name}",
                sample_efficiency_figure(
                    {
                        name: [(100 * share, recall) for share, recall in curve.items()]
                        for name, curve in curves.items()
                    },
                    reference,
                ),
                "Average R@1 of both directions on the test gallery. Smaller shares lie inside larger ones, the same "
                "for every method.",
            )
        )
        start = {row: average for row in untrained if (average := _average(findings, row, column)) is not None}
        table = _table(f"Average R@1 (%): {column.name}", methods, curves, found, start)
        parts.append(replace(table, notes=notes))
        data[column.name] = {
            "curves": {name: {f"{share:g}": value for share, value in curve.items()} for name, curve in curves.items()},
            "needs": {name: need._asdict() for name, need in found.items()},
            "untrained": start,
        }
    if not parts:
        return Shown((nothing_yet(findings),))
    for benchmark, curves in published_curves(findings.study).items():
        title = f"The paper's numbers, not measured here (Table {TABLE}): average R@1 (%), {benchmark}"
        found = needs(curves)
        # Its table has but one rival, which is not the strongest that it knows of: so the rival is named.
        rival = found[own].rival if own in found else None
        compared = {name: need for name, need in found.items() if name == own}
        parts.append(_table(title, list(curves), curves, compared, {}, rival=rival))
    return Shown(tuple(parts), data)


def needs(curves: Curves) -> dict[str, Need]:
    """Of every method that there is another one for with all data.

    Relations:
        The claim of the paper: HN-CLIP needs 20 %.
    """
    found = {}
    for name, curve in curves.items():
        whole = {other: values[1.0] for other, values in curves.items() if other != name and 1.0 in values}
        if whole:
            rival = max(whole, key=whole.__getitem__)
            enough = level(whole[rival])
            share = next((share for share, value in sorted(curve.items()) if level(value) >= enough), None)
            found[name] = Need(rival, whole[rival], share)
    return found


def published_curves(study: Study) -> dict[str, dict[str, dict[float, float]]]:
    """The paper's own curves by benchmark."""
    found: dict[str, dict[str, dict[float, float]]] = {}
    for printed in paper_rows(study):
        row = study.row(printed.row)
        if row.series is not None and row.x is not None:
            value = mean(recall[1] for recall in printed.result.recall.values())
            found.setdefault(printed.result.benchmark, {}).setdefault(row.series, {})[row.x] = value
    return found


def _curves(findings: Findings, column: Column) -> dict[str, dict[float, float]]:
    """Of the runs that there are, mean over seeds; methods in the order of the study, whatever is missing."""
    curves: dict[str, dict[float, float]] = {}
    for row in findings.study.rows:
        if row.series is None or row.x is None:
            continue
        curve = curves.setdefault(row.series, {})
        if (average := _average(findings, row.name, column)) is not None:
            curve[row.x] = average
    return {name: curve for name, curve in curves.items() if curve}


def _average(findings: Findings, row: str, column: Column) -> float | None:
    """R@1 of the runs that there are."""
    results = findings.results(row, column)
    return mean(result.metrics["mean_R@1"] for result in results.values()) if results else None


def _table(
    title: str,
    methods: Sequence[str],
    curves: Curves,
    found: Mapping[str, Need],
    start: Mapping[str, float],
    *,
    rival: str | None = None,
) -> TablePart:
    """Args:
    start: average R@1 of rows without training.
    rival: whom all that were compared at all are compared with; each with its own when left out.
    """
    shares = sorted({share for curve in curves.values() for share in curve})
    body: list[tuple[str, ...]] = [
        (f"{name} (no training)", *(f"{value:.2f}",) * len(shares), MISSING, MISSING) for name, value in start.items()
    ]
    for name in methods:
        curve, need = curves.get(name, {}), found.get(name)
        cells = [f"{curve[share]:.2f}" if share in curve else MISSING for share in shares]
        if need is None:
            body.append((name, *cells, MISSING, MISSING))
        else:
            reached = "none" if need.share is None else f"{100 * need.share:g} %"
            body.append((name, *cells, f"{need.value:.2f}" if rival else f"{need.rival} {need.value:.2f}", reached))
    other = "strongest other, 100 %" if rival is None else f"{rival}, 100 %"
    return TablePart(
        title=title,
        headers=("method", *(f"{100 * share:g} %" for share in shares), other, "reached with"),
        rows=tuple(body),
    )
