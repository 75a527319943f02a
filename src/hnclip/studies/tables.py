"""Tables of a study: recalls with differences, single seeds, held-out queries, chosen epochs, shares of the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

import torch

from hnclip.evaluate.bootstrap import Estimate
from hnclip.evaluate.ranks import ARROWS, Ranks
from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.report.document import Block, Missing, Table
from hnclip.studies.paper import MISSING, NOTE, paper_rows
from hnclip.studies.results import MEAN, Column, Spread, StudyResults, row_groups
from hnclip.util.tables import Mark

CLEAR = "A difference is marked {best} if its interval excludes zero."
NO_SPREAD = Estimate(math.nan, -math.inf, math.inf)
_SHALLOW = 10  # tables of both directions have recalls down to here: more columns do not fit on a page

Cell = tuple[str, Mark | None]


def spread_cell(value: Spread | None) -> str:
    """51.62, or over seeds 51.62 ± 0.40."""
    if value is None:
        return MISSING
    return f"{value.mean:.2f}" if value.std is None else f"{value.mean:.2f} ± {value.std:.2f}"


def difference_cell(found: Estimate | None, *, interval: bool = True) -> str:
    """+1.9 [+0.4, +3.3]"""
    if found is None:
        return MISSING
    if not interval or math.isinf(found.low):
        return signed(found.mean)
    # A clear difference must not be printed with an end at zero.
    ends = [f"{end:+.1g}" if found.clear and round(end, 1) == 0 else signed(end) for end in (found.low, found.high)]
    return f"{signed(found.mean)} [{', '.join(ends)}]"


def signed(points: float) -> str:
    """A difference in points. What rounds to nothing is +0.0.

    >>> signed(1.25), signed(-0.04)
    ('+1.2', '+0.0')
    """
    return f"{round(points, 1) + 0.0:+.1f}"


def seeds_note(results: StudyResults) -> str:
    """How differences are paired, and over what."""
    seeds = results.seeds
    named = ", ".join(map(str, seeds))
    if len(seeds) == 1:
        return (
            f"One seed ({named}): intervals are over queries, paired, groups of near-duplicates whole; they do not say "
            "how another seed would do."
        )
    return (
        f"{len(seeds)} seeds ({named}): mean ± sample standard deviation; intervals are over queries and seeds, "
        "paired, groups of near-duplicates whole."
    )


def missing_note(results: StudyResults) -> str:
    missing, wanted = results.missing
    if not missing:
        return ""
    return f"{missing} of {wanted} runs and measurements are missing: their cells are “–”, or means of fewer seeds."


@dataclass
class _Rows:
    """A table under construction: rows, and marks by row and column."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    marks: dict[tuple[int, int], Mark] = field(default_factory=dict)

    def add(self, name: str, cells: Iterable[Cell]) -> None:
        cells = list(cells)
        self.marks |= {(len(self.rows), column): mark for column, (_, mark) in enumerate(cells, start=1) if mark}
        self.rows.append((name, *(text for text, _ in cells)))

    def rule(self) -> None:
        if self.rows and self.rows[-1]:
            self.rows.append(())

    def compare(
        self,
        results: StudyResults,
        recall: Callable[[Sequence[str], str], Iterable[Cell]],
        difference: Callable[[str, str], Iterable[Cell]],
    ) -> None:
        """Add the rows of every group, and below them their differences.

        Args:
            recall: cells of a row, given its group.
            difference: cells of a row and the row that it is compared with.
        """
        groups = row_groups(results.study)
        for group in groups:
            self.rule()
            for row in group:
                self.add(row, recall(group, row))
            compared = [(row, other) for row in group for other in results.study.row(row).against]
            if compared and len(groups) == 1:
                self.rule()
            for row, other in compared:
                name = "Δ" if len(groups) > 1 and group == [other, row] else f"{row} − {other}"
                self.add(name, difference(row, other))


def recalls(results: StudyResults) -> list[Block]:
    """Average R@1 with intervals, then both directions at every K of each column, with the paper's rows below where the
    column is a benchmark of the paper."""
    study, columns = results.study, results.columns
    if study.columns == "own":
        blocks: list[Block] = [average_table(results, "", columns)]
    else:
        blocks = [
            average_table(results, f", trained on {domain.name}", [one for one in columns if one.domain == domain])
            for domain in results.domains
        ]
    for column in columns:
        tables = [tuple(ARROWS)] if len(study.ks) <= 3 else [(direction,) for direction in ARROWS]
        blocks += [_recall_table(results, column, directions) for directions in tables]
    return blocks


