"""Results of evaluations as tables, with marks, notes and the paper's rows: text, Markdown, LaTeX, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from hnclip.evaluate.bootstrap import Estimate, mark_best, paired_difference
from hnclip.evaluate.published import PublishedResult, paper_title, published, same_benchmark
from hnclip.evaluate.ranks import ARROWS
from hnclip.evaluate.retrieval import EvaluationResult, ResultComparison, comparisons
from hnclip.util.files import replace_file
from hnclip.util.tables import TEXT_MARKS, Mark, latex_table, markdown_table, text_table

KS = (1, 5, 10, 25, 50)
MAIN_TABLE = "1"  # the paper's comparison of methods; its other tables are variations of it
FORMATS = (".txt", ".md", ".tex", ".json")
_MISSING = "–"


def result_rows(results: Mapping[str, Mapping[str, Any]], *, ks: Sequence[int] = (1, 5, 10)) -> list[list[str]]:
    """A header, then one row per model: recall in percent, text to image then image to text.

    Args:
        results: what `summarize` returns, by the model's name, in the order of the rows.
        ks: the columns of each direction. Only the first shows its interval, where the results have one.
    """

    def cell(values: Mapping[str, Any], k: int) -> str:
        recall = f"{values[f'R@{k}']:.1f}"
        if k != ks[0] or f"R@{k}_interval" not in values:
            return recall
        low, high = values[f"R@{k}_interval"]
        return f"{recall} [{low:.1f}, {high:.1f}]"

    headers = ["model", *(f"{arrow} R@{k}" for arrow in ARROWS.values() for k in ks)]
    rows = ([name, *(cell(metrics[way], k) for way in ARROWS for k in ks)] for name, metrics in results.items())
    return [headers, *rows]


def format_results(results: Mapping[str, Mapping[str, Any]], *, ks: Sequence[int] = (1, 5, 10)) -> str:
    """`result_rows` for a terminal."""
    headers, *rows = result_rows(results, ks=ks)
    return text_table(headers, rows)


class _Column(NamedTuple):
    """R@k in one direction on one gallery, or on its held-out part; results by model."""

    gallery: str
    results: Mapping[str, EvaluationResult]
    direction: str
    k: int
    benchmark: str | None  # for rows of the paper, which evaluates on whole test splits


class _Table(NamedTuple):
    columns: list[_Column]
    rows: list[list[str]]
    marks: dict[tuple[int, int], Mark]
    notes: list[str]


@dataclass(frozen=True)
class EvaluationReport:
    """Results of one or more models on the same galleries of one or more data sets, as `evaluate_models` returns them.

    Tables have a row per model and a column for each direction and K of a data set, and of its held-out part. The best
    number of a column is marked only if the paired 95 % interval of its difference from every other model excludes
    zero; the second only if the best is marked and it is clearly above all further ones. Rows of the paper stand below
    a rule: they were not measured here, so they are neither marked nor compared.
    """

    results: Sequence[EvaluationResult]
    with_paper: bool = True
    _differences: dict[Any, dict[str, Estimate]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def comparisons(self) -> list[ResultComparison]:
        """Every model against the first."""
        return comparisons(self.results)

    @cached_property
    def galleries(self) -> dict[tuple[str, str], list[EvaluationResult]]:
        """Results by data and split, in order."""
        found: dict[tuple[str, str], list[EvaluationResult]] = {}
        for result in self.results:
            found.setdefault((result.data, result.split), []).append(result)
        return found

    def paper(self, *galleries: tuple[str, str]) -> list[PublishedResult]:
        """Rows of the paper for test splits of its benchmarks."""
        found = [row for data, split in galleries if split == "test" for row in published(data, table=MAIN_TABLE)]
        return found if self.with_paper else []

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; the paper's numbers under a name of their own."""
        return {
            "results": [result.to_dict() for result in self.results],
            "comparisons": [
                {
                    "data": found.result.data,
                    "split": found.result.split,
                    "held_out": found.held_out,
                    "model": found.result.model,
                    "against": found.against.model,
                    **found.comparison.to_dict(),
                }
                for found in self.comparisons
            ],
            "paper": [
                {"paper": paper_title(), "name": row.name, "benchmark": row.benchmark, "recall": row.recall}
                for row in self.paper(*self.galleries)
            ],
        }

    def to_text(self) -> str:
        """For a terminal: a section per data set, with intervals, and a table of R@1 if there are several."""
        sections = [self._section(*gallery) for gallery in self.galleries]
        if len(sections) > 1:
            marks = TEXT_MARKS["best"], TEXT_MARKS["second"]
            sections.append("all data sets\n" + self._plain_table(text_table, marks, (1,), *self.galleries))
        return "\n\n".join(sections)

    def to_markdown(self) -> str:
        """A table per data set, and one of R@1 if there are several. The best number is bold, the second italic."""
        parts, marks = [], ("Bold", "italic")
        for gallery in self.galleries:
            table = self._plain_table(markdown_table, marks, KS, gallery)
            compared = "\n".join(f"- {sentence}" for sentence in self._sentences(*gallery))
            parts += [f"## {' '.join(gallery)}", table, *([compared] if compared else [])]
        if len(self.galleries) > 1:
            parts += ["## All data sets", self._plain_table(markdown_table, marks, (1,), *self.galleries)]
        return "\n\n".join(parts) + "\n"

    def to_latex(self) -> str:
        """The same tables for booktabs, with the notes as captions. The best number is bold, the second underlined."""
        tables = [self._latex_table(KS, "-".join(gallery), gallery) for gallery in self.galleries]
        if len(tables) > 1:
            tables.append(self._latex_table((1,), "all", *self.galleries))
        return "\n\n".join(tables) + "\n"

    def write(self, path: Path) -> None:
        """Write a file in the format of its ending."""
        check_format(path)
        text = {
            ".txt": lambda: self.to_text() + "\n",
            ".md": self.to_markdown,
            ".tex": self.to_latex,
            ".json": lambda: json.dumps(self.to_dict(), indent=2) + "\n",
        }[path.suffix]()
        with replace_file(path) as partial:
            partial.write_text(text, encoding="utf-8")

    def _sentences(self, data: str, split: str) -> list[str]:
        return [
            f"{'held-out, ' * found.held_out}{found.comparison.sentence(found.result.model, found.against.model)}"
            for found in self.comparisons
            if (found.result.data, found.result.split) == (data, split)
        ]

    def _section(self, data: str, split: str) -> str:
        found = self.galleries[data, split]
        lines = [f"{data} {split}: {found[0].images:,} images, {found[0].captions:,} captions"]
        if found[0].unread:
            lines.append(f"warning: {found[0].unread:,} rows of the source are invalid; hnclip data check lists them")
        if found[0].skipped:
            lines.append(f"warning: {found[0].skipped:,} invalid records are skipped; hnclip data check lists them")
        for result in found:
            if result.truncated:
                lines.append(f"warning: {result.truncated:,} captions are truncated at the context of {result.model}")
            if result.caption_similarity is not None:
                pairwise, hardest = (result.caption_similarity[name] for name in ("pairwise", "hardest"))
                similar = f"{pairwise:.2f} on average, {hardest:.2f} to the hardest negative"
                lines.append(f"caption similarity to {result.model}: {similar}")
        lines.append(format_results({result.model: result.metrics for result in found}, ks=KS))
        if parts := {result.model: result.held_out for result in found if result.held_out is not None}:
            lines.append(f"among the {next(iter(parts.values())).images:,} held-out images alone")
            lines.append(format_results({model: part.metrics for model, part in parts.items()}, ks=KS))
        lines += self._sentences(data, split)
        if paper := self.paper((data, split)):
            lines += ["published in the paper, not measured here", _paper_table(paper)]
        return "\n".join(lines)

    def _plain_table(
        self, table: Callable[..., str], marks: tuple[str, str], ks: Sequence[int], *galleries: tuple[str, str]
    ) -> str:
        found = self._table(ks, marks, *galleries)
        several = len({column.gallery for column in found.columns}) > 1  # else the notes name it
        headers = [f"{column.gallery} {_measure(column)}" if several else _measure(column) for column in found.columns]
        drawn = table(["model", *headers], found.rows, marks=found.marks)
        return "\n\n".join([drawn, "\n".join(found.notes)])

    def _latex_table(self, ks: Sequence[int], name: str, *galleries: tuple[str, str]) -> str:
        found = self._table(ks, ("Bold", "underlined"), *galleries)
        over = [column.gallery for column in found.columns]
        label = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name).strip("-")
        return latex_table(
            ["model", *map(_measure, found.columns)],
            found.rows,
            marks=found.marks,
            spans=[(gallery, over.count(gallery)) for gallery in dict.fromkeys(over)],
            caption=" ".join(["Recall in percent.", *found.notes]),
            label=f"tab:{label}",
        )

    def _table(self, ks: Sequence[int], words: tuple[str, str], *galleries: tuple[str, str]) -> _Table:
        """Every model on these galleries; `words` are what notes call marked numbers."""
        columns = self._columns(ks, galleries)
        models = list(dict.fromkeys(result.model for gallery in galleries for result in self.galleries[gallery]))
        rows = [[model, *[_MISSING] * len(columns)] for model in models]
        marks: dict[tuple[int, int], Mark] = {}
        for number, column in enumerate(columns, start=1):
            heights = {model: part.metrics[column.direction][f"R@{column.k}"] for model, part in column.results.items()}
            for model, recall in heights.items():
                rows[models.index(model)][number] = f"{recall:.2f}"
            chosen = mark_best(heights, partial(self._is_above, column))
            marks |= {(models.index(model), number): mark for model, mark in chosen.items()}
        notes = [_gallery_note(self.galleries[gallery]) for gallery in galleries]
        if len(models) > 1:
            notes.append(
                f"{words[0]}: above every other model, with zero outside the paired 95 % interval of each difference; "
                f"{words[1]}: likewise above all but the best. A lead without a mark may be chance."
            )
        paper = self.paper(*galleries)
        if printed := [row for row in _paper_rows(columns, paper) if set(row[1:]) != {_MISSING}]:
            rows += [[], *printed]
            notes.append(f"Rows named “paper” are printed in “{paper_title()}”; they were not measured here.")
        return _Table(columns, rows, marks, notes)

    def _columns(self, ks: Sequence[int], galleries: Sequence[tuple[str, str]]) -> list[_Column]:
        columns = []
        for data, split in galleries:
            found = self.galleries[data, split]
            name = data if split == "test" else f"{data} {split}"
            whole = {result.model: result for result in found}
            parts = {result.model: result.held_out for result in found if result.held_out is not None}
            for title, results, benchmark in ((name, whole, data), (f"{name} held-out", parts, None)):
                columns += [
                    _Column(title, results, direction, k, benchmark if split == "test" else None)
                    for direction in (ARROWS if results else ())
                    for k in ks
                ]
        return columns

    def _is_above(self, column: _Column, model: str, other: str) -> bool:
        """Whether the paired interval lies above zero; a bootstrap is computed once for both directions."""
        ours, theirs = column.results[model], column.results[other]
        if ours.groups.unique().numel() < 2:
            return False  # no spread to measure
        key = (id(ours), id(theirs), column.k)
        if key not in self._differences:
            self._differences[key] = paired_difference([ours.ranks], [theirs.ranks], column.k, groups=ours.groups)
        return self._differences[key][column.direction].low > 0


