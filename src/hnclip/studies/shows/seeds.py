"""Every seed of every row beside the others, and whether they put the rows into one order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hnclip.evaluate.published import paper_title
from hnclip.evaluate.ranks import ARROWS
from hnclip.studies.findings import Findings
from hnclip.studies.measured import Measured, measure
from hnclip.studies.notes import gallery_note, missing_note, versions_note
from hnclip.studies.paper_rows import BENCHMARKS, MISSING, NOTE, TITLE, PaperRow, paper_rows, paper_rows_of
from hnclip.studies.parts import Part, Shown, TablePart, WordsPart
from hnclip.studies.statistics import MEAN, Spread, Standings, level
from hnclip.studies.study import Study

_EMPTY = ""


def show(findings: Findings) -> Shown:
    """A table per column: a row per method and seed, then their mean ± sample standard deviation, and how far two seeds
    of one method lie apart at most; below it what the paper printed. A sentence says whether the order of the methods
    by average R@1 is the same under every seed."""
    study = findings.study
    columns = [measure(findings, column) for column in findings.columns]
    standings = [column.standings() for column in columns]
    paper = [paper_rows_of(study, column.column) for column in columns]
    extra = (*missing_note(findings), *versions_note(findings))
    parts: list[Part] = [_table(study, *found, extra) for found in zip(columns, standings, paper)]
    orders = {column.column.name: orders_of(standing) for column, standing in zip(columns, standings)}
    if sentences := tuple(f"{name}: {_sentence(found)}" for name, found in orders.items() if len(found) > 1):
        parts.append(WordsPart(sentences))
    if not any(paper) and (apart := _paper(study)) is not None:
        parts.append(apart)
    data = {
        "columns": [
            {
                "name": column.column.name,
                "rows": [_data(study, standing, row.name) for row in study.rows],
                "orders": {str(seed): order for seed, order in orders[column.column.name].items()},
            }
            for column, standing in zip(columns, standings)
        ],
        "paper": [row.to_dict() for row in paper_rows(study)],
    }
    return Shown(tuple(parts), data)


def orders_of(standing: Standings) -> dict[int, str]:
    """The trained rows by falling average R@1, “A > B = C”, under every seed that all of them have."""
    trained = {
        row: found.values
        for row in standing.rows
        if (found := standing.recall(row, MEAN, 1)) is not None and None not in found.values
    }
    seeds = dict.fromkeys(seed for values in trained.values() for seed in values if seed is not None)
    return {
        seed: _order({row: values[seed] for row, values in trained.items()})
        for seed in seeds
        if all(seed in values for values in trained.values())
    }


def _order(recall: Mapping[str, float]) -> str:
    levels = {row: level(value) for row, value in recall.items()}
    heights = sorted(set(levels.values()), reverse=True)
    return " > ".join(" = ".join(row for row in levels if levels[row] == height) for height in heights)


def largest_gap(found: Mapping[tuple[str, int], Spread]) -> float:
    """The largest difference between two seeds, over all directions and K.

    Reference:
        HN-CLIP, table A8, max|Δ|.
    """
    return max(max(one.values.values()) - min(one.values.values()) for one in found.values())


def _spreads(study: Study, standing: Standings, row: str) -> dict[tuple[str, int], Spread]:
    """Of every direction and K; empty if the row has no runs."""
    cells = [(direction, k) for direction in ARROWS for k in study.ks] + [(MEAN, 1)]
    return {cell: found for cell in cells if (found := standing.recall(row, *cell)) is not None}


def _table(
    study: Study, column: Measured, standing: Standings, paper: list[PaperRow], extra: tuple[str, ...]
) -> TablePart:
    lines: list[tuple[str, ...]] = []
    for row in study.rows:
        found = _spreads(study, standing, row.name)
        if not found:
            continue
        if lines:
            lines.append(())
        for seed in next(iter(found.values())).values:
            name = row.name if seed is None else f"{row.name}, seed {seed}"
            lines.append((name, *(f"{one.values[seed]:.2f}" for one in found.values()), _EMPTY))
        if len(next(iter(found.values())).values) > 1:
            gap = f"{largest_gap(_directions(found)):.2f}"
            lines.append((f"{row.name}, mean ± std", *(one.cell() for one in found.values()), gap))
    notes = [*gallery_note(column), "max |Δ|: the largest difference between two seeds in any of the columns.", *extra]
    if paper:
        lines.append(())
        cells = [(direction, k) for direction in ARROWS for k in study.ks]
        lines += [(row.name, *(row.cell(*cell) for cell in cells), _EMPTY, _EMPTY) for row in paper]
        notes.append(NOTE)
    headers = ("", *(f"R@{k}" for _ in ARROWS for k in study.ks), "R@1", "max |Δ|")
    spans = (*((arrow, len(study.ks)) for arrow in ARROWS.values()), ("average", 1), ("seeds", 1))
    return TablePart(
        f"{study.title}. Recall in percent, {column.column.name}",
        headers,
        tuple(lines),
        spans=spans,
        notes=tuple(notes),
    )


def _directions(found: Mapping[tuple[str, int], Spread]) -> dict[tuple[str, int], Spread]:
    return {cell: one for cell, one in found.items() if cell[0] != MEAN}


def _sentence(orders: Mapping[int, str]) -> str:
    if len(set(orders.values())) == 1:
        order = next(iter(orders.values()))
        return f"all {len(orders)} seeds put the methods into the same order by average R@1: {order}"
    each = "; ".join(f"seed {seed}: {order}" for seed, order in orders.items())
    return f"the order of the methods by average R@1 changes with the seed. {each}"


def _paper(study: Study) -> TablePart | None:
    """The paper's mean and deviation of R@1, a row per benchmark and direction."""
    rows = paper_rows(study)
    if not rows:
        return None
    methods = list(dict.fromkeys(row.row for row in rows))
    found = {(row.result.benchmark, row.row): row for row in rows}
    lines = [
        (f"{benchmark} {arrow}", *(_printed(found.get((benchmark, method)), direction) for method in methods))
        for benchmark in BENCHMARKS
        for direction, arrow in ARROWS.items()
    ]
    tables = " and ".join(dict.fromkeys(row.result.table for row in rows))
    notes = (f"R@1 in percent, mean ± standard deviation over its seeds, from Table {tables} of “{paper_title()}”.",)
    return TablePart(TITLE, ("", *methods), tuple(lines), notes=notes)


def _printed(row: PaperRow | None, direction: str) -> str:
    return MISSING if row is None else row.cell(direction, 1)


def _data(study: Study, standing: Standings, row: str) -> dict[str, Any]:
    found = _spreads(study, standing, row)
    recall: dict[str, dict[str, Any]] = {}
    for (direction, k), one in found.items():
        recall.setdefault(direction, {})[f"R@{k}"] = one.to_dict()
    return {"row": row, "recall": recall, "largest_gap": largest_gap(_directions(found)) if found else None}
