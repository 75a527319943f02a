"""The views of a record by name, images and texts that an objective may declare, and parts of views: the patches of an
image and the tokens of a caption that a readout pools.

Parts with `official` in their names are found as in released code; hnclip docs methods lists the differences.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hnclip.core import Box, ImageSource, Record
from hnclip.data.image_sources import CropImage, EdgeImage
from hnclip.data.images import ImageTransform
from hnclip.data.texts import TextTransform, first_sentence

Span = tuple[int, int]  # [start, stop)
NOTHING: Span = (0, 0)

CROPS = 3  # most edge crops of an image
OFFICIAL_PATCH = 16  # pixels of a patch in GOAL's released code, for every model
CHUNKS = 64  # most chunks of a caption
_CLAUSE = re.compile(r"[^.,;!?]+")
_WORD = re.compile(r"\b\w+\b")


class TextView(NamedTuple):
    """Texts of a record: one for each of its captions, or one for the record; None where it has none."""

    texts: Callable[[Record], Sequence[str | None]]
    by_caption: bool = True


def _crop(record: Record, number: int = 0, edges: bool = False) -> ImageSource | None:
    if number >= len(record.regions):
        return None
    return CropImage(EdgeImage(record.image) if edges else record.image, record.regions[number].box)


IMAGE_VIEWS: dict[str, Callable[[Record], ImageSource | None]] = {
    "full": lambda record: record.image,
    "crop": _crop,
    "edge": lambda record: EdgeImage(record.image),
    **{f"edge_crop_{number + 1}": partial(_crop, number=number, edges=True) for number in range(CROPS)},
}
TEXT_VIEWS = {
    "caption": TextView(lambda record: record.captions),
    "short": TextView(lambda record: [record.short or first_sentence(caption) for caption in record.captions]),
    "sentence": TextView(lambda record: [record.regions[0].sentence if record.regions else None], by_caption=False),
    "filtered": TextView(lambda record: record.filtered or (None,) * len(record.captions)),
}


@dataclass(frozen=True)
class PartContext:
    """What parts are found in: N records, width and height [N, 2] of their upright images, the texts of a text view and
    the index of the record of each, the model's transforms, and the patches along each side of its image, if any."""

    records: Sequence[Record]
    sizes: np.ndarray
    texts: Sequence[str | None]
    owner: Sequence[int]
    text_transform: TextTransform
    image_transform: ImageTransform
    grid: int | None


class Part(NamedTuple):
    """Parts of one view: [N, K, P] bool for an image view, [rows, K, 2] integers (start, stop) for a text view. A part
    without a patch, or that stops where it starts, is absent."""

    view: str
    find: Callable[[PartContext], Tensor]