def check_format(path: Path) -> None:
    """Raise ValueError if results are not written in the format of the file's ending."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: results are written as {', '.join(FORMATS)}, by the ending of the file's name")


def _measure(column: _Column) -> str:
    return f"{ARROWS[column.direction]} R@{column.k}"


def _paper_rows(columns: Sequence[_Column], paper: Sequence[PublishedResult]) -> list[list[str]]:
    """A row per name, with the numbers that it has for these columns."""
    return [
        [name, *(_paper_cell(column, [row for row in paper if row.name == name]) for column in columns)]
        for name in dict.fromkeys(row.name for row in paper)
    ]


def _paper_cell(column: _Column, rows: Sequence[PublishedResult]) -> str:
    for row in rows:
        recall = row.recall[column.direction].get(column.k)
        if column.benchmark is not None and same_benchmark(row.benchmark, column.benchmark) and recall is not None:
            return f"{recall:.2f}"
    return _MISSING


def _paper_table(paper: Sequence[PublishedResult]) -> str:
    """The paper's rows for a terminal, at the K that they have."""
    ks = [k for k in KS if any(k in values for row in paper for values in row.recall.values())]
    headers = ["", *(f"{arrow} R@{k}" for arrow in ARROWS.values() for k in ks)]
    rows = [
        [row.name, *(f"{row.recall[way][k]:.1f}" if k in row.recall[way] else _MISSING for way in ARROWS for k in ks)]
        for row in paper
    ]
    return text_table(headers, rows)


def _gallery_note(results: Sequence[EvaluationResult]) -> str:
    first = results[0]
    sentences = [f"{first.data} {first.split}: {first.images:,} images, {first.captions:,} captions."]
    if first.skipped:
        sentences.append(f"{first.skipped:,} invalid records are skipped.")
    if cut := [f"{result.truncated:,} for {result.model}" for result in results if result.truncated]:
        sentences.append(f"Captions truncated at the model's context: {', '.join(cut)}.")
    if parts := [result.held_out for result in results if result.held_out is not None]:
        sentences.append(f"Held-out: queries and candidates are the {parts[0].images:,} images kept from training.")
    return " ".join(sentences)
