"""Validation R@1 after every epoch, of every row on every domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from hnclip.analysis.figures import convergence_grid_figure
from hnclip.evaluate.ranks import ARROWS
from hnclip.studies.findings import Findings
from hnclip.studies.notes import missing_note, versions_note
from hnclip.studies.paper_rows import MISSING
from hnclip.studies.parts import FigurePart, Part, Shown, TablePart, WordsPart
from hnclip.studies.shows.gaps import nothing_yet
from hnclip.studies.statistics import level
from hnclip.studies.study import Domain

PEER = "InfoNCE"
PAPER = (
    "The paper: on DOCCI the first epoch of HN-CLIP (84.3 average R@1) exceeds the final accuracy of FineLIP, GOAL and "
    "StructXLIP, its second (86.1) that of every baseline."
)

Epochs = list[dict[str, Any]]


def show(findings: Findings) -> Shown:
    """A figure of rows × domains × directions; for each domain a table of averages, and when InfoNCE was caught up."""
    domains = {domain.name: found for domain in findings.domains if (found := _rows(findings, domain))}
    if not domains:
        return Shown((nothing_yet(findings),))
    several = f" Means over {len(findings.seeds)} seeds." if len(findings.seeds) > 1 else ""
    figure = FigurePart(
        "convergence",
        "Validation R@1 per epoch",
        convergence_grid_figure(domains),
        f"After every epoch, both directions and their mean; epoch 0 is the model before training.{several}",
    )
    notes = (*missing_note(findings), *versions_note(findings))
    parts: list[Part] = [figure]
    data = {}
    for name, rows in domains.items():
        peer = PEER if PEER in rows else next(iter(rows))
        best = max(average(entry) for entry in rows[peer] if entry["epoch"] > 0)
        caught = {row: epochs_to(entries, best) for row, entries in rows.items()}
        parts.append(_table(findings, name, rows, peer, best, caught, notes))
        data[name] = {
            "peer": peer,
            "best_of_peer": best,
            "rows": {row: {"epochs": entries, "epochs_to_peer": caught[row]} for row, entries in rows.items()},
        }
    return Shown((*parts, WordsPart((PAPER,))), data)


def average(entry: Mapping[str, Any]) -> float:
    """R@1, mean of both directions."""
    return level(mean(entry[direction]["R@1"] for direction in ARROWS))


def epochs_to(entries: Sequence[Mapping[str, Any]], value: float) -> int | None:
    """The first epoch of training whose average is at least this one; None if no epoch's is."""
    return next((entry["epoch"] for entry in entries if entry["epoch"] > 0 and average(entry) >= value), None)


def _rows(findings: Findings, domain: Domain) -> dict[str, Epochs]:
    """The evaluations of every row that has some, mean over the seeds that there are."""
    found = {}
    for row in findings.study.rows:
        runs = [findings.metrics(row.name, domain, seed, "evaluation") for seed in findings.seeds]
        if entries := _mean_of([run for run in runs if run]):
            found[row.name] = entries
    return found


def _mean_of(runs: Sequence[Sequence[Mapping[str, Any]]]) -> Epochs:
    """Epoch by epoch, those that all runs have."""
    by_epoch = [{entry["epoch"]: entry for entry in run} for run in runs]
    shared = [epoch for epoch in (by_epoch[0] if by_epoch else ()) if all(epoch in run for run in by_epoch)]
    return [
        {
            "epoch": epoch,
            **{direction: {"R@1": mean(run[epoch][direction]["R@1"] for run in by_epoch)} for direction in ARROWS},
        }
        for epoch in sorted(shared)
    ]


def _table(
    findings: Findings,
    domain: str,
    rows: Mapping[str, Epochs],
    peer: str,
    best: float,
    caught: Mapping[str, int | None],
    notes: tuple[str, ...],
) -> TablePart:
    epochs = sorted({entry["epoch"] for entries in rows.values() for entry in entries})
    body = []
    for row in findings.study.rows:
        values = {entry["epoch"]: average(entry) for entry in rows.get(row.name, ())}
        cells = [f"{values[epoch]:.1f}" if epoch in values else MISSING for epoch in epochs]
        reached = MISSING if row.name not in rows else "never" if caught[row.name] is None else str(caught[row.name])
        body.append((row.name, *cells, reached))
    return TablePart(
        title=f"Validation R@1 per epoch, mean of both directions (%): {domain}",
        headers=("method", *(f"epoch {epoch}" for epoch in epochs), f"epochs to {best:.1f}"),
        rows=tuple(body),
        notes=(
            f"The last column: the first epoch of training that reaches the best one of {peer}.",
            *notes,
        ),
    )
