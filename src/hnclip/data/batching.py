"""Records into batches of views: `prepare` makes those that an objective declares, once, and `PairData` returns batches
by index."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.core import Batch, ImageSource, Record, TextBatch
from hnclip.data.image_cache import CachedPixels, load_images
from hnclip.data.images import ImageTransform
from hnclip.data.parts import IMAGE_VIEWS, PARTS, TEXT_VIEWS, PartContext
from hnclip.data.sampler import choose_captions
from hnclip.data.texts import TextTransform, TokenizedTexts, Tokens
from hnclip.util.console import Iterate

FILLER = "a"  # text in place of a view that a record lacks; its row is masked


def join_texts(parts: Sequence[TextBatch], pad: int) -> TextBatch:
    """Several batches as one, padded to the longest text."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.ids.shape[1] for part in parts)
    positions, row = [], 0
    for part in parts:
        own = part.ids.shape[1]
        positions.append((row + part.positions // own) * width + part.positions % own)
        row += len(part.lengths)
    ids = [F.pad(part.ids, (0, width - part.ids.shape[1]), value=pad) for part in parts]
    return TextBatch(torch.cat(ids), torch.cat([part.lengths for part in parts]), torch.cat(positions))


def pad_texts(ids: Sequence[Tokens], pad: int) -> TextBatch:
    """Rows of token ids, padded to the longest."""
    lengths = torch.tensor([len(row) for row in ids])
    padded = torch.full((len(ids), int(lengths.max())), pad)  # [B, T] int64
    rows = padded.numpy()
    for row, tokens in enumerate(ids):
        rows[row, : len(tokens)] = tokens
    return TextBatch(padded, lengths)


@dataclass(frozen=True)
class PairData:
    """Prepared views of N records with T captions. A pair is an image and one of its captions, the `chosen` one.

    Shape:
        images: per view [N, 3, H, W] uint8
        texts: per view token ids, T rows for views by caption, otherwise N
        owner: [T], the index of each caption's record, in order
        chosen: [N], the row of "caption" that each record uses
        image_ids: [N], caption_ids: [T]; equal for images or captions that are the same to the model
        margin_text: [T, D], a frozen embedding of each caption, or None
        present: per view [N] or [T] bool, where records have it; views that all records have are not listed
        parts: per view [N, K, P] bool, [N, K, 2] or [T, K, 2]
        text_ids: per text view other than the caption [N] or [T], equal for equal texts
    """

    records: Sequence[Record]
    images: Mapping[str, CachedPixels]
    texts: Mapping[str, TokenizedTexts]
    owner: Tensor
    chosen: Tensor
    image_ids: Tensor
    caption_ids: Tensor
    pad: int
    margin_text: Tensor | None = None
    present: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    text_ids: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def ids(self) -> Tensor:
        """[N, 2]: the ids of each pair's image and caption."""
        return torch.stack([self.image_ids, self.caption_ids[self.chosen]], dim=1)

    def draw(self, seed: int, epoch: int) -> PairData:
        """The data with the captions of an epoch, one of each record."""
        counts = self.owner.bincount(minlength=len(self))  # [N]
        first = counts.cumsum(0) - counts  # [N]
        return replace(self, chosen=first + choose_captions(counts, seed, epoch))

    def all_different(self) -> PairData:
        """The data with an id of its own for every image and every text."""
        return replace(self, image_ids=torch.arange(len(self)), caption_ids=torch.arange(len(self.owner)), text_ids={})

    def by_length(self, indices: Sequence[int]) -> list[int]:
        """The pairs in order of their captions' lengths, so that consecutive ones need little padding; stable."""
        lengths = self.texts["caption"].lengths[self.chosen.numpy()]  # [N]
        return sorted(indices, key=lengths.__getitem__)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.as_tensor(indices)
        captions = self.chosen[rows]  # [B]

        def rows_of(view: str) -> Tensor:
            return captions if view in TEXT_VIEWS and TEXT_VIEWS[view].by_caption else rows

        texts = {name: [view[row] for row in rows_of(name).tolist()] for name, view in self.texts.items()}
        return Batch(
            {name: view[rows] for name, view in self.images.items()},
            {name: pad_texts(ids, self.pad) for name, ids in texts.items()},
            torch.stack([self.image_ids[rows], self.caption_ids[captions]], dim=1),
            None if self.margin_text is None else self.margin_text[captions],
            {name: there[rows_of(name)] for name, there in self.present.items()},
            {name: part[rows_of(name)] for name, part in self.parts.items()},
            {name: ids[rows_of(name)] for name, ids in self.text_ids.items()},
        )


def prepare(
    records: Sequence[Record],
    text_transform: TextTransform,
    image_transform: ImageTransform,
    *,
    image_views: Sequence[str] = ("full",),
    text_views: Sequence[str] = ("caption",),
    parts: Sequence[str] = (),
    grid: int | None = None,
    cache: Path | None = None,
    progress: Iterate = iter,
) -> PairData:
    """Decode, resize and tokenise the views of these records, once; all image views of a record from one decode. Each
    record uses its first caption until `draw`. A view that a record lacks, or that is invalid, is marked as absent; its
    image and its captions must be valid.

    Args:
        image_views, text_views, parts: names of `IMAGE_VIEWS`, `TEXT_VIEWS` and `PARTS` in `hnclip.data.parts`.
        grid: patches along each side of the model's image, for parts of images.
        cache, progress: as for `load_images`.
    """
    if not records:
        raise ValueError("records is empty: there is nothing to train or evaluate on")
    texts = {name: _view_texts(records, name, text_transform) for name in dict.fromkeys(("caption", *text_views))}
    tokenized = {
        name: text_transform([FILLER if text is None else text for text in found]) for name, found in texts.items()
    }
    absent = {name: torch.tensor([text is None for text in texts[name]]) for name in text_views}
    images, absent_images, sizes = _view_images(records, image_views, image_transform, cache, progress)
    absent |= absent_images
    counts = torch.tensor([len(record.captions) for record in records])  # [N]
    owner = torch.arange(len(records)).repeat_interleave(counts)  # [T]

    def context(view: str) -> PartContext:
        by_caption = view in TEXT_VIEWS and TEXT_VIEWS[view].by_caption
        rows = owner.tolist() if by_caption else range(len(records))
        return PartContext(records, sizes, texts.get(view, ()), rows, text_transform, image_transform, grid)

    return PairData(
        records=records,
        images=images,
        texts={name: tokenized[name] for name in text_views},
        owner=owner,
        chosen=counts.cumsum(0) - counts,
        image_ids=numbers(images["full"].rows.tolist() if "full" in images else [r.image.key for r in records]),
        caption_ids=text_numbers(tokenized["caption"]),
        pad=text_transform.pad,
        present={name: ~missing for name, missing in absent.items() if missing.any()},
        parts={part.view: part.find(context(part.view)) for part in (PARTS[name] for name in parts)},
        text_ids={name: text_numbers(tokenized[name]) for name in text_views if name != "caption"},
    )


def _view_texts(records: Sequence[Record], view: str, transform: TextTransform) -> list[str | None]:
    """None where there is no text, or none with a word."""
    kind, texts = TEXT_VIEWS[view], list[str | None]()
    for record in records:
        found = kind.texts(record)
        if len(found) != (count := len(record.captions) if kind.by_caption else 1):
            raise ValueError(f"record {record.id} has {len(found)} texts of view {view!r} instead of {count}")
        texts += found
    if view == "caption":
        return texts
    reasons = transform.validate([text or "" for text in texts])
    return [text if reason is None else None for text, reason in zip(texts, reasons)]


def _view_images(
    records: Sequence[Record], views: Sequence[str], transform: ImageTransform, cache: Path | None, progress: Iterate
) -> tuple[dict[str, CachedPixels], dict[str, Tensor], np.ndarray]:
    """Per view the images [N, 3, H, W] and where there is none [N], and the sizes [N, 2] of the whole images, which
    stand where a view is absent."""
    places, sources = list[tuple[str, int]](), list[ImageSource]()
    for view in dict.fromkeys(("full", *views)) if views else ():
        for row, record in enumerate(records):
            if (source := IMAGE_VIEWS[view](record)) is not None:
                places.append((view, row))
                sources.append(source)
    loaded = load_images(sources, transform, cache=cache, progress=progress)
    for index, problem in loaded.problems.items():
        if places[index][0] == "full":
            raise ValueError(f"{problem.kind}: {problem.detail}")
    found = {places[index]: row for row, index in enumerate(loaded.kept)}
    whole = [found["full", row] for row in range(len(records))] if views else []
    images, absent = {}, {}
    for view in views:
        absent[view] = torch.tensor([(view, row) not in found for row in range(len(records))])
        images[view] = loaded.pixels.select([found.get((view, row), full) for row, full in enumerate(whole)])
    return images, absent, loaded.sizes[np.array(whole, dtype=np.int64)]


def numbers(names: Iterable[Hashable]) -> Tensor:
    """Equal numbers for equal names, in the order of their first occurrence."""
    known: dict[Hashable, int] = {}
    return torch.tensor([known.setdefault(name, len(known)) for name in names])


def text_numbers(texts: TokenizedTexts) -> Tensor:
    """Equal numbers for texts with the same tokens."""
    return numbers(row.tobytes() for row in texts)
