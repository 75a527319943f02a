"""Regions: boxes are proposed for each image and matched to the sentences of its captions by a model's similarity.

Reference:
    GOAL's local image–sentence matching (LISM): every sentence goes to the most similar candidate, the whole image or
    one of its crops. Sentences that the whole image fits best describe no part and are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hnclip.core import Box, InvalidImage, Problem, Record
from hnclip.data.decoding import cpu_count, decoding_threads, in_order
from hnclip.data.images import ImageTransform, preprocess_image, to_rgb
from hnclip.data.manifest import record_mark
from hnclip.data.texts import split_sentences
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.encode.loop import encode_captions, encode_pixels
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, models_of
from hnclip.options import PrepareRegions
from hnclip.prepare.proposers import FindBoxes, open_proposer

log = logging.getLogger(__name__)

Made = tuple[str, str, Any]  # id, mark and content of a line of the manifest
Make = Callable[[Sequence[Record]], Generator[Made | Problem, None, None]]


@contextmanager
def open_regions(options: PrepareRegions) -> Iterator[tuple[str, dict[str, Any], Make]]:
    """Names of proposer and model, all settings, and what finds the regions of records."""
    automatic = "felzenszwalb+grid" if options.weights is None else "sam"
    name = automatic if options.proposer == "auto" else options.proposer
    workers = options.workers or cpu_count()
    with open_proposer(name, weights=options.weights, device=options.device, workers=workers) as (find_boxes, settings):
        model = load(models_of(options.model)[0][1], **vars(options.opening), device=options.device)
        model.require_trained("matching regions")
        tool = {"proposer": settings, "model": model_fingerprint(model), "sentences": options.sentences}
        if name != "sam":
            log.info("these regions are not SAM's, which GOAL was published with")
        by = f"{name}, matched by {model.name}"
        yield by, tool, partial(find_regions, model=model, find_boxes=find_boxes, options=options)


def find_regions(
    records: Sequence[Record], *, model: DualEncoder, find_boxes: FindBoxes, options: PrepareRegions
) -> Generator[Made | Problem, None, None]:
    """Id, mark and regions of each record, or why it has none. Threads decode, propose and crop the next images while
    the model encodes."""

    def candidates(record: Record) -> tuple[str, list[Box], Tensor] | Problem:
        try:
            mark = record_mark("regions", record)  # before it is read: if it changes in between, it is made again
            image = to_rgb(record.image.load())
            return mark, *crop_candidates(image, find_boxes(image), model.image_transform)
        except InvalidImage as error:
            return Problem(error.kind, record.id, str(error))

    workers = options.workers or cpu_count()
    with decoding_threads(workers) as pool:
        # Each of those ahead may hold a large image.
        for record, found in zip(records, in_order(pool, candidates, records, workers + 2)):
            parts = [part for caption in record.captions for part in split_sentences(caption, options.sentences)]
            reasons = model.text_transform.validate(sentences := list(dict.fromkeys(parts)))
            readable = [text for text, reason in zip(sentences, reasons) if reason is None]
            if isinstance(found, Problem):
                yield found
            elif not readable:
                yield Problem("empty caption", record.id, "no sentence of its captions holds a word")
            else:
                mark, boxes, pixels = found
                yield record.id, mark, match_sentences(model, boxes, pixels, readable, batch=options.batch)


def crop_candidates(image: Image.Image, boxes: Sequence[Box], transform: ImageTransform) -> tuple[list[Box], Tensor]:
    """The boxes that are not too thin for the model, and the pixels of the whole image and of their crops.

    Shape:
        [1 + P, 3, S, S] uint8, the whole image first
    """
    kept, pixels = [], [preprocess_image(image, transform)]
    for box in boxes:
        try:
            pixels.append(preprocess_image(image.crop(box), transform))
            kept.append(box)
        except InvalidImage:
            continue
    return kept, torch.stack(pixels)


def match_sentences(
    model: DualEncoder, boxes: Sequence[Box], pixels: Tensor, sentences: Sequence[str], *, batch: int = 128
) -> list[dict[str, Any]]:
    """The regions of an image as a manifest keeps them, most similar first. Several sentences may share a box.

    Args:
        pixels: [1 + P, 3, S, S], the whole image and the crops of the boxes.
        sentences: at least one; those longer than the model's context are cut.
        batch: crops or sentences that are encoded at once.
    """
    image = encode_pixels(model, pixels, batch=batch)  # [1 + P, D]
    text = encode_captions(model, model.text_transform(sentences), batch=batch)  # [S, D]
    scores = model.scale.detach().float() * (text @ image.T)  # [S, 1 + P]
    best, which = scores.max(dim=1)  # [S]; of equal ones the first, which may be the whole image
    found = [
        {"box": boxes[index - 1], "sentence": sentence, "score": score}
        for sentence, score, index in zip(sentences, best.tolist(), which.tolist())
        if index > 0
    ]
    return sorted(found, key=lambda region: -region["score"])
