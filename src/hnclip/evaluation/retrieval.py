"""The evaluation protocol, the same for every model and data set: encode, rank, summarize.

Images through the model's own geometry (for CLIP the shortest side to 224 and a centre crop), captions truncated at the
model's context, cosines in fp32, both directions among all images and captions of the split, ties against the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hnclip.config import ReadConfig
from hnclip.core import Record
from hnclip.data.batching import PairData, prepare
from hnclip.data.benchmarks import held_out as held_out_ids
from hnclip.data.image_cache import cache_directory
from hnclip.data.records import DataSet
from hnclip.data.sources import open_data
from hnclip.data.validate import check_rows, check_share, drop_invalid
from hnclip.encode.loop import encode_captions, encode_pixels
from hnclip.evaluation.compare import Comparison, compare_ranks, write_queries
from hnclip.evaluation.metrics import summarize
from hnclip.evaluation.ranks import Ranks, retrieval_ranks
from hnclip.util.console import Iterate
from hnclip.util.files import replace_file
from hnclip.util.text import slugify

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

INDEX = "index.json"  # next to query files: which model and data set each is of


@dataclass(frozen=True)
class EvaluationResult:
    """One model on one split of one data set.

    Args:
        ranks: of every query.
        groups: the group of near-duplicates of every image, as a number.
        ids: the record of every image; two results can be compared query by query if they agree.
        metrics: what `summarize` returns.
        truncated: captions truncated at the model's context.
        skipped: invalid records that were skipped.
        unread: rows of the source, of any split, that could not be read.
        held_out: the same with only the held-out records as queries and candidates, where the gallery holds training
            pairs too.
        caption_similarity: mean cosine of all pairs of captions, and with each one's hardest negative.
        image, text: the vectors, on the model's device; None after `evaluate_models` and in results read from files.

    Shape:
        groups [I], image [I, D], text [T, D]
    """

    ranks: Ranks = field(repr=False, compare=False)
    groups: Tensor = field(repr=False, compare=False)
    ids: tuple[str, ...] = field(repr=False)
    metrics: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    data: str = ""
    split: str = ""
    truncated: int = 0
    skipped: int = 0
    unread: int = 0
    held_out: EvaluationResult | None = None
    caption_similarity: Mapping[str, float] | None = None
    image: Tensor | None = field(default=None, repr=False, compare=False)
    text: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def images(self) -> int:
        return len(self.ids)

    @property
    def captions(self) -> int:
        return len(self.ranks.owner)

    def to_dict(self) -> dict[str, Any]:
        """Names, counts and metrics, ready for JSON."""
        values: dict[str, Any] = {
            "model": self.model,
            "data": self.data,
            "split": self.split,
            "images": self.images,
            "captions": self.captions,
            "truncated_captions": self.truncated,
            "skipped_records": self.skipped,
            "unread_rows": self.unread,
            **self.metrics,
        }
        if self.held_out is not None:
            values["held_out"] = dict(self.held_out.metrics)
        if self.caption_similarity is not None:
            values["caption_similarity"] = dict(self.caption_similarity)
        return values


def prepare_gallery(
    records: Sequence[Record], model: DualEncoder, *, cache: Path | None = None, progress: Iterate = iter
) -> PairData:
    """Decode and tokenise what an evaluation needs. Every caption of a record counts.

    Args:
        cache: directory of the image cache; without one the images are held in memory.
    """
    return prepare(records, model.text_transform, model.image_transform, cache=cache, progress=progress)


def evaluate(
    model: DualEncoder,
    gallery: PairData,
    *,
    intervals: bool = False,
    held_out: Set[str] | None = None,
    batch: int = 128,
    progress: Iterate = iter,
) -> EvaluationResult:
    """Retrieval in both directions.

    Args:
        intervals: also bootstrap every recall; groups of near-duplicates, where the records name them, are resampled
            together.
        held_out: ids of records that are also evaluated among themselves; those that are not in the gallery are
            ignored.
    """
    image = encode_pixels(model, gallery.images["full"], batch=batch, progress=progress)  # [I, D]
    text = encode_captions(model, gallery.texts["caption"], batch=batch, progress=progress)  # [T, D]
    return rank_gallery(image, text, gallery, intervals=intervals, held_out=held_out)


def rank_gallery(
    image: Tensor, text: Tensor, gallery: PairData, *, intervals: bool = False, held_out: Set[str] | None = None
) -> EvaluationResult:
    """`evaluate` for vectors [I, D] and [T, D] that are encoded already."""
    result = _ranked(image, text, gallery.owner, gallery.records, intervals)
    part = None
    kept = torch.tensor([record.id in (held_out or ()) for record in gallery.records])  # [I]
    if bool(kept.any()):
        captions = kept[gallery.owner]  # [T]
        part = _ranked(
            image[kept.to(image.device)],
            text[captions.to(text.device)],
            (kept.cumsum(0) - 1)[gallery.owner[captions]],
            [record for record, keep in zip(gallery.records, kept) if keep],
            intervals,
        )
    return replace(result, truncated=gallery.texts["caption"].truncated, held_out=part)


def _ranked(image: Tensor, text: Tensor, owner: Tensor, records: Sequence[Record], intervals: bool) -> EvaluationResult:
    ranks, groups = retrieval_ranks(image, text, owner), group_numbers(records)
    metrics = summarize(ranks, intervals=intervals, groups=groups)
    return EvaluationResult(ranks, groups, tuple(record.id for record in records), metrics, image=image, text=text)


def group_numbers(records: Sequence[Record]) -> Tensor:
    """[I]: one number per group of near-duplicates; a record without a group is one of its own."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(record.group or f"\0{record.id}", len(numbers)) for record in records])


