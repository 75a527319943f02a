"""One evaluation for every model and data set: encode, rank, summarise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hnclip.data.batches import pad_texts
from hnclip.data.images import preprocess_image
from hnclip.data.records import Record
from hnclip.evaluate.metrics import RetrievalMetrics, summarize
from hnclip.evaluate.ranks import Ranks, retrieval_ranks

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

Progress = Callable[[range], Iterator[int]]


@dataclass(frozen=True)
class Gallery:
    """Pictures and all their captions, decoded and tokenised once.

    Shape:
        pixels: [I, 3, H, W] uint8
        captions: T rows of token ids
        owner: [T], the picture each caption belongs to
    """

    records: Sequence[Record]
    pixels: Tensor
    captions: Sequence[Sequence[int]]
    owner: Tensor
    truncated: int


@dataclass(frozen=True)
class Evaluation:
    """What one model does on one gallery. Shape: image [I, D], text [T, D]."""

    image: Tensor
    text: Tensor
    ranks: Ranks
    metrics: RetrievalMetrics


def prepare_gallery(records: Sequence[Record], model: DualEncoder) -> Gallery:
    """Decode and tokenise what an evaluation needs. Every caption of a record counts."""
    if not records:
        raise ValueError("records is empty: there is nothing to evaluate on")
    captions = [caption for record in records for caption in record.captions]
    owner = [index for index, record in enumerate(records) for _ in record.captions]
    tokenized = model.text_transform(captions)
    return Gallery(
        records=records,
        pixels=torch.stack([preprocess_image(record.image.load(), model.image_transform) for record in records]),
        captions=tokenized.ids,
        owner=torch.tensor(owner),
        truncated=tokenized.truncated,
    )


@torch.no_grad()
def encode_gallery(
    model: DualEncoder, gallery: Gallery, *, batch: int = 128, progress: Progress = iter
) -> tuple[Tensor, Tensor]:
    """Global vectors of all pictures and captions, in fp32 on the CPU.

    Captions are encoded in order of length, so that short ones are not padded to long ones.

    Shape:
        returns image [I, D], text [T, D]
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    training = model.training
    model.eval()
    images = [
        model.encode_images(gallery.pixels[start : start + batch].to(model.device)).vectors.float().cpu()
        for start in progress(range(0, len(gallery.pixels), batch))
    ]
    order = sorted(range(len(gallery.captions)), key=lambda row: len(gallery.captions[row]))
    texts = []
    for start in progress(range(0, len(order), batch)):
        rows = [gallery.captions[row] for row in order[start : start + batch]]
        padded = pad_texts(rows, model.text_transform.pad).to(model.device)
        texts.append(model.encode_texts(padded).vectors.float().cpu())
    model.train(training)
    encoded = torch.cat(texts)  # [T, D], shortest first
    text = torch.empty_like(encoded)
    text[torch.tensor(order)] = encoded
    return torch.cat(images), text


def evaluate(
    model: DualEncoder,
    gallery: Gallery,
    *,
    intervals: bool = False,
    batch: int = 128,
    progress: Progress = iter,
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
