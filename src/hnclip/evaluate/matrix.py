"""Several models on several benchmarks in one table, the paper's own numbers below it if asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hnclip.evaluate.marks import clear_marks, highest_marks
from hnclip.evaluate.published import PublishedResult, paper_title, same_benchmark
from hnclip.evaluate.result import PerQuery, Result
from hnclip.evaluate.table import ARROWS
from hnclip.tables import TEXT_MARKS, Mark, latex_table, markdown_table, text_table

_MISSING = "–"


@dataclass(frozen=True)
class Results:
    """Results of several models on several data sets.

    The tables have a row per model and, per data set, a column for each direction and K, in the order of the results.
    A data set with a held-out part has further columns for it. `paper` adds rows of the paper below a rule: they were
    not measured here, so no mark compares them with anything.

    Marks: where the results carry their queries, the best number of a column is marked only if the paired 95 % interval
    of its difference excludes zero against every other model, and the second only if the best is marked and it is
    clearly above all further ones. Where they do not, the highest and second highest numbers are marked, and the notes
    below the table say that this claims nothing.
    """

    results: tuple[Result, ...]

    def __post_init__(self) -> None:
        if not self.results:
            raise ValueError("results is empty: there is nothing to show")
        first: dict[tuple[str, str], Result] = {}
        seen = set()
        for result in self.results:
            name = (result.data, result.split)
            if (result.model, *name) in seen:
                raise ValueError(f"results has two of {result.model!r} on {result.data} {result.split}")
            seen.add((result.model, *name))
            _check_same_gallery(first.setdefault(name, result), result)

    def to_dict(self) -> dict[str, Any]:
        return {"results": [result.to_dict() for result in self.results]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_text(self, *, ks: Sequence[int] = (1,), paper: Iterable[PublishedResult] = ()) -> str:
        """For a terminal: the best number has a *, the second a +."""
        return self._with_notes(text_table, (TEXT_MARKS["best"], TEXT_MARKS["second"]), ks, paper)

    def to_markdown(self, *, ks: Sequence[int] = (1,), paper: Iterable[PublishedResult] = ()) -> str:
        """The best number is bold, the second italic."""
        return self._with_notes(markdown_table, ("Bold", "italic"), ks, paper)

    def to_latex(
        self, *, ks: Sequence[int] = (1,), paper: Iterable[PublishedResult] = (), label: str = "tab:results"
    ) -> str:
        """A table for booktabs whose caption holds the notes; the best number is bold, the second underlined."""
        matrix = _matrix(self.results, ks, tuple(paper))
        galleries = [column.gallery for column in matrix.columns]
        return latex_table(
            ["model", *(column.measure for column in matrix.columns)],
            matrix.rows,
            marks=matrix.marks,
            spans=[(gallery, galleries.count(gallery)) for gallery in dict.fromkeys(galleries)],
            caption=" ".join(["Recall in percent.", *_notes(self.results, matrix, ("Bold", "underlined"))]),
            label=label,
        )

    def _with_notes(
        self, table: Callable[..., str], words: tuple[str, str], ks: Sequence[int], paper: Iterable[PublishedResult]
    ) -> str:
        matrix = _matrix(self.results, ks, tuple(paper))
        several = len({column.gallery for column in matrix.columns}) > 1  # else the notes name it
        headers = [f"{column.gallery} {column.measure}" if several else column.measure for column in matrix.columns]
        drawn = table(["model", *headers], matrix.rows, marks=matrix.marks)
        return "\n\n".join([drawn, "\n".join(_notes(self.results, matrix, words))])


class _Column(NamedTuple):
    """Retrieval at k, in one direction, on one gallery or its held-out part."""

    data: str
    split: str
    held_out: bool
    direction: str
    k: int

    @property
    def gallery(self) -> str:
        name = self.data if self.split == "test" else f"{self.data} {self.split}"
        return f"{name} held-out" if self.held_out else name

    @property
    def measure(self) -> str:
        return f"{ARROWS[self.direction]} R@{self.k}"

    def value(self, result: Result) -> str | None:
        metrics = result.held_out if self.held_out else result.metrics
        if metrics is None:
            return None
        if f"R@{self.k}" not in metrics[self.direction]:
            raise ValueError(f"ks asks for R@{self.k}, which {result.model} has not on {self.gallery}")
        return f"{metrics[self.direction][f'R@{self.k}']:.2f}"

    def queries(self, result: Result) -> PerQuery | None:
        return result.held_out_queries if self.held_out else result.queries


class _Matrix(NamedTuple):
    """The cells of a table, and what its notes must explain: marks of either kind (`clear`, `highest`), and rows of the
    paper."""

    columns: list[_Column]
    rows: list[list[str]]
    marks: dict[tuple[int, int], Mark]
    clear: bool
    highest: bool
    paper: bool


def _matrix(results: Sequence[Result], ks: Sequence[int], paper: Sequence[PublishedResult]) -> _Matrix:
    if not ks:
        raise ValueError("ks must name at least one K")
    columns = _columns(results, ks)
    models = list(dict.fromkeys(result.model for result in results))
    rows = [[model, *[_MISSING] * len(columns)] for model in models]
    marks: dict[tuple[int, int], Mark] = {}
    clear = highest = False
    for number, column in enumerate(columns, start=1):
        here = {
            models.index(result.model): result
            for result in results
            if (result.data, result.split) == (column.data, column.split)
        }
        values = {row: value for row, result in here.items() if (value := column.value(result)) is not None}
        queries = {row: found for row in values if (found := column.queries(here[row])) is not None}
        for row, value in values.items():
            rows[row][number] = value
        if len(values) > 1:
            paired = len(queries) == len(values)
            clear, highest = clear or paired, highest or not paired
            chosen = clear_marks(queries, column.direction, column.k) if paired else highest_marks(values)
            marks |= {(row, number): mark for row, mark in chosen.items()}
    printed = _paper_rows(columns, paper)
    return _Matrix(columns, [*rows, *([[], *printed] if printed else [])], marks, clear, highest, bool(printed))


def _columns(results: Sequence[Result], ks: Sequence[int]) -> list[_Column]:
    held_out: dict[tuple[str, str], bool] = {}
    for result in results:
        name = (result.data, result.split)
        held_out[name] = held_out.get(name, False) or result.held_out is not None
    return [
        _Column(*name, part, direction, k)
        for name, has_part in held_out.items()
        for part in ((False, True) if has_part else (False,))
        for direction in ARROWS
        for k in ks
    ]


def _paper_rows(columns: Sequence[_Column], paper: Sequence[PublishedResult]) -> list[list[str]]:
    """A row per name, with the numbers that it has for these columns; rows without any are left out."""
    rows = []
    for name in dict.fromkeys(published.name for published in paper):
        cells = [_paper_cell(column, [row for row in paper if row.name == name]) for column in columns]
        if any(cell != _MISSING for cell in cells):
            rows.append([name, *cells])
    return rows


def _paper_cell(column: _Column, rows: Sequence[PublishedResult]) -> str:
    """The paper evaluates on whole test splits alone."""
    if column.split == "test" and not column.held_out:
        for row in rows:
            if same_benchmark(row.benchmark, column.data) and column.k in row.recall[column.direction]:
                return f"{row.recall[column.direction][column.k]:.2f}"
    return _MISSING


def _notes(results: Sequence[Result], matrix: _Matrix, words: tuple[str, str]) -> list[str]:
    """What a reader must know of the numbers, in sentences."""
    best, second = words
    notes = [
        _about_gallery([result for result in results if (result.data, result.split) == name])
        for name in dict.fromkeys((result.data, result.split) for result in results)
    ]
    if matrix.clear:
        notes.append(
            f"{best}: above every other model, with zero outside the paired 95 % interval of each difference; "
            f"{second}: likewise above all but the best. A lead without a mark may be chance."
        )
    if matrix.highest:
        where = "where the models cannot be compared query by query" if matrix.clear else "not compared query by query"
        notes.append(f"{best}: highest number, {second}: second highest, {where}: such a mark claims no difference.")
    if matrix.paper:
        notes.append(f"Rows named “paper” are printed in “{paper_title()}”; they were not measured here.")
    return notes


def _about_gallery(results: Sequence[Result]) -> str:
    first = results[0]
    sentences = [f"{first.data} {first.split}: {first.images:,} images, {first.captions:,} captions."]
    if first.skipped:
        sentences.append(f"{first.skipped:,} records could not be used and are left out.")
    if cut := [f"{result.truncated:,} for {result.model}" for result in results if result.truncated]:
        sentences.append(f"Captions cut at the model's context: {', '.join(cut)}.")
    if parts := [result.held_out["image_to_text"]["queries"] for result in results if result.held_out is not None]:
        sentences.append(f"Held-out: queries and candidates are only the {parts[0]:,} images kept from training.")
    return " ".join(sentences)


def _check_same_gallery(first: Result, other: Result) -> None:
    """Numbers among more candidates are lower, so one column for two galleries would mislead."""
    sizes = [(result.images, result.captions, result.skipped) for result in (first, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"results of {first.data} {first.split} are of different galleries: {first.model} has {sizes[0]}, "
            f"{other.model} has {sizes[1]} images, captions and skipped records"
        )
    for one, two in ((first.queries, other.queries), (first.held_out_queries, other.held_out_queries)):
        if one is None or two is None:
            continue
        if not torch.equal(one.ranks.owner, two.ranks.owner) or (one.ids and two.ids and one.ids != two.ids):
            raise ValueError(
                f"results of {first.data} {first.split} are of different galleries: the captions of {first.model} and "
                f"{other.model} belong to different images"
            )
