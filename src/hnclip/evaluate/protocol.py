"""The evaluation protocol: every model on every data set, in one loop that is the same for all of them.

Pictures through the model's own geometry (for CLIP the shortest side to 224 and a centre crop), captions cut at the
model's context, unit vectors, cosines in fp32, both directions among all pictures and captions of the split, ties
against the model (evaluate/ranks.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hnclip.config import ReadConfig
from hnclip.core import Record
from hnclip.data.benchmarks import held_out
from hnclip.data.image_cache import cache_directory
from hnclip.data.records import DataSet
from hnclip.data.sources import open_data
from hnclip.data.validate import check_rows, check_share, drop_invalid
from hnclip.evaluate.companions import caption_similarity
from hnclip.evaluate.compare import Comparison, compare_ranks
from hnclip.evaluate.matrix import Results
from hnclip.evaluate.queries import write_queries
from hnclip.evaluate.result import Result, result_of
from hnclip.evaluate.retrieval import evaluate, prepare_gallery
from hnclip.util.console import Iterate
from hnclip.util.files import replace_file

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

INDEX = "index.json"


@dataclass(frozen=True)
class Task:
    """A split of a data set to evaluate on; `skipped` of its records were found unusable and are left out."""

    data: DataSet
    split: str
    records: tuple[Record, ...]
    skipped: int = 0


def open_task(source: str, split: str | None, read: ReadConfig) -> Task:
    """The split asked for; by default the test split, or everything where the source declares no splits."""
    data = open_data(source, read, splits={split or "test"})
    check_rows(data, largest=read.max_bad)
    chosen = split or ("test" if data.splits() else "all")
    return Task(data, chosen, data.part(chosen, validation_share=read.validation_share))


def usable(task: Task, model: DualEncoder, read: ReadConfig, *, progress: Iterate = iter) -> Task:
    """The task without the records that this model cannot use, as many as `read.max_bad` allows; none may be left out
    where the counts are part of a published protocol."""
    sound = drop_invalid(
        task.records,
        model.text_transform,
        model.image_transform,
        cache=cache_directory(read.cache),
        progress=progress,
    )
    lost = len(task.records) - len(sound.records)
    largest = 0.0 if task.data.exact else read.max_bad
    total = len(task.records) + task.skipped
    check_share(lost + task.skipped, total, sound.problems, what="records", largest=largest, name=task.data.name)
    return replace(task, records=sound.records, skipped=task.skipped + lost)


def evaluate_task(
    name: str,
    model: DualEncoder,
    task: Task,
    read: ReadConfig,
    *,
    batch: int = 128,
    queries: Path | None = None,
    top: int = 10,
    apart: Set[str] | None = None,
    progress: Iterate = iter,
) -> Result:
    """One model on one task.

    Args:
        name: what tables call the model.
        queries: also write every query with its rank and its `top` candidates to this file.
        apart: ids of records that are also evaluated among themselves; those that the benchmark holds out when left
            out.
    """
    task = usable(task, model, read, progress=progress)
    gallery = prepare_gallery(task.records, model, cache=cache_directory(read.cache))
    found = evaluate(model, gallery, intervals=True, batch=batch, progress=progress)
    if queries is not None:
        write_queries(queries, gallery, found, top)
    alike = caption_similarity(found.text, gallery.owner)._asdict() if len(task.records) > 1 else None
    return result_of(
        name,
        task.data.name,
        task.split,
        gallery,
        found,
        skipped=task.skipped,
        unread=len(task.data.problems),
        held_out=held_out(task.data.name, task.data) if apart is None else apart,
        caption_similarity=alike,
    )


def evaluate_models(
    models: Sequence[tuple[str, Callable[[], DualEncoder]]],
    tasks: Sequence[Task],
    read: ReadConfig,
    *,
    batch: int = 128,
    queries: Path | None = None,
    top: int = 10,
    progress: Iterate = iter,
) -> Results:
    """Every model on every task, all of them on the records that all of them can use; one model is in memory at a time.

    Args:
        models: names, and what opens each.
        queries: directory for a file of queries per model and task, and `index.json`, which says what is in them.
    """
    _check_different("model", [name for name, _ in models])
    _check_different("data set", [f"{task.data.name} {task.split}" for task in tasks])
    if len(models) > 1:
        for _, load in models:
            model = load()
            model.require_trained("evaluation")
            tasks = [usable(task, model, read, progress=progress) for task in tasks]
            del model  # before the next one is opened
    results = []
    contents = {}
    for row, (name, load) in enumerate(models, start=1):
        model = load()
        model.require_trained("evaluation")
        for column, task in enumerate(tasks, start=1):
            file = f"{row}-{column}-{_file_name(task)}.jsonl"
            contents[file] = {"model": name, "data": task.data.name, "split": task.split}
            path = None if queries is None else queries / file
            results.append(
                evaluate_task(name, model, task, read, batch=batch, queries=path, top=top, progress=progress)
            )
        del model
    if queries is not None:
        with replace_file(queries / INDEX) as partial:
            partial.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    return Results(tuple(results))


class Compared(NamedTuple):
    """A model against the first one on a split of a data set, or on its held-out part."""

    data: str
    split: str
    held_out: bool
    model: str
    against: str
    comparison: Comparison


def comparisons(results: Results, *, ks: Sequence[int] = (1,)) -> list[Compared]:
    """Every model against the first on each data set, and on its held-out part where it has one. A single family of
    near-duplicates says nothing about others, so there is no comparison on it."""
    first: dict[tuple[str, str], Result] = {}
    found: list[Compared] = []
    for result in results.results:
        base = first.setdefault((result.data, result.split), result)
        if base is result:
            continue
        for apart, ours, theirs in (
            (False, result.queries, base.queries),
            (True, result.held_out_queries, base.held_out_queries),
        ):
            if ours is not None and theirs is not None and theirs.groups.unique().numel() > 1:
                found += [
                    Compared(result.data, result.split, apart, result.model, base.model, comparison)
                    for comparison in compare_ranks(ours.ranks, theirs.ranks, groups=theirs.groups, ks=ks)
                ]
    return found


def _check_different(what: str, names: Sequence[str]) -> None:
    """Before hours of work: a table with two rows or columns of one name cannot be read."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the {what} {name} is named twice")


def _file_name(task: Task) -> str:
    """Sources may be paths."""
    return "".join(letter if letter.isalnum() else "-" for letter in f"{task.data.name}-{task.split}").strip("-")