def average_table(results: StudyResults, what: str, columns: Sequence[Column]) -> Table:
    """R@1, mean of both directions, of these columns, and the mean of them if there are several."""
    study, several = results.study, len(columns) > 1

    def recall(group: Sequence[str], row: str) -> list[Cell]:
        found = [column.recall(row, MEAN, 1) for column in columns]
        cells: list[Cell] = [
            (spread_cell(value), column.marks(group, MEAN, 1).get(row)) for value, column in zip(found, columns)
        ]
        return [*cells, (spread_cell(average(found)), None)] if several else cells

    def difference(row: str, other: str) -> list[Cell]:
        found = [column.difference(row, other, MEAN, 1) for column in columns]
        means = [one.mean for one in found if one is not None]
        whole = NO_SPREAD._replace(mean=fmean(means)) if means and len(means) == len(found) else None
        return [_difference(one) for one in ([*found, whole] if several else found)]

    rows = _Rows()
    rows.compare(results, recall, difference)
    names = [column.gallery.name if study.columns != "own" else column.name for column in columns]
    notes = [seeds_note(results), _marks_note(results)]
    if any(row.against for row in study.rows):
        notes.append(CLEAR)
    if several:
        notes.append("Avg, the mean of all columns, has no interval and no mark.")
    return Table(
        ("", *names, *(["Avg"] if several else [])),
        rows.rows,
        title=f"{study.title}. R@1 in percent, average of both directions{what}",
        marks=rows.marks,
        notes=[*notes, *filter(None, [missing_note(results)])],
    )


def average(columns: Sequence[Spread | None]) -> Spread | None:
    """The mean of several columns for every seed that all of them have; None if one of them has no results."""
    present = [column for column in columns if column is not None]
    if len(present) < len(columns):
        return None
    seeds = [seed for seed in present[0].values if all(seed in column.values for column in present)]
    return Spread({seed: fmean(column.values[seed] for column in present) for seed in seeds}) if seeds else None


def _recall_table(results: StudyResults, column: Column, directions: tuple[str, ...]) -> Table:
    study = results.study
    cells = [(direction, k) for direction in directions for k in study.ks]
    rows = _Rows()
    rows.compare(
        results,
        lambda group, row: [(spread_cell(column.recall(row, *at)), column.marks(group, *at).get(row)) for at in cells],
        lambda row, other: [_difference(column.difference(row, other, *at), interval=False) for at in cells],
    )
    notes = _gallery_notes(column)
    if paper := paper_rows(study, column):
        rows.rule()
        for printed in paper:
            rows.add(printed.name, [(printed.cell(*at), None) for at in cells])
        notes.append(NOTE)
    direction = [ARROWS[name] for name in directions if len(directions) == 1]
    return Table(
        ("", *(f"R@{k}" for _, k in cells)),
        rows.rows,
        title=", ".join([f"{study.title}. Recall in percent", *direction, column.name]),
        marks=rows.marks,
        spans=[(ARROWS[name], len(study.ks)) for name in directions],
        notes=notes,
    )


def brief_recalls(results: StudyResults) -> Table:
    """Average R@1 of every row and column, and its difference from the first row that it is compared with."""
    groups = {row: group for group in row_groups(results.study) for row in group}
    rows = _Rows()
    for row in results.study.rows:
        cells: list[Cell] = [(next(iter(row.against), ""), None)]
        for column in results.columns:
            cells.append(
                (spread_cell(column.recall(row.name, MEAN, 1)), column.marks(groups[row.name], MEAN, 1).get(row.name))
            )
            cells.append(
                _difference(column.difference(row.name, row.against[0], MEAN, 1)) if row.against else ("", None)
            )
        rows.add(row.name, cells)
    headers = ("", "minus", *(header for column in results.columns for header in (column.name, "Δ")))
    return Table(headers, rows.rows, marks=rows.marks)


def seeds(results: StudyResults) -> list[Block]:
    """Every seed of every row, their mean ± std, and the largest difference of two seeds (the paper's Table A8)."""
    if len(results.seeds) < 2:
        return []
    cells = [(direction, k) for direction in ARROWS for k in results.study.ks if k <= _SHALLOW]
    blocks: list[Block] = []
    for column in results.columns:
        lines: list[tuple[str, ...]] = []
        for row in column.rows:
            found = [spread for at in [*cells, (MEAN, 1)] if (spread := column.recall(row, *at)) is not None]
            if not found or None in found[0].values:
                continue
            lines += [()] if lines else []
            for seed in found[0].values:
                lines.append((f"{row}, seed {seed}", *(f"{spread.values[seed]:.2f}" for spread in found), ""))
            gap = max(max(spread.values.values()) - min(spread.values.values()) for spread in found[:-1])
            lines.append((f"{row}, mean ± std", *map(spread_cell, found), f"{gap:.2f}"))
        shallow = len(cells) // len(ARROWS)
        blocks.append(
            Table(
                ("", *(f"R@{k}" for _, k in cells), "R@1", "max |Δ|"),
                lines,
                title=f"{results.study.title}. Single seeds, recall in percent, {column.name}",
                spans=[*((arrow, shallow) for arrow in ARROWS.values()), ("average", 1), ("seeds", 1)],
                notes=["max |Δ|: the largest difference between two seeds in any column but the average."],
            )
        )
    return blocks