@dataclass(frozen=True)
class Task:
    """A split of a data set to evaluate on, without the `skipped` records that were found invalid."""

    data: DataSet
    split: str
    records: tuple[Record, ...]
    skipped: int = 0


def open_task(source: str | DataSet, split: str | None, read: ReadConfig) -> Task:
    """The given split; by default the test split, or all records if the source declares no splits."""
    data = source if isinstance(source, DataSet) else open_data(source, read, splits={split or "test"})
    check_rows(data, largest=read.max_bad)
    chosen = split or ("test" if data.splits() else "all")
    return Task(data, chosen, data.part(chosen, validation_share=read.validation_share))


def drop_unusable(task: Task, model: DualEncoder, read: ReadConfig, *, progress: Iterate = iter) -> Task:
    """The task without the records that are invalid for this model, at most `read.max_bad` of them; none may be skipped
    where the counts are part of a published protocol."""
    cache = cache_directory(read.cache)
    valid = drop_invalid(task.records, model.text_transform, model.image_transform, cache=cache, progress=progress)
    if not valid.problems:
        return task
    skipped = task.skipped + len(task.records) - len(valid.records)
    largest, total = 0.0 if task.data.exact else read.max_bad, len(task.records) + task.skipped
    check_share(skipped, total, valid.problems, what="records", largest=largest, name=task.data.name)
    return replace(task, records=valid.records, skipped=skipped)


def evaluate_task(
    name: str,
    model: DualEncoder,
    task: Task,
    read: ReadConfig,
    *,
    intervals: bool = True,
    held_out: Set[str] | None = None,
    batch: int = 128,
    queries: Path | None = None,
    top: int = 10,
    progress: Iterate = iter,
) -> EvaluationResult:
    """One model on one task.

    Args:
        name: what tables call the model.
        task: its records must be valid for the model (`drop_unusable`).
        held_out: as of `evaluate`; the records that the benchmark holds out if not given.
        queries: also write every query with its rank and its `top` candidates to this file.
    """
    gallery = prepare_gallery(task.records, model, cache=cache_directory(read.cache))
    if held_out is None:
        held_out = held_out_ids(task.data.name, task.data)
    result = evaluate(model, gallery, intervals=intervals, held_out=held_out, batch=batch, progress=progress)
    if queries is not None:
        write_queries(queries, gallery, result, top)
    return replace(
        result,
        model=name,
        data=task.data.name,
        split=task.split,
        skipped=task.skipped,
        unread=len(task.data.problems),
    )


