"""Results of evaluations and comparisons as reports: recalls with intervals and marks, and the paper's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from hnclip.evaluation.bootstrap import Estimate, mark_best, paired_difference
from hnclip.evaluation.compare import Comparison
from hnclip.evaluation.published import PublishedResult, paper_title, published
from hnclip.evaluation.ranks import ARROWS
from hnclip.evaluation.retrieval import EvaluationResult, ResultComparison, comparisons
from hnclip.report.document import Block, Report, Section, Table, Text
from hnclip.util.tables import MISSING, Mark, Marked
from hnclip.util.text import counted

KS = (1, 5, 10, 25, 50)
MAIN_TABLE = "1"  # the paper's comparison of methods; its other tables are variations of it
PAPER_NOTE = f"Rows named “paper” are printed in “{paper_title()}”; they were not measured here."

_MARKED = (
    "The best number ({best}) is above that of every other model, with zero outside the paired 95 % interval of each "
    "difference; the second ({second}) likewise above all but the best. A lead without a mark may be chance."
)


class _Part(NamedTuple):
    """Results by model on a gallery or on its held-out part, the paper's rows, and marks by direction and K."""

    name: str
    is_held_out: bool
    results: Mapping[str, EvaluationResult]
    paper: Sequence[PublishedResult]
    marks: Mapping[tuple[str, int], Mapping[str, Mark]]


def recall_table(metrics: Mapping[str, Mapping[str, Any]], ks: Sequence[int] = (1, 5, 10)) -> Table:
    """A row for each model: recall in percent, the first K with its interval if the metrics have one.

    Args:
        metrics: what `summarize` returns, by model.
    """
    headers = ["model", *(f"{arrow} R@{k}" for arrow in ARROWS.values() for k in ks)]
    rows = [[name, *(_cell(one, way, k, k == ks[0]) for way in ARROWS for k in ks)] for name, one in metrics.items()]
    return Table(headers, rows)


def evaluation_report(results: Sequence[EvaluationResult], *, with_paper: bool = True) -> Report:
    """A section for each data set, and a table of R@1 if there are several.

    Args:
        results: as `evaluate_models` returns them: models on the same galleries of one or more data sets.
        with_paper: show the paper's numbers on its benchmarks, below a rule, neither marked nor compared.
    """
    galleries: dict[tuple[str, str], list[EvaluationResult]] = {}
    for result in results:
        galleries.setdefault((result.data, result.split), []).append(result)
    compared = comparisons(results)
    sections, every = [], []
    for (data, split), found in galleries.items():
        paper = published(data, table=MAIN_TABLE) if with_paper and split == "test" else []
        parts = _parts(data if split == "test" else f"{data} {split}", found, paper)
        sentences = [
            f"{'held-out, ' * one.held_out}{one.comparison.sentence(one.result.model, one.against.model)}"
            for one in compared
            if (one.result.data, one.result.split) == (data, split)
        ]
        blocks: list[Block] = [_table([part], KS, f"{data} {split}: {_gallery_note(part)}") for part in parts]
        blocks += [Text(*lines) for lines in (sentences, _remarks(found)) if lines]
        sections.append(Section(f"{data} {split}", blocks))
        every += parts
    if len(galleries) > 1:
        sections.append(Section("All data sets", [_table(every, (1,), "")]))
    paper = [row for part in every for row in part.paper]
    return Report("Retrieval", [], sections, _data(results, compared, paper))


def comparison_report(found: Sequence[Comparison], a: str, b: str) -> Report:
    """Two models on the same queries, with the numbers of queries that each of them answers."""
    headers = ["", "a", "b", "a minus b", "p", "both", "only a", "only b", "neither"]
    rows = [
        [
            f"{ARROWS[one.direction]} R@{one.k}",
            f"{one.recall_a:.2f}",
            f"{one.recall_b:.2f}",
            f"{one.difference.mean:+.2f} {_interval(one.difference.low, one.difference.high, '+')}",
            f"{one.difference.p_value:.3g}",
            *(f"{count:,}" for count in (one.both, one.only_a, one.only_b, one.neither)),
        ]
        for one in found
    ]
    note = "Recall in percent, its difference with the paired 95 % interval, and how many queries each answers."
    blocks: list[Block] = [Table(headers, rows, notes=[note]), Text(*(one.sentence("a", "b") for one in found))]
    data = {"comparisons": [one.to_dict() for one in found]}
    return Report("Comparison of two models", [f"a: {a}", f"b: {b}"], [Section("", blocks)], data)


def _parts(name: str, found: Sequence[EvaluationResult], paper: Sequence[PublishedResult]) -> list[_Part]:
    """The gallery, and its held-out part if it has one."""
    whole = {result.model: result for result in found}
    held_out = {result.model: result.held_out for result in found if result.held_out is not None}
    parts = [_Part(name, False, whole, paper, _marks(whole))]
    return [*parts, _Part(f"{name} held-out", True, held_out, [], _marks(held_out))] if held_out else parts


