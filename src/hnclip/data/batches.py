"""Records into batches of views: the first seam of the house.

An objective names the views it needs; `PairData` prepares exactly those, once, and hands out batches by index.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.core import Batch, ImageSource, Record, TextBatch
from hnclip.data.cache import Pixels, Progress, load_pictures
from hnclip.data.images import ImageTransform
from hnclip.data.sampler import choose_captions
from hnclip.data.texts import TextTransform
from hnclip.data.views.named import IMAGE_VIEWS, TEXT_VIEWS
from hnclip.data.views.parts import PARTS, Material

FILLER = "a"  # stands where a record has no text; nobody reads what becomes of it


def join_texts(parts: Sequence[TextBatch], pad: int) -> TextBatch:
    """Several batches as one, as wide as the widest."""
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


def pad_texts(ids: Sequence[Sequence[int]], pad: int) -> TextBatch:
    """Rows of token ids, padded to the longest."""
    lengths = torch.tensor([len(row) for row in ids])
    padded = torch.full((len(ids), int(lengths.max())), pad)
    for row, tokens in enumerate(ids):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    return TextBatch(padded, lengths)


@dataclass(frozen=True)
class PairData:
    """Prepared views of N records with T captions, ready to be cut into batches.

    A pair is a picture and one of its captions: `chosen` says which, and `draw` chooses anew for an epoch. `truncated`
    says, per text view, how many texts were longer than the model's context.

    Shape:
        images: per view N pictures, [N, 3, H, W] uint8
        texts: token ids, of views by caption T rows, of any other N
        owner: [T], the record that each caption belongs to, in order
        chosen: [N], the row of "caption" that each record shows
        image_ids: [N], caption_ids: [T]; equal numbers mean pictures or captions that are the same to the model
        margin_text: [T, D] or None
        present: per view [N] or [T] bool, where records have it; views that all of them have are not listed
        parts: per view [N, K, P] bool, [N, K, 2] or [T, K, 2]
        text_ids: per text view other than the caption [N] or [T], equal for equal texts
    """

    records: Sequence[Record]
    images: Mapping[str, Pixels]
    texts: Mapping[str, Sequence[Sequence[int]]]
    owner: Tensor
    chosen: Tensor
    image_ids: Tensor
    caption_ids: Tensor
    pad: int
    truncated: Mapping[str, int] = field(default_factory=dict)
    margin_text: Tensor | None = None
    present: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    text_ids: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def ids(self) -> Tensor:
        """[N, 2]: the identities of each pair's picture and caption."""
        return torch.stack([self.image_ids, self.caption_ids[self.chosen]], dim=1)

    def draw(self, seed: int, epoch: int) -> PairData:
        """The same data with the captions of this epoch, one of each record."""
        counts = self.owner.bincount(minlength=len(self))  # [N]
        first = counts.cumsum(0) - counts  # [N]
        return replace(self, chosen=first + choose_captions(counts, seed, epoch))

    def all_different(self) -> PairData:
        """The same data, in which no image and no text is a duplicate of another."""
        return replace(self, image_ids=torch.arange(len(self)), caption_ids=torch.arange(len(self.owner)), text_ids={})

    def with_margin_text(self, vectors: Tensor) -> PairData:
        """The same data, carrying one frozen embedding for each caption."""
        if len(vectors) != len(self.owner):
            raise ValueError(f"vectors has {len(vectors)} rows for {len(self.owner)} captions")
        return replace(self, margin_text=vectors)

    def by_length(self, indices: Sequence[int]) -> list[int]:
        """The same pairs, short captions first: consecutive ones need little padding. Pairs of equal length keep their
        order."""
        captions = self.texts["caption"]
        return sorted(indices, key=lambda row: len(captions[int(self.chosen[row])]))

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.as_tensor(indices)
        captions = self.chosen[rows]  # [B]

        def rows_of(view: str) -> Tensor:
            return captions if view in TEXT_VIEWS and TEXT_VIEWS[view].by_caption else rows

        return Batch(
            {name: view[rows] for name, view in self.images.items()},
            {
                name: pad_texts([view[row] for row in rows_of(name).tolist()], self.pad)
                for name, view in self.texts.items()
            },
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
    progress: Progress = iter,
) -> PairData:
    """Decode, resize and tokenise the views of these records, once. Each record shows its first caption until `draw`.

    What a record lacks of a view, or has but cannot be decoded, is marked as absent; its picture and its captions it
    must have.

    Args:
        parts: names of `hnclip.data.views.parts.PARTS`.
        grid: patches along each side of the model's picture, for parts of pictures.
        cache: directory of the picture cache; without one the pictures are held in memory.
        progress: walks through the pictures that have to be decoded.
    """
    if not records:
        raise ValueError("records is empty: there is nothing to train or evaluate on")
    for name in image_views:
        if name not in IMAGE_VIEWS:
            raise ValueError(f"unknown image view {name!r}; known: {', '.join(IMAGE_VIEWS)}")
    for name in text_views:
        if name not in TEXT_VIEWS:
            raise ValueError(f"unknown text view {name!r}; known: {', '.join(TEXT_VIEWS)}")
    said = {name: _said(records, name) for name in dict.fromkeys(("caption", *text_views))}
    for name in said.keys() - {"caption"}:
        said[name] = _readable(said[name], text_transform)
    tokenized = {
        name: text_transform([FILLER if text is None else text for text in texts]) for name, texts in said.items()
    }
    absent = {name: torch.tensor([text is None for text in said[name]]) for name in text_views}
    images = {}
    for name in image_views:
        images[name], absent[name] = _shown(records, name, image_transform, cache, progress)
    counts = torch.tensor([len(record.captions) for record in records])  # [N]
    owner = torch.arange(len(records)).repeat_interleave(counts)  # [T]
    everyone = list(range(len(records)))

    def material(view: str) -> Material:
        rows = owner.tolist() if view in TEXT_VIEWS and TEXT_VIEWS[view].by_caption else everyone
        return Material(records, said.get(view, ()), rows, text_transform, image_transform, grid)

    wanted = [PARTS[name] for name in parts]
    return PairData(
        records=records,
        images=images,
        texts={name: tokenized[name].ids for name in text_views},
        owner=owner,
        chosen=counts.cumsum(0) - counts,
        image_ids=numbers(_contents(records, images.get("full"))),
        caption_ids=numbers(tokenized["caption"].ids),
        pad=text_transform.pad,
        truncated={name: tokenized[name].truncated for name in text_views},
        present={name: ~missing for name, missing in absent.items() if missing.any()},
        parts={part.view: part.find(material(part.view)) for part in wanted},
        text_ids={name: numbers(tokenized[name].ids) for name in text_views if name != "caption"},
    )


