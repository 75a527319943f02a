"""Which numbers of the paper stand for which rows of a study. They are shown beside ours and mixed with nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hnclip.evaluate.published import PublishedResult, paper_title, published, same_benchmark
from hnclip.evaluate.ranks import ARROWS
from hnclip.studies.findings import Column
from hnclip.studies.parts import TablePart
from hnclip.studies.study import Study
from hnclip.studies.variant import Variant

BENCHMARKS = ("DOCCI", "DCI", "Long-DCI", "Urban-1K")
MISSING = "–"
NOTE = f"Rows named “paper” are printed in “{paper_title()}”; they were not measured here."
TITLE = "The paper's numbers, on its own benchmarks (not measured here)"
_SHALLOW = 10  # ranks down to here are in every table of the paper
_SEEDS = "mean of "  # how the setting of a replicated row begins
_PRINTED = ", printed as "  # behind the setting of an untrained model that a table repeats for every source


class PaperRow(NamedTuple):
    """A row of the paper on one of its benchmarks, and the row of the study that it stands for."""

    row: str
    result: PublishedResult

    @property
    def name(self) -> str:
        """“paper, Table A10: GOAL”; on what it was trained is said by the column."""
        what = filter(None, [self.result.method, self.result.setting.partition(_PRINTED)[0]])
        return f"paper, Table {self.result.table}: {', '.join(what)}"

    @property
    def column(self) -> str:
        """The benchmark; in tables of transfers from where to where, unless it is the source itself."""
        result = self.result
        told = f"trained on {result.trained_on}" in result.name and result.trained_on != result.benchmark
        return f"{result.trained_on} → {result.benchmark}" if told else result.benchmark

    def cell(self, direction: str, k: int) -> str:
        """88.25, or with the deviation over seeds 88.36 ± 0.14."""
        value = self.result.recall[direction].get(k)
        if value is None:
            return MISSING
        deviation = self.result.deviation.get(direction, {}).get(k)
        return f"{value:.2f}" if deviation is None else f"{value:.2f} ± {deviation:.2f}"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        told = {name: getattr(self.result, name) for name in ("table", "benchmark", "method", "setting", "trained_on")}
        numbers = {
            name: {way: {f"R@{k}": value for k, value in by_k.items()} for way, by_k in of.items()}
            for name, of in (("recall", self.result.recall), ("deviation", self.result.deviation))
        }
        return {"row": self.row, "name": self.name, **told, "epoch": self.result.epoch, **numbers}


def paper_rows(study: Study, benchmarks: tuple[str, ...] = BENCHMARKS) -> list[PaperRow]:
    """The paper's rows for a study on benchmarks, in the order of the study's rows and tables.

    Numbers that another table has printed already are not repeated.
    """
    found: list[PaperRow] = []
    for row in study.rows:
        printed: list[PublishedResult] = []
        for result in (one for table in study.tables for name in benchmarks for one in published(name, table=table)):
            if _stands_for(result, row) and not any(_repeats(result, other) for other in printed):
                printed.append(result)
        found += [PaperRow(row.name, result) for result in printed]
    return found


def paper_rows_of(study: Study, column: Column) -> list[PaperRow]:
    """The same for a column whose gallery is a benchmark of the paper, trained on what the paper trained on; none for
    other data."""
    if column.gallery.whole:
        return []
    return [
        row
        for row in paper_rows(study, (column.gallery.name,))
        if row.result.trained_on is None or same_benchmark(row.result.trained_on, column.domain.name)
    ]


def paper_part(study: Study) -> TablePart | None:
    """R@1 of the study's rows on the paper's benchmarks, in both directions, the deep ranks of the study where the
    paper has them too, and the differences of the printed numbers that the study asks for; None if the paper has no
    such rows."""
    rows = paper_rows(study)
    if not rows:
        return None
    trained = [row for row in rows if row.result.trained_on is not None] or rows
    order = {name: number for number, name in enumerate(BENCHMARKS)}
    columns = list(dict.fromkeys(row.column for row in sorted(trained, key=lambda row: order[row.result.benchmark])))
    deep = [k for k in study.ks if k > _SHALLOW]
    printed = [k for k in deep if all(k in row.result.recall[direction] for row in rows for direction in ARROWS)]
    cells = [(column, k) for column in columns for k in (1, *printed)]
    named = {(row.name, row.column): row.result for row in rows}
    first = {(row.row, row.column): row.result for row in reversed(rows)}
    lines: list[tuple[str, ...]] = [
        (name, *(_recalls(_result(named, name, column), k) for column, k in cells))
        for name in dict.fromkeys(row.name for row in rows)
    ]
    differences = [
        (
            f"{row.name} − {other}",
            *(_change(_result(first, row.name, column), _result(first, other, column), k) for column, k in cells),
        )
        for row in study.rows
        for other in row.against
    ]
    differences = [line for line in differences if set(line[1:]) != {MISSING}]
    notes = [f"Printed in “{paper_title()}”."]
    if missing := [f"R@{k}" for k in deep if k not in printed]:
        notes.append(f"It has no {' and no '.join(missing)} for these rows.")
    if differences:
        lines += [(), *differences]
        notes.append("Differences are those of its printed numbers; there are no intervals.")
    heads = [f"{column}, R@{k}" for column, k in cells] if printed else columns
    what = "T→I / I→T" if printed else "R@1, T→I / I→T"
    return TablePart(TITLE, (what, *heads), tuple(lines), notes=(" ".join(notes),))


def _stands_for(result: PublishedResult, row: Variant) -> bool:
    # A replicated row is the same row, and an untrained model is the same for whatever source a table prints it.
    plain = "" if result.setting.startswith(_SEEDS) else result.setting.partition(_PRINTED)[0]
    return (result.method, plain) == row.published


def _repeats(result: PublishedResult, other: PublishedResult) -> bool:
    """Whether the other has these numbers already, of the same benchmark and training data."""
    if (result.benchmark, result.trained_on) != (other.benchmark, other.trained_on):
        return False
    return all(
        other.recall[direction].get(k) == value for direction in ARROWS for k, value in result.recall[direction].items()
    )


_Found = Mapping[tuple[str, str], PublishedResult]


def _result(found: _Found, name: str, column: str) -> PublishedResult | None:
    """An untrained model was trained on no source: it is the same in every column of its benchmark."""
    if (name, column) in found:
        return found[name, column]
    untrained = found.get((name, column.rpartition(" → ")[2]))
    return untrained if untrained is not None and untrained.trained_on is None else None


def _recalls(result: PublishedResult | None, k: int) -> str:
    return MISSING if result is None else " / ".join(f"{result.recall[direction][k]:.2f}" for direction in ARROWS)


def _change(ours: PublishedResult | None, base: PublishedResult | None, k: int) -> str:
    if ours is None or base is None:
        return MISSING
    return " / ".join(f"{ours.recall[direction][k] - base.recall[direction][k]:+.2f}" for direction in ARROWS)
