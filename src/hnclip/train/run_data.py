"""The data of a run: opened, checked, prepared; and what was left out of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hnclip.config import OptimConfig, TrainConfig
from hnclip.core import Problem, Record
from hnclip.data.batching import PairData, prepare
from hnclip.data.image_cache import cache_directory
from hnclip.data.records import DataSet, fraction_of
from hnclip.data.sampler import cluster_order, cut_batches, epoch_order, nearest_captions, share
from hnclip.data.sources import open_data
from hnclip.data.validate import check_rows, check_share, drop_invalid
from hnclip.evaluate.retrieval import Gallery, prepare_gallery
from hnclip.models.dual_encoder import DualEncoder
from hnclip.objectives.base import Objective
from hnclip.train.distributed import agreement, rank, tell_everybody, world_size
from hnclip.train.evaluation import encode_captions_together
from hnclip.train.grad_cache import Share, chunk_slices
from hnclip.train.run_views import log_absent_views, with_views
from hnclip.util.console import progress

log = logging.getLogger(__name__)

FEW_STEPS, FEW_IMAGES = 10, 50  # below these, differences between runs are mostly noise
REACH = 4  # neighbours to choose from, in cluster sizes: some of the nearest are taken already


@dataclass(frozen=True)
class RunData:
    """What a run trains and validates on, what it watches, the problems of the records that it leaves out, and whether
    there is a test split beside.

    Shape:
        neighbours: [N, K], rows of the nearest captions, if batches are made of clusters
    """

    pairs: PairData
    validation: Gallery
    problems: tuple[Problem, ...] = ()
    test_split: bool = False
    neighbours: Tensor | None = None
    watched: Gallery | None = None

    def fingerprint(self) -> str:
        """The same for the same pairs and validation records in the same order, whatever became of the files."""
        content = sha256()
        for record in (*self.pairs.records, *self.validation.records):
            content.update(repr((record.id, record.captions)).encode("utf-8", "surrogatepass"))
        if len(self.pairs.images) + len(self.pairs.texts) > 2:  # views beside picture and caption
            for record in self.pairs.records:
                regions = [(region.box, region.sentence) for region in record.regions]
                views = (record.short, regions, record.filtered)
                content.update(repr(views).encode("utf-8", "surrogatepass"))
        return (
            f"{len(self.pairs)} pairs, {len(self.validation.records)} validation pictures, {content.hexdigest()[:16]}"
        )

    def batches(self, config: TrainConfig, epoch: int) -> tuple[PairData, list[list[int]]]:
        """The captions and batches of an epoch, from the seed and the epoch alone."""
        pairs = self.pairs.draw(config.seed, epoch)
        if self.neighbours is None:
            order = epoch_order(len(pairs), config.seed, epoch)
        else:
            order = cluster_order(self.neighbours, config.cluster, config.seed, epoch)
        return pairs, cut_batches(order, batch_sizes(len(pairs), config))


def batch_sizes(pairs: int, config: TrainConfig) -> list[int]:
    """Pairs in each batch of an epoch."""
    slices = chunk_slices(pairs, config.optim.micro_batch * config.optim.accumulate)
    return [rows.stop - rows.start for rows in slices]


def length_order(pairs: PairData, batch: Sequence[int], optim: OptimConfig) -> Sequence[int]:
    """The batch in an order that puts captions of like length into one chunk, of each process, where that changes no
    negatives: a micro-batch that is its own negatives is left as it was dealt."""
    if optim.negatives == "micro":
        return batch
    # Turns around the table, shortest first; a place is a row of some process's share.
    places = [share(range(len(batch)), process, world_size()) for process in range(world_size())]
    turns = [place for turn in zip_longest(*places) for place in turn if place is not None]
    dealt = dict(zip(turns, pairs.by_length(batch)))
    return [dealt[place] for place in range(len(batch))]


def own_share(batch: Sequence[int], optim: OptimConfig) -> Share:
    """What this process does of a batch of the whole job, such that all processes together do what one would.

    With negatives from the micro-batch, every micro-batch is dealt to all processes: it is as large as for one process.
    With negatives from the batch, the batch is dealt, and each process encodes its part in chunks of at most
    `micro_batch` pairs, in as many of them as the others.
    """
    slices = chunk_slices(len(batch), optim.micro_batch)
    together = optim.negatives == "batch"
    evaluations = [len(batch)] if together else [rows.stop - rows.start for rows in slices]
    processes = world_size()
    if processes == 1:
        return Share(batch, slices, evaluations)
    if together:
        own = share(batch, rank(), processes)
        count = -(-len(batch) // (processes * optim.micro_batch))
        parts = [share(own, number, count) for number in range(count)]
    else:
        parts = [share(batch[rows], rank(), processes) for rows in slices]
    idle = frozenset(number for number, part in enumerate(parts) if not part)
    parts = [part or [batch[0]] for part in parts]
    stops = np.cumsum([len(part) for part in parts]).tolist()
    rows = [row for part in parts for row in part]
    return Share(rows, [slice(a, b) for a, b in zip([0, *stops], stops)], evaluations, processes, idle)


def open_run_data(config: TrainConfig, model: DualEncoder, objective: Objective) -> RunData:
    """Open, check and prepare what can be had without the model's weights: the work of one process."""
    data = open_data(config.data, config.read, splits={"train", "validation"})
    records, validation, unread = _records(config, data)
    records = with_views(config, records, objective)
    cache = cache_directory(config.read.cache)
    with progress("reading images") as bar:
        train, held_out = (
            drop_invalid(part, model.text_transform, model.image_transform, cache=cache, progress=bar.iterate)
            for part in (records, validation)
        )
    problems = (*train.problems, *held_out.problems)
    total, left = len(records) + len(validation), len(train.records) + len(held_out.records)
    check_share(total - left, total, problems, what="records", largest=config.read.max_bad, name=config.data)
    with progress("preparing views") as bar:
        pairs = prepare(
            train.records,
            model.text_transform,
            model.image_transform,
            image_views=objective.image_views,
            text_views=objective.text_views,
            parts=objective.parts,
            grid=model.family.grid(model.backbone, model.image_size),
            cache=cache,
            progress=bar.iterate,
        )
    log_absent_views(pairs)
    if not config.objective.mask_duplicates:
        pairs = pairs.all_different()
    gallery = prepare_gallery(held_out.records, model, cache=cache)
    _log_data(config, pairs, gallery, model.context)
    has_test = "test" in {*data.splits(), *data.absent}
    watched = None if config.watch is None else _watched(config, model, cache)
    return RunData(pairs, gallery, (*unread, *problems), has_test, watched=watched)