def _regions(context: PartContext, *, official: bool) -> Tensor:
    """[N, 1, P]: the patches that the best region of each record touches. The numbers of `official_patches`, which are
    of 16 pixels for every model, are used for the model's own patches; numbers that it does not have are dropped."""
    if context.grid is None:
        raise ValueError("parts of images are patches, and this model has no grid of them: use a ViT")
    transform, grid = context.image_transform, context.grid
    patch = OFFICIAL_PATCH if official else transform.size // grid
    side = max(1, transform.size // patch) if official else grid
    found = torch.zeros(len(context.records), 1, grid**2, dtype=torch.bool)
    for row, record in enumerate(context.records):
        if not record.regions:
            continue
        box = record.regions[0].box
        if official:
            columns, rows = official_patches(box, transform.size, patch, side)
        else:
            width, height = context.sizes[row].tolist()
            columns, rows = patches_of(box, (width, height), transform, patch, side)
        numbers = torch.tensor([[y * side + x for x in columns] for y in rows], dtype=torch.long).flatten()
        found[row, 0, numbers[numbers < grid**2]] = True
    return found


def patches_of(
    box: Box, size: tuple[int, int], transform: ImageTransform, patch: int, side: int
) -> tuple[range, range]:
    """Columns and rows of the patches that a box of the upright image, of this size, touches; both empty if it is
    cropped away. There are `side` patches of `patch` pixels; pixels beyond the last one touch none.

    Follows `preprocess_image`: resized to whole pixels, then cropped. In fractions, because a box that ends at the
    border of a patch must not touch the next one.
    """
    resized = transform.resized(*size)
    chosen = []
    for axis in (0, 1):
        crop = (resized[axis] - transform.size) // 2
        ends = (Fraction(box[axis + end] * resized[axis], size[axis]) - crop for end in (0, 2))
        start, stop = (min(max(end, Fraction(0)), Fraction(transform.size)) for end in ends)
        if start >= stop:
            return range(0), range(0)
        chosen.append(range(start // patch, min(side, -(-stop // patch))))
    return chosen[0], chosen[1]


def official_patches(box: Box, size: int, patch: int, side: int) -> tuple[range, range]:
    """Columns and rows of the patches that GOAL's released code chooses for a box: scaled as if the whole image were as
    large as the box, without the crop, with corners rounded to whole pixels of the model's image and clipped."""
    chosen = []
    for axis in (0, 1):
        length = max(1, box[axis + 2] - box[axis])
        start, stop = (round(box[axis + end] * size / length) for end in (0, 2))
        start, stop = min(max(start, 0), size - 1), min(max(stop, 0), size)
        chosen.append(range(start // patch, min(side, -(-stop // patch))))
    return chosen[0], chosen[1]


def _sentences(context: PartContext, *, official: bool) -> Tensor:
    """[rows, 1, 2]: the tokens of each caption that are the sentence of its record's best region."""
    transform, found = context.text_transform, list[list[Span]]()
    captions = [text or "" for text in context.texts]
    every: Iterable[Sequence[Span]] = repeat(()) if official else transform.offsets(captions)
    for caption, offsets, owner in zip(captions, every, context.owner):
        regions = context.records[owner].regions
        if not regions:
            found.append([])
            continue
        sentence, caption = transform.clean(regions[0].sentence).strip(), transform.clean(caption)
        start = find_sentence(caption, sentence)
        if official:
            found.append([late_span(None if start is None else caption[:start], sentence, transform)])
        else:
            found.append([] if start is None else [token_span(offsets, start, start + len(sentence), transform)])
    return _padded(found)


def find_sentence(caption: str, sentence: str) -> int | None:
    """Where a sentence first occurs in a caption at word boundaries; None if it does not."""
    start = caption.find(sentence) if sentence else -1
    while start >= 0:
        before, after = caption[:start][-1:], caption[start + len(sentence) :][:1]
        if not (before.isalnum() and sentence[0].isalnum()) and not (after.isalnum() and sentence[-1].isalnum()):
            return start
        start = caption.find(sentence, start + 1)
    return None


def token_span(
    offsets: Sequence[Span], start: int, stop: int, transform: TextTransform, *, whole: bool = False
) -> Span:
    """The tokens of a text that hold any of its characters [start, stop), as positions in its ids. With `whole`, a span
    that the context truncates is empty instead of shorter."""
    before, after = transform.edges
    room = transform.context - before - after
    # Some tokenizers count the space before a word to its token.
    first = bisect_right(offsets, start, key=itemgetter(1))  # tokens that end before
    last = bisect_left(offsets, stop, key=itemgetter(0))  # tokens that begin before the end
    if first >= last or first >= room or (whole and last > room):
        return NOTHING
    return before + first, before + min(last, room)


def late_span(before: str | None, sentence: str, transform: TextTransform) -> Span:
    """The tokens of a sentence as GOAL's released code counts them: after those of the text before it including its
    special tokens, so one late with a start and an end token. The last position of the context is never included; a
    sentence that starts beyond takes the positions before it. An empty span, and a sentence that is not in the caption
    (`before` is None), where the released code fails, take the first positions after the start token."""
    special, last = sum(transform.edges), transform.context - 1
    counts = [len(ids) for ids in transform.tokenizer([before or "", sentence], verbose=False)["input_ids"]]
    start, length = counts[0], max(1, counts[1] - special)
    start, stop = (max(1, last - length), last) if start > last else (start, min(start + length, last))
    return (start, stop) if before is not None and start < stop else (1, min(1 + length, transform.context))


def _chunks(context: PartContext, *, official: bool) -> Tensor:
    """[rows, S, 2]: the chunks of each filtered caption; those that the context truncates are dropped, as in the
    released code. There the view is the whole caption, in which the same spans are other words."""
    filtered = (text for record in context.records for text in TEXT_VIEWS["filtered"].texts(record))
    texts = [text or "" for text in (filtered if official else context.texts)]
    transform, found = context.text_transform, list[list[Span]]()
    for text, offsets in zip(texts, transform.offsets(texts)):
        windows = chunk_windows(transform.clean(text))
        spans = (token_span(offsets, start, stop, transform, whole=True) for start, stop in windows)
        found.append([span for span in spans if span != NOTHING])
    return _padded(found)


def chunk_windows(text: str) -> list[Span]:
    """StructXLIP's chunks of a text as characters: windows that slide through each clause, word by word, at most 64. A
    window has 2 words of a clause of up to 4, 3 up to 10, 4 up to 20, 5 up to 40, then 6; a single word has none."""
    found = []
    for clause in _CLAUSE.finditer(text):
        words = list(_WORD.finditer(text, *clause.span()))
        window = 2 + sum(len(words) > limit for limit in (4, 10, 20, 40))
        found += [(first.start(), last.end()) for first, last in zip(words, words[window - 1 :])]
    return found[:CHUNKS]


def _padded(found: Sequence[Sequence[Span]]) -> Tensor:
    """[rows, K, 2] int16, with empty spans where a row has fewer than the longest."""
    rows = [torch.tensor(spans or [NOTHING], dtype=torch.int16) for spans in found]
    return pad_sequence(rows, batch_first=True)


PARTS: dict[str, Part] = {
    "region": Part("full", partial(_regions, official=False)),
    "region_official": Part("full", partial(_regions, official=True)),
    "sentence_span": Part("caption", partial(_sentences, official=False)),
    "sentence_span_official": Part("caption", partial(_sentences, official=True)),
    "chunk_spans": Part("filtered", partial(_chunks, official=False)),
    "chunk_spans_official": Part("caption", partial(_chunks, official=True)),
}