def _marks(results: Mapping[str, EvaluationResult]) -> dict[tuple[str, int], dict[str, Mark]]:
    @cache  # a bootstrap is of both directions
    def difference(model: str, other: str, k: int) -> dict[str, Estimate]:
        ours, theirs = results[model], results[other]
        return paired_difference([ours.ranks], [theirs.ranks], k, groups=ours.groups)

    def is_above(direction: str, k: int, model: str, other: str) -> bool:
        several = results[model].groups.unique().numel() > 1  # one group has no spread to measure
        return several and difference(model, other, k)[direction].low > 0

    def recalls(direction: str, k: int) -> dict[str, float]:
        return {model: result.metrics[direction][f"R@{k}"] for model, result in results.items()}

    return {(way, k): mark_best(recalls(way, k), partial(is_above, way, k)) for way in ARROWS for k in KS}


def _table(parts: Sequence[_Part], ks: Sequence[int], note: str) -> Table:
    """A row for each model, and below a rule the paper's rows that have a number for these columns."""
    columns = [(part, direction, k) for part in parts for direction in ARROWS for k in ks]
    models = list(dict.fromkeys(model for part in parts for model in part.results))
    rows: list[list[str]] = []
    notes = [note] if note else []
    for model in models:
        cells = [model]
        for part, direction, k in columns:
            result = part.results.get(model)
            text = _cell(result.metrics if result else None, direction, k, k == ks[0] and len(parts) == 1)
            cells.append(Marked(text, part.marks[direction, k].get(model)))
        rows.append(cells)
    if len(models) > 1:
        notes.append(_MARKED)
    names = dict.fromkeys(row.name for part in parts for row in part.paper)
    printed = [[name, *(_paper_cell(name, *column) for column in columns)] for name in names]
    if printed := [row for row in printed if set(row[1:]) != {MISSING}]:
        rows += [[], *printed]
        notes.append(PAPER_NOTE)
    headers = ["model", *(f"{ARROWS[direction]} R@{k}" for _, direction, k in columns)]
    spans = [(part.name, len(ARROWS) * len(ks)) for part in parts]
    title = "Recall in percent" if len(parts) == 1 else "R@1 in percent"
    if len(parts) == 1 and parts[0].is_held_out:
        title += ", held-out images"
    return Table(headers, rows, title, spans, notes)


def _cell(metrics: Mapping[str, Any] | None, direction: str, k: int, with_interval: bool) -> str:
    if metrics is None:
        return MISSING
    recall, interval = f"{metrics[direction][f'R@{k}']:.2f}", metrics[direction].get(f"R@{k}_interval")
    return f"{recall} {_interval(*interval)}" if with_interval and interval else recall


def _interval(low: float, high: float, sign: str = "") -> str:
    return f"[{low:{sign}.1f}, {high:{sign}.1f}]"


def _paper_cell(name: str, part: _Part, direction: str, k: int) -> str:
    return next((row.cell(direction, k) for row in part.paper if row.name == name), MISSING)


def _gallery_note(part: _Part) -> str:
    first = next(iter(part.results.values()))
    intervals = "; 95 % intervals over queries" if "R@1_interval" in first.metrics["text_to_image"] else ""
    sentences = [f"{counted(first.images, 'image')}, {counted(first.captions, 'caption')}{intervals}."]
    if part.is_held_out:
        sentences.append("Queries and candidates are the images kept from training.")
    if first.skipped:
        sentences.append(f"{first.skipped:,} invalid records are skipped.")
    if cut := [f"{one.truncated:,} for {one.model}" for one in part.results.values() if one.truncated]:
        sentences.append(f"Captions truncated at the model's context: {', '.join(cut)}.")
    return " ".join(sentences)


def _remarks(found: Sequence[EvaluationResult]) -> list[str]:
    remarks = [
        f"Caption similarity to {result.model}: {result.caption_similarity['pairwise']:.2f} on average, "
        f"{result.caption_similarity['hardest']:.2f} to the hardest negative."
        for result in found
        if result.caption_similarity is not None
    ]
    if found[0].unread:
        remarks.append(f"{found[0].unread:,} rows of the source are invalid; hnclip data check lists them.")
    return remarks


def _data(
    results: Sequence[EvaluationResult], compared: Sequence[ResultComparison], paper: Sequence[PublishedResult]
) -> dict[str, Any]:
    """Everything, ready for JSON; the paper's numbers under a name of their own."""
    return {
        "results": [result.to_dict() for result in results],
        "comparisons": [
            {
                "data": one.result.data,
                "split": one.result.split,
                "held_out": one.held_out,
                "model": one.result.model,
                "against": one.against.model,
                **one.comparison.to_dict(),
            }
            for one in compared
        ],
        "paper": [
            {"paper": paper_title(), "name": row.name, "benchmark": row.benchmark, "recall": row.recall}
            for row in paper
        ],
    }
