"""Tables of recalls: with differences, of single seeds, of held-out queries; a short one for docs/results.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from hnclip.evaluation.bootstrap import Estimate
from hnclip.evaluation.ranks import ARROWS, Ranks
from hnclip.evaluation.retrieval import EvaluationResult
from hnclip.report.document import Block, Table
from hnclip.report.results import PAPER_NOTE
from hnclip.studies.paper import paper_rows
from hnclip.studies.results import MEAN, Column, Spread, StudyResults, row_groups
from hnclip.util.tables import MISSING, Marked

MARKS = (
    "{best}: a difference whose interval excludes zero, or the row that is above all others of its group by such "
    "differences; {second}: above all but the best. A lead without a mark may be chance."
)
_SHALLOW = 10  # tables of both directions have recalls down to here: more columns do not fit on a page

Place = tuple[Column, str, int]
"""Where the recalls of a table's column are: in which results, in which direction, at which rank."""


def spread_cell(value: Spread | None) -> str:
    """51.62, or over seeds 51.62 ± 0.40."""
    if value is None:
        return MISSING
    return f"{value.mean:.2f}" if value.std is None else f"{value.mean:.2f} ± {value.std:.2f}"


def difference_cell(found: Estimate | None, *, interval: bool = True) -> str:
    """+1.9 [+0.4, +3.3], marked if it is clear."""
    if found is None:
        return MISSING
    text = signed(found.mean)
    if interval and not math.isinf(found.low):
        # A clear difference must not be printed with an end at zero.
        ends = [f"{end:+.1g}" if found.clear and round(end, 1) == 0 else signed(end) for end in (found.low, found.high)]
        text += f" [{', '.join(ends)}]"
    return Marked(text, "best" if found.clear else None)


def signed(points: float) -> str:
    """A difference in points. What rounds to nothing is +0.0."""
    return f"{round(points, 1) + 0.0:+.1f}"


def seeds_note(results: StudyResults) -> str:
    """How differences are paired, and over what."""
    named = ", ".join(map(str, results.seeds))
    paired = "95 % intervals are paired, groups of near-duplicates whole, over queries"
    if len(results.seeds) == 1:
        return f"Seed {named}; {paired}, and do not say how another seed would do."
    return f"Mean ± sample standard deviation of seeds {named}; {paired} and seeds."


def missing_note(results: StudyResults) -> list[str]:
    missing, wanted = results.missing
    note = f"{missing} of {wanted} runs and measurements are missing: their cells are “–”, or means of fewer seeds."
    return [note] if missing else []


def recalls(results: StudyResults) -> list[Block]:
    """Average R@1 with intervals, then both directions at every K of each column, with the paper's rows below where the
    column is a benchmark of the paper."""
    study = results.study
    if study.columns == "own":
        blocks: list[Block] = [_average_table(results, "", results.columns)]
    else:
        by_domain = {one: [column for column in results.columns if column.domain == one] for one in results.domains}
        blocks = [_average_table(results, f", trained on {one.name}", found) for one, found in by_domain.items()]
    for column in results.columns:
        tables = [tuple(ARROWS)] if len(study.ks) <= 3 else [(direction,) for direction in ARROWS]
        blocks += [_recall_table(results, column, directions) for directions in tables]
    return blocks


def _average_table(results: StudyResults, what: str, columns: Sequence[Column]) -> Table:
    return Table(
        ("", *(column.gallery.name if what else column.name for column in columns)),
        _compared(results, [(column, MEAN, 1) for column in columns]),
        title=f"{results.study.title}. R@1 in percent, average of both directions{what}",
        notes=[seeds_note(results), MARKS, *missing_note(results)],
    )


def _recall_table(results: StudyResults, column: Column, directions: tuple[str, ...]) -> Table:
    study = results.study
    places = [(direction, k) for direction in directions for k in study.ks]
    lines = _compared(results, [(column, *place) for place in places], interval=False)
    notes = _gallery_notes(column)
    if printed := paper_rows(study, column):
        lines += [(), *((one.name, *(one.cell(*place) for place in places)) for one in printed)]
        notes.append(PAPER_NOTE)
    direction = [ARROWS[name] for name in directions if len(directions) == 1]
    return Table(
        ("", *(f"R@{k}" for _, k in places)),
        lines,
        title=", ".join([f"{study.title}. Recall in percent", *direction, column.name]),
        spans=[(ARROWS[name], len(study.ks)) for name in directions],
        notes=notes,
    )


