"""Parts of views by name: which patches of a picture, which tokens of a caption a readout pools.

Parts are found once, when data are prepared, and travel with the batches. Those with `official` in their names are
found as released code finds them; docs/methods.md says what is different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from hnclip.core import Record
from hnclip.data.images import ImageTransform
from hnclip.data.texts import TextTransform
from hnclip.data.views.boxes import model_box, official_patches, patches_of
from hnclip.data.views.named import TEXT_VIEWS
from hnclip.data.views.spans import Span, chunk_windows, find_sentence, late_span, token_span

OFFICIAL_PATCH = 16  # pixels of a patch in GOAL's released code, whatever the model has
SPAN = torch.int16  # of token positions: of long captions there are up to 64 spans each


@dataclass(frozen=True)
class Material:
    """What parts are found in.

    Args:
        records: N of them.
        texts: of a text view its texts, a row for each caption or record; None where there is none.
        owner: the record, by number, that each of these rows belongs to.
        grid: patches along each side of the model's picture; None if the model does not say.
    """

    records: Sequence[Record]
    texts: Sequence[str | None]
    owner: Sequence[int]
    text_transform: TextTransform
    image_transform: ImageTransform
    grid: int | None


@dataclass(frozen=True)
class Part:
    """Parts of one view: [N, K, P] bool of an image view, [rows, K, 2] integers of a text view (start, stop). A part
    without a patch, or that stops where it starts, is absent."""

    view: str
    find: Callable[[Material], Tensor]


def _regions(material: Material, *, official: bool) -> Tensor:
    """[N, 1, P]: the patches that the best region of each record touches.

    Args:
        official: as GOAL's released code: see `official_patches`, in patches of 16 pixels for every model. Their
            numbers are read in the order of the model's own patches; numbers that it does not have are dropped.
    """
    if material.grid is None:
        raise ValueError("parts of images are patches, and this model has no grid of them: use a ViT")
    transform, grid = material.image_transform, material.grid
    patch = OFFICIAL_PATCH if official else transform.size // grid
    side = max(1, transform.size // patch) if official else grid
    found = torch.zeros(len(material.records), 1, grid**2, dtype=torch.bool)
    for row, record in enumerate(material.records):
        if not record.regions:
            continue
        box = record.regions[0].box
        if official:
            columns, rows = official_patches(box, transform.size, patch, side)
        elif placed := model_box(box, record.image.shape(), transform):
            columns, rows = patches_of(placed, patch, side)
        else:
            continue
        numbers = torch.tensor([[y * side + x for x in columns] for y in rows], dtype=torch.long).flatten()
        found[row, 0, numbers[numbers < grid**2]] = True
    return found


def _sentences(material: Material, *, official: bool) -> Tensor:
    """[rows, 1, 2]: the tokens of each caption that are the sentence of its record's best region."""
    transform, found = material.text_transform, list[list[Span]]()
    captions = [text or "" for text in material.texts]
    every: Iterable[Sequence[Span]] = repeat(()) if official else transform.offsets(captions)
    for caption, offsets, owner in zip(captions, every, material.owner):
        regions = material.records[owner].regions
        if not regions:
            found.append([])
            continue
        sentence, caption = transform.clean(regions[0].sentence).strip(), transform.clean(caption)
        start = find_sentence(caption, sentence)
        if official:
            before = "" if start is None else caption[:start]
            found.append([late_span(before, sentence, transform, found=start is not None)])
        else:
            found.append([] if start is None else [token_span(offsets, start, start + len(sentence), transform)])
    return _padded(found)


def _chunks(material: Material) -> Tensor:
    """[rows, S, 2]: the chunks of each text of the view."""
    return _padded(_chunk_spans(material.texts, material.text_transform))


def _misaligned_chunks(material: Material) -> Tensor:
    """[rows, S, 2]: the chunks of each filtered caption, to be read from the whole one, where they mean other words."""
    texts = [text for record in material.records for text in TEXT_VIEWS["filtered"].texts(record)]
    return _padded(_chunk_spans(texts, material.text_transform))


def _chunk_spans(texts: Sequence[str | None], transform: TextTransform) -> list[list[Span]]:
    """Spans of whole chunks: one that the context cuts is dropped, as the released code's check of bounds does."""
    there = [text for text in texts if text is not None]
    offsets, found = transform.offsets(there), list[list[Span]]()
    for text in texts:
        if text is None:
            found.append([])
            continue
        own, spans = next(offsets), list[Span]()
        for start, stop in chunk_windows(transform.clean(text)):
            span = token_span(own, start, stop, transform, whole=True)
            if span[0] < span[1]:
                spans.append(span)
        found.append(spans)
    return found


def _padded(found: Sequence[Sequence[Span]]) -> Tensor:
    """[rows, K, 2]: as many spans as the row with most of them has, at least one; those that are added are empty."""
    width = max([1, *(len(spans) for spans in found)])
    padded = torch.zeros(len(found), width, 2, dtype=SPAN)
    for row, spans in enumerate(found):
        if spans:
            padded[row, : len(spans)] = torch.tensor(spans, dtype=SPAN)
    return padded


PARTS: dict[str, Part] = {
    "region": Part("full", partial(_regions, official=False)),
    "region_official": Part("full", partial(_regions, official=True)),
    "sentence_span": Part("caption", partial(_sentences, official=False)),
    "sentence_span_official": Part("caption", partial(_sentences, official=True)),
    "chunk_spans": Part("filtered", _chunks),
    "chunk_spans_official": Part("caption", _misaligned_chunks),
}
