"""Records into batches of views: the first seam of the house.

An objective names the views it needs; `PairData` prepares exactly those, once, and hands out batches by index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from PIL import Image
from torch import Tensor

from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.records import Record
from hnclip.data.texts import TextTransform

IMAGE_VIEWS: dict[str, Callable[[Record], Image.Image]] = {"full": lambda record: record.image.load()}
TEXT_VIEWS: dict[str, Callable[[Record], str]] = {
    "caption": lambda record: _required(next(iter(record.captions), None), record, "a caption"),
    "short": lambda record: _required(record.short, record, "a short caption"),
}


def _required(text: str | None, record: Record, what: str) -> str:
    if text is None:
        raise ValueError(f"record {record.id} has no text for this view: {what} is needed")
    return text


@dataclass(frozen=True)
class TextBatch:
    """Token ids padded to the longest text of the batch, and each text's length with start and end token.

    Shape:
        ids: [B, T] int64
        lengths: [B] int64
    """

    ids: Tensor
    lengths: Tensor

    def __getitem__(self, rows: slice) -> TextBatch:
        lengths = self.lengths[rows]
        # Causal attention makes everything behind the end token irrelevant, so trimming is exact.
        return TextBatch(self.ids[rows, : int(lengths.max())], lengths)

    def to(self, device: torch.device) -> TextBatch:
        return TextBatch(self.ids.to(device, non_blocking=True), self.lengths.to(device, non_blocking=True))


@dataclass(frozen=True)
class Batch:
    """B pairs, every view of them, on one device.

    Shape:
        images: per view [B, 3, H, W] uint8
        texts: per view a TextBatch
        ids: [B, 2] int64, the pair's image and caption identities
        margin_text: [B, D] or None, frozen caption embeddings for Ḡ
    """

    images: Mapping[str, Tensor]
    texts: Mapping[str, TextBatch]
    ids: Tensor
    margin_text: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> Batch:
        return Batch(
            {name: view[rows] for name, view in self.images.items()},
            {name: view[rows] for name, view in self.texts.items()},
            self.ids[rows],
            None if self.margin_text is None else self.margin_text[rows],
        )

    def to(self, device: torch.device) -> Batch:
        return Batch(
            {name: view.to(device, non_blocking=True) for name, view in self.images.items()},
            {name: view.to(device) for name, view in self.texts.items()},
            self.ids.to(device, non_blocking=True),
            None if self.margin_text is None else self.margin_text.to(device, non_blocking=True),
        )


def pad_texts(ids: Sequence[Sequence[int]], pad: int) -> TextBatch:
    """Rows of token ids, padded to the longest."""
    lengths = torch.tensor([len(row) for row in ids])
    padded = torch.full((len(ids), int(lengths.max())), pad)
    for row, tokens in enumerate(ids):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    return TextBatch(padded, lengths)


@dataclass(frozen=True)
class PairData:
    """Prepared views of a list of records, ready to be cut into batches.

    `truncated` says, per text view, how many captions were longer than the model's context.
    """

    records: Sequence[Record]
    images: Mapping[str, Tensor]
    texts: Mapping[str, Sequence[Sequence[int]]]
    ids: Tensor
    pad: int
    truncated: Mapping[str, int] = field(default_factory=dict)
    margin_text: Tensor | None = None

    def __len__(self) -> int:
        return len(self.records)

    def with_margin_text(self, vectors: Tensor) -> PairData:
        """The same data, carrying one frozen caption embedding per record."""
        if len(vectors) != len(self):
            raise ValueError(f"vectors has {len(vectors)} rows for {len(self)} records")
        return replace(self, margin_text=vectors)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.as_tensor(indices)
        return Batch(
            {name: view[rows] for name, view in self.images.items()},
            {name: pad_texts([view[i] for i in indices], self.pad) for name, view in self.texts.items()},
            self.ids[rows],
            None if self.margin_text is None else self.margin_text[rows],
        )


def prepare(
    records: Sequence[Record],
    text_transform: TextTransform,
    image_transform: ImageTransform,
    *,
    image_views: Sequence[str] = ("full",),
    text_views: Sequence[str] = ("caption",),
) -> PairData:
    """Decode, resize and tokenise the views of these records, once."""
    if not records:
        raise ValueError("records is empty: there is nothing to train or evaluate on")
    for name in image_views:
        if name not in IMAGE_VIEWS:
            raise ValueError(f"unknown image view {name!r}; known: {', '.join(IMAGE_VIEWS)}")
    for name in text_views:
        if name not in TEXT_VIEWS:
            raise ValueError(f"unknown text view {name!r}; known: {', '.join(TEXT_VIEWS)}")
    texts = {name: text_transform([TEXT_VIEWS[name](record) for record in records]) for name in text_views}
    shape = (len(records), 3, image_transform.size, image_transform.size)
    images = {name: torch.empty(shape, dtype=torch.uint8) for name in image_views}
    for row, record in enumerate(records):
        for name in image_views:
            images[name][row] = preprocess_image(IMAGE_VIEWS[name](record), image_transform)
    return PairData(
        records=records,
        images=images,
        texts={name: view.ids for name, view in texts.items()},
        ids=_identities(records),
        pad=text_transform.pad,
        truncated={name: view.truncated for name, view in texts.items()},
    )


def _identities(records: Sequence[Record]) -> Tensor:
    """[N, 2]: equal numbers in a column mean the same picture, or the same caption word for word."""
    pictures: dict[str, int] = {}
    captions: dict[str, int] = {}
    return torch.tensor(
        [
            (
                pictures.setdefault(record.image.key, len(pictures)),
                captions.setdefault(TEXT_VIEWS["caption"](record), len(captions)),
            )
            for record in records
        ]
    )