def brief_recalls(results: StudyResults) -> Table:
    """Average R@1 of every row and column, and its difference from the first row that it is compared with."""
    lines: list[Sequence[str]] = []
    for row in results.study.rows:
        other = next(iter(row.against), "")
        cells = [row.name, other]
        for column in results.columns:
            mark = results.marks(column, MEAN, 1).get(row.name)
            cells.append(Marked(spread_cell(column.recall(row.name, MEAN, 1)), mark))
            cells.append(difference_cell(column.difference(row.name, other, MEAN, 1)) if other else "")
        lines.append(cells)
    return Table(("", "minus", *(header for column in results.columns for header in (column.name, "Δ"))), lines)


def seeds(results: StudyResults) -> list[Block]:
    """Every seed of every row, and their mean ± std (the paper's Table A8)."""
    places = [*((direction, k) for direction in ARROWS for k in results.study.ks if k <= _SHALLOW), (MEAN, 1)]
    blocks: list[Block] = []
    for column in results.columns:
        lines: list[tuple[str, ...]] = []
        for row in column.rows:
            found = [spread for place in places if (spread := column.recall(row, *place)) is not None]
            if found and found[0].std is not None:
                lines += [()] if lines else []
                for seed in found[0].values:
                    lines.append((f"{row}, seed {seed}", *(f"{spread.values[seed]:.2f}" for spread in found)))
                lines.append((f"{row}, mean ± std", *map(spread_cell, found)))
        headers = ("", *(f"{ARROWS.get(direction, 'average')} R@{k}" for direction, k in places))
        title = f"{results.study.title}. Single seeds, recall in percent, {column.name}"
        blocks += [Table(headers, lines, title=title)] if lines else []
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
        blocks.append(
            Table(
                ("", *views),
                _compared(results, [(view, MEAN, 1) for view in views.values()], marked=False),
                title=f"{results.study.title}. R@1 in percent, average of both directions, {column.name}",
                notes=[
                    *_gallery_notes(column),
                    f"{len(ids):,} images are held out from training. Candidates are all pairs; of “held-out alone” "
                    "the held-out ones, which are fewer, so recalls are higher. An advantage on other pairs that is "
                    "missing on held-out pairs is memory of the training pairs.",
                    seeds_note(results),
                    MARKS,
                ],
            )
        )
    return blocks


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
        row: {seed: found for seed, result in by_seed.items() if (found := choose(result)) is not None and found.ids}
        for row, by_seed in column.rows.items()
    }
    return replace(column, rows=rows, _sums={})


def _compared(
    results: StudyResults, places: Sequence[Place], *, interval: bool = True, marked: bool = True
) -> list[Sequence[str]]:
    """The recalls of every row, group by group, and below each group the differences of its rows."""
    groups = row_groups(results.study)
    marks = [results.marks(*place) if marked else {} for place in places]
    lines: list[Sequence[str]] = []
    for group in groups:
        lines += [()] if lines else []
        for row in group:
            recall = [spread_cell(column.recall(row, direction, k)) for column, direction, k in places]
            lines.append((row, *(Marked(text, found.get(row)) for text, found in zip(recall, marks))))
        compared = [(row, other) for row in group for other in results.study.row(row).against]
        lines += [()] if compared and len(groups) == 1 else []
        for row, other in compared:
            found = [column.difference(row, other, direction, k) for column, direction, k in places]
            name = "Δ" if len(groups) > 1 and group == [other, row] else f"{row} − {other}"
            lines.append((name, *(difference_cell(one, interval=interval) for one in found)))
    return lines


def _gallery_notes(column: Column) -> list[str]:
    """Size of a gallery, and how many records or captions were skipped or truncated."""
    if (first := next(column.results, None)) is None:
        return []
    name = column.gallery.name if column.gallery.whole else f"{column.gallery.name} {first.split}"
    note = f"{name}: {first.images:,} images, {first.captions:,} captions"
    note += f"; invalid records skipped: {first.skipped:,}" if first.skipped else ""
    return [note + (f"; captions truncated at the model's context: {first.truncated:,}." if first.truncated else ".")]
