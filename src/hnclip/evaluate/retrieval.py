"""One evaluation for every model and data set: encode, rank, summarise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hnclip.core import Record
from hnclip.data.batching import prepare
from hnclip.data.image_cache import CachedPixels
from hnclip.data.texts import Tokens
from hnclip.encode.loop import encode_captions, encode_pixels
from hnclip.evaluate.metrics import RetrievalMetrics, summarize
from hnclip.evaluate.ranks import Ranks, retrieval_ranks
from hnclip.util.console import Iterate

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder


@dataclass(frozen=True)
class Gallery:
    """Pictures and all their captions, decoded and tokenised once.

    Shape:
        pixels: [I, 3, H, W] uint8
        captions: T rows of token ids
        owner: [T], the picture each caption belongs to
    """

    records: Sequence[Record]
    pixels: CachedPixels
    captions: Sequence[Tokens]
    owner: Tensor
    truncated: int


@dataclass(frozen=True)
class Evaluation:
    """What one model does on one gallery. Shape: image [I, D], text [T, D]."""

    image: Tensor
    text: Tensor
    ranks: Ranks
    metrics: RetrievalMetrics


def prepare_gallery(
    records: Sequence[Record], model: DualEncoder, *, cache: Path | None = None, progress: Iterate = iter
) -> Gallery:
    """Decode and tokenise what an evaluation needs. Every caption of a record counts.

    Args:
        cache: directory of the picture cache; without one the pictures are held in memory.
    """
    data = prepare(records, model.text_transform, model.image_transform, cache=cache, progress=progress)
    return Gallery(
        records=records,
        pixels=data.images["full"],
        captions=data.texts["caption"],
        owner=data.owner,
        truncated=data.texts["caption"].truncated,
    )


def encode_gallery(
    model: DualEncoder, gallery: Gallery, *, batch: int = 128, progress: Iterate = iter
) -> tuple[Tensor, Tensor]:
    """Global vectors of all images and captions, in fp32 on the CPU.

    Shape:
        returns image [I, D], text [T, D]
    """
    images = encode_pixels(model, gallery.pixels, batch=batch, progress=progress)
    return images.cpu(), encode_captions(model, gallery.captions, batch=batch, progress=progress).cpu()


def evaluate(
    model: DualEncoder,
    gallery: Gallery,
    *,
    intervals: bool = False,
    batch: int = 128,
    progress: Iterate = iter,
) -> Evaluation:
    """Retrieval in both directions. With `intervals`, bootstrap intervals that resample whole families (`group`) where
    the records name them."""
    image, text = encode_gallery(model, gallery, batch=batch, progress=progress)
    ranks = retrieval_ranks(image, text, gallery.owner)
    return Evaluation(
        image=image,
        text=text,
        ranks=ranks,
        metrics=summarize(ranks, intervals=intervals, groups=group_numbers(gallery.records) if intervals else None),
    )


def group_numbers(records: Sequence[Record]) -> Tensor:
    """[I]: one number per family; a record without a family is one of its own."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(record.group or f"\0{record.id}", len(numbers)) for record in records])