def evaluate_models(
    models: Sequence[tuple[str, Callable[[], DualEncoder]]],
    tasks: Sequence[Task],
    read: ReadConfig,
    *,
    batch: int = 128,
    queries: Path | None = None,
    top: int = 10,
    caption_similarity: Callable[[Tensor, Tensor], Mapping[str, float]] | None = None,
    progress: Iterate = iter,
) -> list[EvaluationResult]:
    """Every model on every task, all of them on the records that all of them can use.

    One model is in memory at a time, and each is opened once, unless a later one finds records invalid that an earlier
    one was evaluated on: the earlier one is then evaluated again without them.

    Args:
        models: names, and what opens each.
        queries: directory for a query file per model and task, and `index.json`, which says what is in them.
        caption_similarity: computed of the caption vectors and their owners where there are two or more images.
    """
    for what, names in (("model", [name for name, _ in models]), ("data set", [_title(task) for task in tasks])):
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"the {what} {repeated[0]} is named twice")
    tasks = list(tasks)
    used: dict[tuple[int, int], Task] = {}
    results: dict[tuple[int, int], EvaluationResult] = {}
    contents = {}
    for row, (name, load) in [*enumerate(models, start=1)] * 2:
        missing = [column for column, task in enumerate(tasks, start=1) if used.get((row, column)) is not task]
        if not missing:
            continue
        model = load()
        model.require_trained("evaluation")
        for column in missing:
            task = tasks[column - 1] = drop_unusable(tasks[column - 1], model, read, progress=progress)
            file = f"{row}-{column}-{slugify(task.data.name, task.split)}.jsonl"
            contents[file] = {"model": name, "data": task.data.name, "split": task.split}
            path = None if queries is None else queries / file
            result = evaluate_task(name, model, task, read, batch=batch, queries=path, top=top, progress=progress)
            if caption_similarity is not None and result.images > 1:
                assert result.text is not None
                result = replace(result, caption_similarity=caption_similarity(result.text, result.ranks.owner))
            used[row, column], results[row, column] = task, replace(result, image=None, text=None)
        del model  # before the next one is opened
    if queries is not None:
        with replace_file(queries / INDEX) as partial:
            partial.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    return [results[place] for place in sorted(results)]


def _title(task: Task) -> str:
    return f"{task.data.name} {task.split}"


class ResultComparison(NamedTuple):
    """A model compared with the first one on a data set, or on its held-out part."""

    result: EvaluationResult
    against: EvaluationResult
    held_out: bool
    comparison: Comparison


def comparisons(results: Sequence[EvaluationResult], *, ks: Sequence[int] = (1,)) -> list[ResultComparison]:
    """Every model against the first on each data set, and on its held-out part where it has one; not where all images
    are near-duplicates of each other, which leaves no spread to measure."""
    first: dict[tuple[str, str], EvaluationResult] = {}
    found: list[ResultComparison] = []
    for result in results:
        base = first.setdefault((result.data, result.split), result)
        if base is result:
            continue
        if base.ids != result.ids:
            raise ValueError(f"{base.model} and {result.model} were evaluated on different records of {result.data}")
        for is_part, ours, theirs in ((False, result, base), (True, result.held_out, base.held_out)):
            if ours is not None and theirs is not None and theirs.groups.unique().numel() > 1:
                compared = compare_ranks(ours.ranks, theirs.ranks, groups=theirs.groups, ks=ks)
                found += [ResultComparison(result, base, is_part, comparison) for comparison in compared]
    return found
