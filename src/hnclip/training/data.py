"""The data of a run: records opened, validated and prepared for the objective, and the batches of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hnclip.config import TrainConfig
from hnclip.core import Problem, Record
from hnclip.data.batching import PairData, prepare
from hnclip.data.image_cache import cache_directory
from hnclip.data.manifest import KINDS, Kind, apply_manifest, manifest_path, read_manifest
from hnclip.data.records import DataSet, fraction_of
from hnclip.data.sampler import cluster_order, cut_batches, epoch_order, nearest_captions
from hnclip.data.sources import open_data
from hnclip.data.validate import check_rows, check_share, drop_invalid
from hnclip.encode.loop import encode_captions
from hnclip.evaluation.retrieval import drop_unusable, open_task, prepare_gallery
from hnclip.models.dual_encoder import DualEncoder
from hnclip.objectives.base import Objective
from hnclip.training.distributed import broadcast_object, encode_shared, rank
from hnclip.training.step import chunk_slices
from hnclip.util.console import progress
from hnclip.util.text import counted

log = logging.getLogger(__name__)

FEW_STEPS, FEW_IMAGES = 10, 50  # below these, differences between runs are mostly noise
REACH = 4  # neighbours to choose from, in cluster sizes: some of the nearest are taken already


@dataclass(frozen=True)
class RunData:
    """What a run trains, validates and watches, and the problems of skipped records.

    Shape:
        neighbours: [N, K], rows of the nearest captions, if batches are made of clusters
    """

    pairs: PairData
    validation: PairData
    problems: tuple[Problem, ...] = ()
    test_split: bool = False
    neighbours: Tensor | None = None
    watched: PairData | None = None

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same pairs and validation records in the same order, wherever the files are."""
        content = sha256()
        for record in (*self.pairs.records, *self.validation.records):
            content.update(repr((record.id, record.captions)).encode("utf-8", "surrogatepass"))
        if len(self.pairs.images) + len(self.pairs.texts) > 2:  # views other than image and caption
            for record in self.pairs.records:
                regions = [(region.box, region.sentence) for region in record.regions]
                views = (record.short, regions, record.filtered)
                content.update(repr(views).encode("utf-8", "surrogatepass"))
        return f"{len(self.pairs)} pairs, {len(self.validation.records)} validation images, {content.hexdigest()[:16]}"

    def describe(self) -> dict[str, Any]:
        """Counts for the log."""
        return {
            "pairs": len(self.pairs),
            "captions": len(self.pairs.owner),
            "truncated": {name: texts.truncated for name, texts in self.pairs.texts.items()},
            "validation_captions": len(self.validation.owner),
            "validation_truncated": self.validation.texts["caption"].truncated,
            "problems": len(self.problems),
            "test_split": self.test_split,
        }

    def batches(self, config: TrainConfig, epoch: int) -> tuple[PairData, list[list[int]]]:
        """The captions and batches of an epoch, from the seed and the epoch alone. With negatives from the batch, each
        is in order of length: chunks of similar length need little padding, and change no negatives."""
        pairs = self.pairs.draw(config.seed, epoch)
        if self.neighbours is None:
            order = epoch_order(len(pairs), config.seed, epoch)
        else:
            order = cluster_order(self.neighbours, config.cluster, config.seed, epoch)
        batches = cut_batches(order, batch_sizes(len(pairs), config))
        return pairs, [pairs.by_length(rows) for rows in batches] if config.optim.negatives == "batch" else batches


def batch_sizes(pairs: int, config: TrainConfig) -> list[int]:
    """Pairs in each batch of an epoch."""
    slices = chunk_slices(pairs, config.optim.micro_batch * config.optim.accumulate)
    return [rows.stop - rows.start for rows in slices]


def open_run_data(
    config: TrainConfig, model: DualEncoder, objective: Objective, data: DataSet | None = None, *, batch: int = 128
) -> RunData:
    """Open, validate and prepare the data of a run.

    Several processes may do this at once: one fills the image cache, the others wait for it.

    Args:
        data: read already; `config.data` is opened if not given.
        batch: captions encoded at once, where caption similarities are needed before the first step.
    """
    data = open_data(config.data, config.read, splits={"train", "validation"}) if data is None else data
    records, validation, unread = choose_records(config, data)
    records = add_views(config, records, objective)
    cache = cache_directory(config.read.cache)
    with progress("reading images") as bar:
        train, held_out = (
            drop_invalid(part, model.text_transform, model.image_transform, cache=cache, progress=bar.iterate)
            for part in (records, validation)
        )
    problems = (*train.problems, *held_out.problems)
    total, kept = len(records) + len(validation), len(train.records) + len(held_out.records)
    check_share(total - kept, total, problems, what="records", largest=config.read.max_bad, name=config.data)
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
    if not config.objective.mask_duplicates:
        pairs = pairs.all_different()
    gallery = prepare_gallery(held_out.records, model, cache=cache)
    _log_data(config, pairs, gallery, model.context)
    watched = None
    if config.watch is not None:  # as `hnclip eval` takes it
        with progress("reading images") as bar:
            task = drop_unusable(open_task(config.watch, None, config.read), model, config.read, progress=bar.iterate)
        watched = prepare_gallery(task.records, model, cache=cache)
    pairs, neighbours = _add_similarities(pairs, config, model, batch)
    has_test = "test" in {*data.splits(), *data.absent}
    return RunData(pairs, gallery, (*unread, *problems), has_test, neighbours, watched)


