"""The data of a run: opened, checked, prepared; and what was left out of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hnclip.config import TrainConfig
from hnclip.data.batches import PairData, prepare
from hnclip.data.cache import cache_directory
from hnclip.data.records import DataSet, Problem, Record
from hnclip.data.sampler import Deal, cluster_order, deal_batches, epoch_order, nearest_captions
from hnclip.data.sound import check_share, sound_records
from hnclip.data.sources import open_data
from hnclip.evaluate.retrieval import Gallery, encode_captions, prepare_gallery
from hnclip.models.dual_encoder import DualEncoder
from hnclip.objectives.objective import Objective
from hnclip.train.grad_cache import chunk_slices
from hnclip.train.log import progress_bar

REACH = 4  # neighbours to choose from, in cluster sizes: some of the nearest are taken already


@dataclass(frozen=True)
class RunData:
    """What a run trains and validates on, and the problems of the records that it leaves out.

    Shape:
        neighbours: [N, K], rows of the nearest captions, if batches are made of clusters
    """

    pairs: PairData
    validation: Gallery
    problems: tuple[Problem, ...] = ()
    neighbours: Tensor | None = None

    def deal(self, config: TrainConfig, epoch: int) -> tuple[PairData, Deal]:
        """The captions and batches of an epoch, from the seed and the epoch alone."""
        pairs = self.pairs.draw(config.seed, epoch)
        if self.neighbours is None:
            order = epoch_order(len(pairs), config.seed, epoch)
        else:
            order = cluster_order(self.neighbours, config.cluster, config.seed, epoch)
        return pairs, deal_batches(order, pairs.ids, batch_sizes(len(pairs), config))


def batch_sizes(pairs: int, config: TrainConfig) -> list[int]:
    """Pairs in each batch of an epoch."""
    slices = chunk_slices(pairs, config.optim.micro_batch * config.optim.accumulate)
    return [rows.stop - rows.start for rows in slices]


def open_run_data(
    config: TrainConfig, model: DualEncoder, objective: Objective, *, quiet: bool, report: Callable[[str], None]
) -> RunData:
    """Open, check and prepare everything before the first step."""
    data = open_data(config.data, config.read, splits={"train", "validation"})
    records, validation = _records(config, data)
    cache = cache_directory(config.read.cache)
    with progress_bar("reading pictures", quiet=quiet) as bar:
        train, held_out = (
            sound_records(part, model.text_transform, model.image_transform, cache=cache, progress=bar.walk)
            for part in (records, validation)
        )
    problems = (*data.problems, *train.problems, *held_out.problems)
    total = len(records) + len(validation) + len(data.problems)
    check_share(problems, total, largest=config.read.max_bad, name=config.data)
    pairs = prepare(
        train.records,
        model.text_transform,
        model.image_transform,
        image_views=objective.image_views,
        text_views=objective.text_views,
        cache=cache,
    )
    gallery = prepare_gallery(held_out.records, model, cache=cache)
    _tell(config, pairs, gallery, model.context, report)
    neighbours = None
    if config.cluster or config.objective.margin_source == "frozen":
        # Before any step, so the similarities are those of the initial encoder, also when a run is resumed.
        with progress_bar("encoding captions, batches", quiet=quiet) as bar:
            text = encode_captions(model, pairs.texts["caption"], batch=config.evaluate_batch, progress=bar.walk)
        if config.objective.margin_source == "frozen":
            pairs = pairs.with_margin_text(text)
        if config.cluster:
            neighbours = nearest_captions(_mean_by_record(text, pairs), REACH * config.cluster)
    return RunData(pairs, gallery, problems, neighbours)


def _records(config: TrainConfig, data: DataSet) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """Records to train and to validate on."""
    share = config.read.validation_share
    if config.validation is None:
        return (
            data.part("train", validation_share=share)[: config.limit],
            data.part("validation", validation_share=share),
        )
    other = open_data(config.validation, config.read, splits={"validation"})
    return (
        data.part("train", validation_share=0.0)[: config.limit],
        other.part("validation" if other.splits() else "all", validation_share=0.0),
    )


def _tell(config: TrainConfig, pairs: PairData, gallery: Gallery, context: int, report: Callable[[str], None]) -> None:
    captions = len(pairs.owner)
    several = f" with {captions} captions, one of each picture in an epoch," if captions > len(pairs) else ""
    source = config.data if config.validation is None else f"{config.data} and {config.validation}"
    report(f"{len(pairs)} training pairs{several} and {len(gallery.records)} validation pictures from {source}")
    for view, count in pairs.truncated.items():
        if count:
            report(f"warning: {count} of {len(pairs.texts[view])} training texts ({view}) are cut at {context} tokens")
    if gallery.truncated:
        cut = f"{gallery.truncated} of {len(gallery.captions)}"
        report(f"warning: {cut} validation captions are cut at {context} tokens")


def _mean_by_record(text: Tensor, pairs: PairData) -> Tensor:
    """The mean direction [N, D] of each record's captions [T, D]."""
    return torch.zeros(len(pairs), text.shape[1]).index_add(0, pairs.owner, text)