def _watched(config: TrainConfig, model: DualEncoder, cache: Path) -> Gallery:
    """What is evaluated beside validation, all records of it that the model can use."""
    assert config.watch is not None
    data = open_data(config.watch, config.read, splits={"test"})
    records = data.part("test" if data.splits() else "all", validation_share=0.0)
    with progress("reading images") as bar:
        found = drop_invalid(records, model.text_transform, model.image_transform, cache=cache, progress=bar.iterate)
    lost = len(records) - len(found.records)
    check_share(
        lost,
        len(records),
        found.problems,
        what="records",
        largest=config.read.max_bad,
        name=f"{config.watch} (watched)",
    )
    return prepare_gallery(found.records, model, cache=cache)


def with_similarities(data: RunData, config: TrainConfig, model: DualEncoder, *, batch: int) -> RunData:
    """The same data with the caption similarities that a run needs beforehand, if any: the work of all processes.
    Before any step, so the similarities are those of the initial encoder, also when a run is resumed."""
    frozen = config.objective.margin_source == "frozen"
    if not (config.cluster or frozen):
        return data
    pairs, neighbours = data.pairs, None
    with progress("encoding captions, batches") as bar:
        captions = pairs.texts["caption"]
        text = encode_captions_together(model, captions, batch=batch, progress=bar.iterate)
    if frozen:
        pairs = pairs.with_margin_text(text)
    if config.cluster:
        # Found by one process: rounding differs between machines, and all must deal the same batches.
        with agreement(patient=True):
            if rank() == 0:
                neighbours = nearest_captions(_mean_by_record(text, pairs), REACH * config.cluster)
        neighbours = tell_everybody(neighbours)
    return replace(data, pairs=pairs, neighbours=neighbours)