def _add_similarities(
    pairs: PairData, config: TrainConfig, model: DualEncoder, batch: int
) -> tuple[PairData, Tensor | None]:
    """Caption embeddings for frozen margins, and neighbours for clusters; both of the initial encoder, also if the run
    is resumed."""
    frozen = config.objective.margin_source == "frozen"
    if not (config.cluster or frozen):
        return pairs, None
    captions, neighbours = pairs.texts["caption"], None
    with progress("encoding captions, batches") as bar:
        text = encode_shared(
            lambda rows: encode_captions(model, [captions[row] for row in rows], batch=batch, progress=bar.iterate),
            len(captions),
        ).cpu()  # [T, D]
    if config.cluster:
        if rank() == 0:  # rounding differs between machines, and all ranks must use the same batches
            mean = torch.zeros(len(pairs), text.shape[1]).index_add(0, pairs.owner, text)  # [N, D] directions
            neighbours = nearest_captions(mean, REACH * config.cluster)
        neighbours = broadcast_object(neighbours)
    return replace(pairs, margin_text=text) if frozen else pairs, neighbours


def choose_records(
    config: TrainConfig, data: DataSet
) -> tuple[tuple[Record, ...], tuple[Record, ...], tuple[Problem, ...]]:
    """Records to train and to validate on, and the problems of rows that could not be read."""
    read, other, share = config.read, data, config.read.validation_share
    check_rows(data, largest=read.max_bad)
    if config.validation is not None:
        other, share = open_data(config.validation, read, splits={"validation"}), 0.0
        check_rows(other, largest=read.max_bad)
    train = fraction_of(data.part("train", validation_share=share), config.fraction)[: config.limit]
    validation = other.part("validation" if other is data or other.splits() else "all", validation_share=share)
    if not validation:
        raise ValueError(f"{other.name} has no validation records: name some with --validation")
    return train, validation, data.problems if other is data else (*data.problems, *other.problems)


def _log_data(config: TrainConfig, pairs: PairData, gallery: PairData, context: int) -> None:
    captions, steps, images = len(pairs.owner), len(batch_sizes(len(pairs), config)), len(gallery.records)
    several = f" with {captions} captions, one of each image in an epoch," if captions > len(pairs) else ""
    source = config.data if config.validation is None else f"{config.data} and {config.validation}"
    log.info(f"{len(pairs)} training pairs{several} and {images} validation images from {source}")
    for view, present in pairs.present.items():  # terms are averaged over the pairs that have their views
        log.info(f"view {view}: {int(present.sum())} of {len(present)} have it")
    truncated = {f"training texts ({view})": (texts.truncated, len(texts)) for view, texts in pairs.texts.items()}
    truncated["validation captions"] = gallery.texts["caption"].truncated, len(gallery.owner)
    for name, (count, total) in truncated.items():
        if count:
            log.warning(f"{count} of {total} {name} are truncated at {context} tokens")
    if steps < FEW_STEPS or images < FEW_IMAGES:
        log.warning(
            f"only {counted(steps, 'optimiser step')} an epoch and {counted(images, 'validation image')}: differences "
            "between runs will mostly be noise"
        )
    # Under any name: equal images have the same row in the cache.
    if shared := int(np.isin(gallery.images["full"].rows, pairs.images["full"].rows).sum()):
        log.warning(f"{shared} of {images} validation images are training images too")


def needed_views(objective: Objective) -> set[Kind]:
    """What an objective needs of a record in addition to its image and captions: regions, text."""
    views = {*objective.image_views, *objective.text_views}
    needs = set[Kind]()
    if any(name.startswith(("crop", "sentence", "edge_crop", "region")) for name in (*views, *objective.parts)):
        needs.add("regions")
    if "filtered" in views or any(part.startswith("chunk") for part in objective.parts):
        needs.add("text")
    return needs


def add_views(config: TrainConfig, records: Sequence[Record], objective: Objective) -> tuple[Record, ...]:
    """The records with everything that the objective needs: what `hnclip prepare` made, then what the source has.
    Filtered captions are made for records that lack them.

    Raises:
        ValueError: regions are needed and no record has any, or all records have changed since they were prepared.
    """
    needs = needed_views(objective)
    if not needs:
        return tuple(records)
    if config.read.prepared is not None and not Path(config.read.prepared).expanduser().is_dir():
        raise ValueError(f"--read.prepared {config.read.prepared} does not exist: hnclip prepare creates it")
    found = list(records)
    for kind in KINDS:
        if kind in needs:
            found = _apply_prepared(config, kind, found)
    if lacking := sum(not record.filtered for record in found) if "text" in needs else 0:
        from hnclip.data.lexicon import load_filter

        name = "blunt:structxlip_colours" if config.objective.fidelity == "official" else "lexicon"
        change = load_filter(name)
        found = [replace(one, filtered=one.filtered or tuple(map(change, one.captions))) for one in found]
        log.info(f"captions of {lacking} of {len(found)} records are filtered by {name}")
    if "regions" in needs:
        count = sum(bool(record.regions) for record in found)
        if not count:
            raise ValueError(
                f"{config.objective.method} needs regions and no record of {config.data} has any: run "
                f"hnclip prepare regions {config.data} first, with the same --read options; if that found none, with "
                "another --model or --proposer"
            )
        log.info(f"{count} of {len(found)} training records have regions")
    return tuple(found)


def _apply_prepared(config: TrainConfig, kind: Kind, records: list[Record]) -> list[Record]:
    """The records with their prepared regions or filtered captions, if there are any."""
    path = manifest_path(config.read, config.data, kind)
    if not path.exists():
        return records
    manifest = read_manifest(path, kind)
    found, applied, changed = apply_manifest(records, manifest)
    log.info(f"{kind} of {applied} of {len(records)} records prepared by {manifest.by} ({path})")
    if changed:
        message = f"{changed} of {len(records)} records have changed since hnclip prepare {kind} {config.data}"
        if not applied:  # a default would replace all that was prepared
            raise ValueError(f"{message}: run it again, or delete {path}")
        log.warning(message)
    return found
