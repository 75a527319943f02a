"""The table of a study: recalls of its rows, the differences that it asks for, and what the paper printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from hnclip.evaluate.ranks import ARROWS
from hnclip.studies.findings import Findings
from hnclip.studies.measured import Measured, measure
from hnclip.studies.notes import CLEAR, gallery_note, marks_note, missing_note, seeds_note, versions_note
from hnclip.studies.paper_rows import MISSING, NOTE, PaperRow, paper_part, paper_rows, paper_rows_of
from hnclip.studies.parts import Part, Shown, TablePart, WordsPart
from hnclip.studies.statistics import DIRECTIONS, MEAN, Difference, Spread, Standings, common_seeds
from hnclip.studies.study import Study
from hnclip.studies.variant import Variant
from hnclip.util.tables import Mark


def show(findings: Findings) -> Shown:
    """A table of average R@1 with intervals, one per column with both directions at every K, a sentence
    for every comparison, and the paper's numbers: below ours where the data is the paper's, else apart."""
    study = findings.study
    columns = [measure(findings, column) for column in findings.columns]
    standings = [column.standings() for column in columns]
    paper = [paper_rows_of(study, column.column) for column in columns]
    parts: list[Part] = [_average(findings, *found) for found in _averaged(study, columns, standings)]
    for found in zip(columns, standings, paper):
        # Three K of both directions fit on a page; more of them do not.
        ways = [tuple(ARROWS)] if len(study.ks) <= 3 else [(direction,) for direction in ARROWS]
        parts += [_recalls(study, directions, *found) for directions in ways]
    if sentences := _sentences(study, columns, standings):
        parts.append(WordsPart(sentences))
    if not any(paper) and (apart := paper_part(study)) is not None:
        parts.append(apart)
    data = {
        "columns": [_data(study, *found) for found in zip(columns, standings)],
        "paper": [row.to_dict() for row in paper_rows(study)],
    }
    return Shown(tuple(parts), data)


def groups_of(study: Study) -> list[list[Variant]]:
    """Rows that are compared with each other: pairs where every comparison is with the row above, as in the paper's
    table 2; rows of one place where there are several curves, as in its table A9, those without a place apart; else
    all."""
    rows = list(study.rows)
    pairs = [rows[start : start + 2] for start in range(0, len(rows), 2)]
    if rows and all([row.against for row in pair] == [(), (pair[0].name,)] for pair in pairs):
        return pairs
    placed = [row for row in rows if row.x is not None]
    if len({row.series for row in placed}) > 1:
        return [[row for row in rows if row.x == x] for x in dict.fromkeys(row.x for row in rows)]
    return [rows]


@dataclass
class _Lines:
    """A table as it grows: rows, and marks by row and column."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    marks: dict[tuple[int, int], Mark] = field(default_factory=dict)

    def add(self, name: str, cells: Sequence[tuple[str, Mark | None]]) -> None:
        for column, (_, mark) in enumerate(cells, start=1):
            if mark is not None:
                self.marks[len(self.rows), column] = mark
        self.rows.append((name, *(text for text, _ in cells)))

    def rule(self) -> None:
        if self.rows and self.rows[-1]:
            self.rows.append(())


_Cell = tuple[str, "Mark | None"]


def _fill(
    study: Study,
    recall: Callable[[Sequence[str], str], list[_Cell]],
    difference: Callable[[str, str], list[_Cell]],
) -> _Lines:
    """Rows of every group with the differences below them, both as cells with marks.

    Args:
        recall: of a group and one of its rows.
        difference: of a row and the one that it is compared with.
    """
    groups = groups_of(study)
    lines = _Lines()
    for group in groups:
        names = [row.name for row in group]
        lines.rule()
        for row in group:
            lines.add(row.name, recall(names, row.name))
        compared = [(row.name, other) for row in group for other in row.against]
        if compared and len(groups) == 1:
            lines.rule()
        for name, other in compared:
            pair = len(groups) > 1 and names == [other, name]
            lines.add("Δ" if pair else f"{name} − {other}", difference(name, other))
    return lines


_Averaged = tuple[str, dict[str, Standings]]


def _averaged(study: Study, columns: Sequence[Measured], standings: Sequence[Standings]) -> list[_Averaged]:
    """What the tables of averages are about, and their columns: all in one, but where models are tested on other
    domains than their own one for each that they are trained on."""
    if study.columns == "own":
        return [("", {column.column.name: standing for column, standing in zip(columns, standings)})]
    found: dict[str, dict[str, Standings]] = {}
    for column, standing in zip(columns, standings):
        found.setdefault(column.column.domain.name, {})[column.column.gallery.name] = standing
    return [(f", trained on {domain}", galleries) for domain, galleries in found.items()]