def _records(config: TrainConfig, data: DataSet) -> tuple[tuple[Record, ...], tuple[Record, ...], tuple[Problem, ...]]:
    """Records to train and to validate on, and the problems of rows that could not be read."""
    read = config.read
    check_rows(data, largest=read.max_bad)
    if config.validation is None:
        train = _training(config, data.part("train", validation_share=read.validation_share))
        validation = data.part("validation", validation_share=read.validation_share)
        if not validation:
            raise ValueError(f"{config.data} has no validation records: name some with --validation")
        return train, validation, data.problems
    other = open_data(config.validation, read, splits={"validation"})
    check_rows(other, largest=read.max_bad)
    return (
        _training(config, data.part("train", validation_share=0.0)),
        other.part("validation" if other.splits() else "all", validation_share=0.0),
        (*data.problems, *other.problems),
    )


def _training(config: TrainConfig, records: Sequence[Record]) -> tuple[Record, ...]:
    """Those of the training records that the run takes."""
    chosen = fraction_of(records, config.fraction)
    if config.fraction < 1:
        log.info(f"{100 * config.fraction:g} % of the training pairs, by their ids: {len(chosen)} of {len(records)}")
    return chosen[: config.limit]


def _log_data(config: TrainConfig, pairs: PairData, gallery: Gallery, context: int) -> None:
    captions = len(pairs.owner)
    several = f" with {captions} captions, one of each image in an epoch," if captions > len(pairs) else ""
    source = config.data if config.validation is None else f"{config.data} and {config.validation}"
    first = "the first " if config.limit is not None and len(pairs) >= config.limit else ""
    log.info(f"{first}{len(pairs)} training pairs{several} and {len(gallery.records)} validation images from {source}")
    for view, texts in pairs.texts.items():
        if texts.truncated:
            log.warning(f"{texts.truncated} of {len(texts)} training texts ({view}) are truncated at {context} tokens")
    if reason := too_small(len(batch_sizes(len(pairs), config)), len(gallery.records)):
        log.warning(reason)
    if shared := _shared_images(pairs, gallery):
        log.warning(f"{shared} of {len(gallery.records)} validation images are training images too")
    if gallery.truncated:
        cut = f"{gallery.truncated} of {len(gallery.captions)}"
        log.warning(f"{cut} validation captions are truncated at {context} tokens")


def too_small(steps: int, validation: int) -> str | None:
    """Why differences between runs will be noise: too few optimiser steps an epoch, or too few validation images."""
    reasons = [f"{steps} optimiser steps an epoch"] * (steps < FEW_STEPS)
    reasons += [f"{validation} validation images"] * (validation < FEW_IMAGES)
    found = " and ".join(reasons)
    return f"with only {found}, differences between runs will mostly be noise: use more data" if reasons else None


def _shared_images(pairs: PairData, gallery: Gallery) -> int:
    """Validation images that are training images too, under any name: they have the same row in the cache."""
    return int(np.isin(gallery.pixels.rows, pairs.images["full"].rows).sum())


def _mean_by_record(text: Tensor, pairs: PairData) -> Tensor:
    """The mean direction [N, D] of each record's captions [T, D]."""
    return torch.zeros(len(pairs), text.shape[1]).index_add(0, pairs.owner, text)
