"""Parts of views by name: the patches of an image and the tokens of a caption that a readout pools.

Parts are found once, when data are prepared, and are part of the batches. Those with `official` in their names are
found as in released code; docs/methods.md lists the differences.
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

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hnclip.core import Box, Record
from hnclip.data.images import ImageTransform
from hnclip.data.texts import TextTransform
from hnclip.data.views import TEXT_VIEWS

Span = tuple[int, int]  # [start, stop)
NOTHING: Span = (0, 0)

OFFICIAL_PATCH = 16  # pixels of a patch in GOAL's released code, for every model
CHUNKS = 64  # most chunks of a caption
_CLAUSE = re.compile(r"[^.,;!?]+")
_WORD = re.compile(r"\b\w+\b")


@dataclass(frozen=True)
class PartContext:
    """What parts are found in.

    Args:
        records: N of them.
        sizes: [N, 2], width and height of their upright images.
        texts: of a text view, one for each caption or record; None where there is none.
        owner: the index of the record of each text.
        grid: patches along each side of the model's image; None if it has none.
    """

    records: Sequence[Record]
    sizes: np.ndarray
    texts: Sequence[str | None]
    owner: Sequence[int]
    text_transform: TextTransform
    image_transform: ImageTransform
    grid: int | None


@dataclass(frozen=True)
class Part:
    """Parts of one view: [N, K, P] bool for an image view, [rows, K, 2] integers (start, stop) for a text view. A part
    without a patch, or that stops where it starts, is absent."""

    view: str
    find: Callable[[PartContext], Tensor]


def _regions(context: PartContext, *, official: bool) -> Tensor:
    """[N, 1, P]: the patches that the best region of each record touches.

    Args:
        official: see `official_patches`, with patches of 16 pixels for every model. Their numbers are used for the
            model's own patches; numbers that it does not have are dropped.
    """
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
    """Columns and rows of the patches that a box of the upright image touches; both empty if it is cropped away.

    Follows `preprocess_image`: resized to whole pixels, then cropped. In fractions, because a box that ends at the
    border of a patch must not touch the next one.

    Args:
        size: width and height of the upright image.
        patch: side of a patch in pixels.
        side: patches along each side. Pixels beyond the last one touch none.
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
    """Columns and rows of the patches that GOAL's released code chooses for a box.

    It scales the box as if the whole image were as large as the box, without the crop, rounds the corners to whole
    pixels and clips them.

    Args:
        size: side of the model's image in pixels.
        patch, side: as in `patches_of`.
    """
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
    """The tokens of a text that hold any of its characters [start, stop), as positions in its ids.

    Args:
        offsets: from `TextTransform.offsets`.
        whole: a span that the context truncates is empty instead of shorter.
    """
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
    special tokens, so one late with a start and an end token; the last position of the context is never included.

    A sentence that starts beyond the context takes as many positions before that last one. An empty span, and a
    sentence that is not in the caption, where the released code fails, take the first positions after the start token.

    Args:
        before: the caption up to the sentence; None if it is not in the caption.
    """
    special, last = sum(transform.edges), transform.context - 1
    counts = [len(ids) for ids in transform.tokenizer([before or "", sentence], verbose=False)["input_ids"]]
    start, length = counts[0], max(1, counts[1] - special)
    start, stop = (max(1, last - length), last) if start > last else (start, min(start + length, last))
    return (start, stop) if before is not None and start < stop else (1, min(1 + length, transform.context))


def _chunks(context: PartContext, *, official: bool) -> Tensor:
    """[rows, S, 2]: the chunks of each filtered caption; those that the context truncates are dropped, as in the
    released code.

    Args:
        official: the view is the whole caption, in which the same spans are other words.
    """
    filtered = (text for record in context.records for text in TEXT_VIEWS["filtered"].texts(record))
    texts = [text or "" for text in (filtered if official else context.texts)]
    transform, found = context.text_transform, list[list[Span]]()
    for text, offsets in zip(texts, transform.offsets(texts)):
        windows = chunk_windows(transform.clean(text))
        spans = (token_span(offsets, start, stop, transform, whole=True) for start, stop in windows)
        found.append([span for span in spans if span != NOTHING])
    return _padded(found)


def chunk_windows(text: str) -> list[Span]:
    """The chunks of a text as characters: windows of a few words that slide through each clause, word by word, at most
    64. A clause of one word has none.

    Reference:
        StructXLIP's spans: clauses end at [.,;!?]; 2 words of a clause of up to 4, 3 up to 10, 4 up to 20, 5 up to 40,
        then 6.
    """
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