def _average(findings: Findings, what: str, columns: Mapping[str, Standings]) -> TablePart:
    """R@1, mean of both directions, on these columns; and the mean of them, if there are several."""
    study = findings.study
    standings = list(columns.values())
    several = len(columns) > 1
    found = {row.name: [standing.recall(row.name, MEAN, 1) for standing in standings] for row in study.rows}

    def recall(names: Sequence[str], row: str) -> list[_Cell]:
        marks = [standing.marks(names, MEAN, 1).get(row) for standing in standings]
        cells = [(_cell(value), mark) for value, mark in zip(found[row], marks)]
        return [*cells, (_cell(average(found[row])), None)] if several else cells

    def difference(row: str, other: str) -> list[_Cell]:
        changes = [standing.difference(row, other, MEAN, 1) for standing in standings]
        cells = [_difference_cell(change, with_interval=True) for change in changes]
        means = [change.mean for change in changes if change is not None]
        whole = Difference(fmean(means), None, None) if len(means) == len(changes) else None
        return [*cells, _difference_cell(whole, with_interval=False)] if several else cells

    lines = _fill(study, recall, difference)
    notes = [seeds_note(findings), marks_note(groups_of(study))]
    if any(row.against for row in study.rows):
        notes.append(CLEAR)
    if several:
        notes.append("Avg, the mean of all columns, has no interval, so no mark.")
    notes += [*missing_note(findings), *versions_note(findings)]
    return TablePart(
        f"{study.title}. R@1 in percent, average of both directions{what}",
        ("", *columns, *(["Avg"] if several else [])),
        tuple(lines.rows),
        lines.marks,
        notes=tuple(notes),
    )


def average(columns: Sequence[Spread | None]) -> Spread | None:
    """The mean of several columns for every seed that all of them have; None if one of them has nothing."""
    present = [column for column in columns if column is not None]
    if len(present) < len(columns):
        return None
    seeds = [seed for seed in present[0].values if all(seed in column.values for column in present)]
    return Spread({seed: fmean(column.values[seed] for column in present) for seed in seeds}) if seeds else None


def _recalls(
    study: Study, directions: tuple[str, ...], column: Measured, standing: Standings, paper: Sequence[PaperRow]
) -> TablePart:
    """These directions at every K on one gallery."""
    cells = [(direction, k) for direction in directions for k in study.ks]

    def recall(names: Sequence[str], row: str) -> list[_Cell]:
        return [(_cell(standing.recall(row, *cell)), standing.marks(names, *cell).get(row)) for cell in cells]

    def difference(row: str, other: str) -> list[_Cell]:
        return [_difference_cell(standing.difference(row, other, *cell), with_interval=False) for cell in cells]

    lines = _fill(study, recall, difference)
    alone = [ARROWS[direction] for direction in directions if len(directions) == 1]
    notes = list(gallery_note(column))
    if paper:
        lines.rule()
        for printed in paper:
            lines.add(printed.name, [(printed.cell(*cell), None) for cell in cells])
        notes.append(NOTE)
    return TablePart(
        ", ".join([f"{study.title}. Recall in percent", *alone, column.column.name]),
        ("", *(f"R@{k}" for _, k in cells)),
        tuple(lines.rows),
        lines.marks,
        spans=tuple((ARROWS[direction], len(study.ks)) for direction in directions),
        notes=tuple(notes),
    )


def _sentences(study: Study, columns: Sequence[Measured], standings: Sequence[Standings]) -> tuple[str, ...]:
    return tuple(
        f"{column.column.name}: {found.sentence(row.name, other)}"
        for row in study.rows
        for other in row.against
        for column, standing in zip(columns, standings)
        if (found := standing.difference(row.name, other, MEAN, 1)) is not None
    )


def _data(study: Study, column: Measured, standing: Standings) -> dict[str, Any]:
    rows, differences = [], []
    for row in study.rows:
        recall = _by_direction(study, lambda *cell, row=row.name: standing.recall(row, *cell))
        marks = _by_direction(study, lambda *cell, row=row.name: _mark(study, standing, row, *cell))
        rows.append({"row": row.name, "recall": recall, "marks": marks})
        for other in row.against:
            found = _by_direction(study, lambda *cell, a=row.name, b=other: standing.difference(a, b, *cell))
            seeds = [seed for seed in common_seeds(standing.rows[row.name], standing.rows[other]) if seed is not None]
            differences.append({"row": row.name, "against": other, "seeds": seeds, "difference": found})
    first = next(column.all(), None)
    return {
        "name": column.column.name,
        "domain": column.column.domain.name,
        "gallery": column.column.gallery.name,
        "images": None if first is None else first.images,
        "captions": None if first is None else first.captions,
        "rows": rows,
        "differences": differences,
    }


def _mark(study: Study, standing: Standings, row: str, direction: str, k: int) -> Mark | None:
    group = next(group for group in groups_of(study) if any(one.name == row for one in group))
    return standing.marks([one.name for one in group], direction, k).get(row)


def _by_direction(study: Study, value: Callable[[str, int], Any]) -> dict[str, dict[str, Any]]:
    """Of every direction and K what there is, ready for JSON."""
    found: dict[str, dict[str, Any]] = {}
    for direction in DIRECTIONS:
        values: Mapping[str, Any] = {f"R@{k}": value(direction, k) for k in study.ks}
        found[direction] = {
            name: one.to_dict() if isinstance(one, Spread | Difference) else one for name, one in values.items()
        }
    return found


def _cell(value: Spread | None) -> str:
    return MISSING if value is None else value.cell()


def _difference_cell(change: Difference | None, *, with_interval: bool) -> _Cell:
    if change is None:
        return MISSING, None
    text = change.cell() if with_interval else Difference(change.mean, None, None).cell()
    return text, "best" if change.clear else None