def held_out(results: StudyResults) -> list[Block]:
    """How much of a recall is due to training pairs in the gallery: queries that were trained on and queries that were
    not, among the same candidates, and the held-out images alone."""
    blocks: list[Block] = []
    for column in results.columns:
        ids = {name for one in column.results if one.held_out is not None for name in one.held_out.ids}
        if not ids:
            continue
        views = {
            "all pairs": column,
            "other pairs": _with_queries(column, partial(only_queries, ids=ids, inside=False)),
            "held-out pairs": _with_queries(column, partial(only_queries, ids=ids, inside=True)),
            "held-out alone": _with_queries(column, lambda one: one.held_out),
        }
        views = {name: view for name, view in views.items() if any(one.ids for one in view.results)}
        rows = _Rows()
        for row in results.study.rows:
            rows.add(row.name, [(spread_cell(view.recall(row.name, MEAN, 1)), None) for view in views.values()])
        rows.rule()
        for row in results.study.rows:
            for other in row.against:
                found = [view.difference(row.name, other, MEAN, 1) for view in views.values()]
                rows.add(f"{row.name} − {other}", map(_difference, found))
        notes = [
            *_gallery_notes(column),
            f"{len(ids):,} images are held out from training. The first columns are queries among the same "
            "candidates, all pairs; “held-out alone” has held-out candidates only, which are fewer, so recalls are "
            "higher. An advantage on other pairs that is missing on held-out pairs is memory of the training pairs.",
            seeds_note(results),
            CLEAR,
        ]
        title = f"{results.study.title}. R@1 in percent, average of both directions, {column.name}"
        blocks.append(Table(("", *views), rows.rows, title=title, marks=rows.marks, notes=notes))
    return blocks or [Missing(missing_note(results) or "no gallery of this study has a held-out part")]


def only_queries(result: EvaluationResult, ids: set[str], *, inside: bool) -> EvaluationResult:
    """The queries of images (and of their captions) that are in `ids`, or are not; candidates and so ranks stay."""
    kept = torch.tensor([(name in ids) == inside for name in result.ids])  # [I]
    number, ranks = kept.cumsum(0) - 1, result.ranks  # [I] the place of each kept image among the kept
    captions = kept[ranks.owner]  # [T]
    return EvaluationResult(
        Ranks(ranks.text_to_image[captions], ranks.image_to_text[kept], number[ranks.owner[captions]]),
        result.groups[kept],
        tuple(name for name in result.ids if (name in ids) == inside),
    )


def _with_queries(column: Column, choose: Callable[[EvaluationResult], EvaluationResult | None]) -> Column:
    """The same rows with other queries; results for which there are none are left out."""
    rows = {
        row: {seed: found for seed, result in by_seed.items() if (found := choose(result)) is not None}
        for row, by_seed in column.rows.items()
    }
    return replace(column, rows=rows, _sums={})


def _difference(found: Estimate | None, *, interval: bool = True) -> Cell:
    return difference_cell(found, interval=interval), "best" if found is not None and found.clear else None


def _marks_note(results: StudyResults) -> str:
    groups = row_groups(results.study)
    where = " of its group" if len(groups) > 1 else ""
    second = "; {second}: above all but the best, likewise" if max(map(len, groups), default=0) > 2 else ""
    return (
        f"{{best}}: above every other row{where}, with zero outside the paired 95 % interval of each "
        f"difference{second}. A lead without a mark may be chance."
    )


def _gallery_notes(column: Column) -> list[str]:
    """Size of a gallery, and how many records or captions were skipped or truncated."""
    found = list(column.results)
    if not found:
        return []
    first = found[0]
    name = column.gallery.name if column.gallery.whole else f"{column.gallery.name} {first.split}"
    sentences = [f"{name}: {first.images:,} images, {first.captions:,} captions."]
    if first.skipped:
        sentences.append(f"{first.skipped:,} invalid records are skipped.")
    if cut := {result.truncated for result in found if result.truncated}:
        number = f"{max(cut):,}" if len(cut) == 1 else f"{min(cut):,} to {max(cut):,}"
        sentences.append(f"Captions truncated at the model's context: {number}.")
    return [" ".join(sentences)]
