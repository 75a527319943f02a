"""Whether a recall is due to training pairs in the gallery: all pairs beside the held-out ones."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch

from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.studies.findings import Findings
from hnclip.studies.measured import Measured, measure
from hnclip.studies.notes import CLEAR, gallery_note, missing_note, seeds_note, versions_note
from hnclip.studies.paper_rows import MISSING
from hnclip.studies.parts import Part, Shown, TablePart, WordsPart
from hnclip.studies.statistics import DIRECTIONS, MEAN, Difference, Spread, Standings
from hnclip.studies.study import Study
from hnclip.util.tables import Mark

# What is asked, and what it is called in a sentence.
WHOLE, SEEN, UNSEEN, ALONE = "all pairs", "other pairs", "held-out pairs", "held-out alone"
_SAID = {
    WHOLE: "all queries among all pairs",
    SEEN: "queries that are not held out, among all pairs",
    UNSEEN: "held-out queries among all pairs",
    ALONE: "held-out queries among held-out pairs",
}


def show(findings: Findings) -> Shown:
    """A table for every gallery with a held-out part: average R@1 of all queries among all pairs; of the queries that
    are not held out and of those that are, apart, among the same candidates; and of the held-out part alone. An
    advantage that is memory of training pairs is there for the former and not for the latter."""
    measured = [measure(findings, column) for column in findings.columns]
    columns = [column for column in measured if any(result.held_out is not None for result in column.all())]
    notes = (*missing_note(findings, [column.column for column in columns]), *versions_note(findings))
    parts: list[Part] = []
    data = []
    for column in columns:
        views = _views(column)
        parts.append(_table(findings, column, views, notes))
        if sentences := _sentences(findings.study, column, views):
            parts.append(WordsPart(sentences))
        data.append(_data(findings.study, column, views))
    if not columns:
        missing = missing_note(findings) or ("No gallery of this study has a held-out part.",)
        parts.append(WordsPart(missing))
    return Shown(tuple(parts), {"columns": data})


def only_queries(queries: EvaluationResult, ids: Set[str]) -> EvaluationResult:
    """The queries of these pictures and of their captions; candidates, and so ranks, stay what they were."""
    kept = torch.tensor([name in ids for name in queries.ids])  # [I]
    number = kept.cumsum(0) - 1  # [I] the place of each kept picture among the kept
    ranks = queries.ranks
    captions = kept[ranks.owner]  # [T]
    return EvaluationResult(
        Ranks(ranks.text_to_image[captions], ranks.image_to_text[kept], number[ranks.owner[captions]]),
        queries.groups[kept],
        tuple(name for name in queries.ids if name in ids),
    )


def _views(column: Measured) -> dict[str, Standings]:
    whole, alone = column.standings(), column.standings(held_out=True)
    views: dict[str, Standings] = {WHOLE: whole}
    apart = {name for runs in alone.rows.values() for queries in runs.values() for name in queries.ids}
    for view, unseen in ((SEEN, False), (UNSEEN, True)):
        views[view] = Standings(
            {
                row: {
                    seed: only_queries(queries, {name for name in queries.ids if (name in apart) == unseen})
                    for seed, queries in runs.items()
                }
                for row, runs in whole.rows.items()
            }
        )
    views[ALONE] = alone
    return {view: standing for view, standing in views.items() if _has_queries(standing)}


def _has_queries(standing: Standings) -> bool:
    """A gallery may hold nothing but what is held out."""
    return any(queries.ids for runs in standing.rows.values() for queries in runs.values())


def _table(findings: Findings, column: Measured, views: Mapping[str, Standings], extra: tuple[str, ...]) -> TablePart:
    study = findings.study
    lines: list[tuple[str, ...]] = [
        (row.name, *(_cell(standing.recall(row.name, MEAN, 1)) for standing in views.values())) for row in study.rows
    ]
    marks: dict[tuple[int, int], Mark] = {}
    compared = [(row.name, other) for row in study.rows for other in row.against]
    if compared:
        lines.append(())
    for name, other in compared:
        changes = [standing.difference(name, other, MEAN, 1) for standing in views.values()]
        marks |= {
            (len(lines), number): "best"
            for number, change in enumerate(changes, start=1)
            if change is not None and change.clear
        }
        lines.append((f"{name} − {other}", *(_cell(change) for change in changes)))
    parts = [result.held_out for result in column.all() if result.held_out is not None]
    notes = [
        *gallery_note(column),
        f"{len(parts[0].ids):,} images are held out from training; the others were trained on or chose the epoch. "
        f"“{WHOLE}”, “{SEEN}” and “{UNSEEN}” are queries among the same candidates, all pairs; “{ALONE}” has held-out "
        f"candidates only, which are fewer, so no recall is lower there than under “{UNSEEN}”.",
        seeds_note(findings),
        *([CLEAR] if compared else []),
        *extra,
    ]
    return TablePart(
        f"{study.title}. R@1 in percent, average of both directions, {column.column.name}",
        ("", *views),
        tuple(lines),
        marks,
        notes=tuple(notes),
    )


def _sentences(study: Study, column: Measured, views: Mapping[str, Standings]) -> tuple[str, ...]:
    return tuple(
        f"{column.column.gallery._replace(whole=False).name}, {_SAID[view]}: {found.sentence(row.name, other)}"
        for row in study.rows
        for other in row.against
        for view, standing in views.items()
        if (found := standing.difference(row.name, other, MEAN, 1)) is not None
    )


def _data(study: Study, column: Measured, views: Mapping[str, Standings]) -> dict[str, Any]:
    def found(view: Standings, row: str, other: str | None) -> dict[str, Any]:
        values = {
            direction: view.recall(row, direction, 1) if other is None else view.difference(row, other, direction, 1)
            for direction in DIRECTIONS
        }
        return {name: None if value is None else value.to_dict() for name, value in values.items()}

    return {
        "name": column.column.name,
        "rows": [
            {"row": row.name, **{name: found(view, row.name, None) for name, view in views.items()}}
            for row in study.rows
        ],
        "differences": [
            {"row": row.name, "against": other, **{name: found(view, row.name, other) for name, view in views.items()}}
            for row in study.rows
            for other in row.against
        ],
    }


def _cell(value: Spread | Difference | None) -> str:
    return MISSING if value is None else value.cell()