def _said(records: Sequence[Record], view: str) -> list[str | None]:
    """The texts of a view, a row for each caption or record."""
    kind, texts = TEXT_VIEWS[view], list[str | None]()
    for record in records:
        found = kind.texts(record)
        if len(found) != (count := len(record.captions) if kind.by_caption else 1):
            raise ValueError(f"record {record.id} has {len(found)} texts of view {view!r} for {count}")
        texts += found
    return texts


def _readable(texts: list[str | None], transform: TextTransform) -> list[str | None]:
    """The texts, but None for those in which a model finds no word."""
    try:
        transform([text for text in texts if text is not None])
    except ValueError:
        if len(texts) == 1:
            return [None]
        half = len(texts) // 2
        return _readable(texts[:half], transform) + _readable(texts[half:], transform)
    return texts


def _shown(
    records: Sequence[Record], view: str, transform: ImageTransform, cache: Path | None, progress: Progress
) -> tuple[Pixels, Tensor]:
    """The pictures of a view [N, 3, H, W], and where there is none [N]: the whole picture fills its place, because it
    is decoded anyway."""
    sources = {row: source for row, record in enumerate(records) if (source := IMAGE_VIEWS[view](record)) is not None}
    if view == "full":
        return decoded(list(sources.values()), transform, cache, progress), torch.zeros(len(records), dtype=torch.bool)
    loaded = load_pictures(list(sources.values()), transform, cache=cache, progress=progress)
    usable = {row: sources[row] for index, row in enumerate(sources) if index not in loaded.problems}
    missing = torch.tensor([row not in usable for row in range(len(records))])
    if not missing.any():
        return loaded.pixels, missing
    filled = [usable.get(row, record.image) for row, record in enumerate(records)]
    return decoded(filled, transform, cache), missing


def decoded(
    images: Sequence[ImageSource], transform: ImageTransform, cache: Path | None, progress: Progress = iter
) -> Pixels:
    """All of these pictures; one that cannot be used is an error. `data/sound.py` is for leaving some out."""
    loaded = load_pictures(images, transform, cache=cache, progress=progress)
    for problem in loaded.problems.values():
        raise ValueError(f"{problem.kind}: {problem.detail}")
    return loaded.pixels


def _contents(records: Sequence[Record], pixels: Pixels | None) -> Sequence[Hashable]:
    """What is equal for equal pictures: files with other names may be copies."""
    if pixels is None:
        return [record.image.key for record in records]
    if isinstance(pixels, Tensor):
        return [blake2b(picture.numpy().tobytes(), digest_size=16).digest() for picture in pixels]
    return pixels.rows.tolist()


def numbers(names: Sequence[Hashable]) -> Tensor:
    """Equal numbers for equal names, by first appearance."""
    known: dict[Hashable, int] = {}
    return torch.tensor([known.setdefault(name, len(known)) for name in names])
