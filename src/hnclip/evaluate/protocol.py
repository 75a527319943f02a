"""The evaluation protocol: every model on every data set, in one loop that is the same for all of them.

Pictures through the model's own geometry (for CLIP the shortest side to 224 and a centre crop), captions cut at the
model's context, unit vectors, cosines in fp32, both directions among all pictures and captions of the split, ties
against the model (evaluate/ranks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hnclip.analysis.geometry import caption_geometry
from hnclip.config import ReadConfig
from hnclip.data.benchmarks import held_out
from hnclip.data.cache import Progress, cache_directory
from hnclip.data.records import DataSet, Record
from hnclip.data.sound import check_share, sound_records
from hnclip.data.sources import open_data
from hnclip.evaluate.compare import Comparison, compare_ranks
from hnclip.evaluate.matrix import Results
from hnclip.evaluate.queries import write_queries
from hnclip.evaluate.result import Result, result_of
from hnclip.evaluate.retrieval import evaluate, prepare_gallery

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder


@dataclass(frozen=True)
class Task:
    """A split of a data set to evaluate on."""

    data: DataSet
    split: str
    records: tuple[Record, ...]


def open_task(source: str, split: str | None, read: ReadConfig) -> Task:
    """The split asked for; by default the test split, or everything where the source declares no splits."""
    data = open_data(source, read, splits={split or "test"})
    chosen = split or ("test" if data.splits() else "all")
    return Task(data, chosen, data.part(chosen, validation_share=read.validation_share))


def evaluate_task(
    name: str,
    model: DualEncoder,
    task: Task,
    read: ReadConfig,
    *,
    batch: int = 128,
    queries: Path | None = None,
    top: int = 10,
    progress: Progress = iter,
) -> Result:
    """One model on one task.

    Records that cannot be used are left out and counted, as many as `read.max_bad` allows; none where the counts are
    part of a published protocol.

    Args:
        name: what tables call the model.
        queries: also write every query with its rank and its `top` candidates to this file.
    """
    cache = cache_directory(read.cache)
    sound = sound_records(task.records, model.text_transform, model.image_transform, cache=cache, progress=progress)
    largest = 0.0 if task.data.exact else read.max_bad
    check_share(sound.problems, len(task.records), largest=largest, name=task.data.name)
    gallery = prepare_gallery(sound.records, model, cache=cache)
    found = evaluate(model, gallery, intervals=True, batch=batch, progress=progress)
    if queries is not None:
        write_queries(queries, gallery, found, top)
    return result_of(
        name,
        task.data.name,
        task.split,
        gallery,
        found,
        skipped=len(task.records) - len(sound.records),
        held_out=held_out(task.data.name, task.data),
        caption_similarity=caption_geometry(found.text, gallery.owner)._asdict(),
    )


def evaluate_models(
    models: Sequence[tuple[str, Callable[[], DualEncoder]]],
    tasks: Sequence[Task],
    read: ReadConfig,
    *,
    batch: int = 128,
    queries: Path | None = None,
    top: int = 10,
    progress: Progress = iter,
) -> Results:
    """Every model on every task; one model is in memory at a time.

    Args:
        models: names, and what opens each.
        queries: directory for a file of queries per model and task.
    """
    _check_different("model", [name for name, _ in models])
    _check_different("data set", [f"{task.data.name} {task.split}" for task in tasks])
    results = []
    for number, (name, load) in enumerate(models):
        model = load()
        for task in tasks:
            file = None if queries is None else queries / query_file(number, task)
            results.append(
                evaluate_task(name, model, task, read, batch=batch, queries=file, top=top, progress=progress)
            )
    return Results(tuple(results))


def _check_different(what: str, names: Sequence[str]) -> None:
    """Before hours of work: a table with two rows or columns of one name cannot be read."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the {what} {name} is named twice")


def query_file(model: int, task: Task) -> str:
    """The name of a file of queries, by the model's place in the list: names of models are paths."""
    data = "".join(letter if letter.isalnum() else "-" for letter in f"{task.data.name}-{task.split}")
    return f"{model + 1}-{data.strip('-')}.jsonl"


def comparisons(results: Results, *, ks: Sequence[int] = (1,)) -> dict[tuple[str, str, str], list[Comparison]]:
    """Every model against the first, by (data, split, model), on the queries that both answered."""
    first: dict[tuple[str, str], Result] = {}
    found = {}
    for result in results.results:
        base = first.setdefault((result.data, result.split), result)
        if base is not result and base.queries is not None and result.queries is not None:
            found[result.data, result.split, result.model] = compare_ranks(
                result.queries.ranks, base.queries.ranks, groups=base.queries.groups, ks=ks
            )
    return found
