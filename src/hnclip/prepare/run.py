"""`hnclip prepare`: regions of images, or captions without words of appearance.

Boxes are proposed for each image and matched to the sentences of its captions by a model's similarity.

Reference:
    GOAL's local image–sentence matching (LISM): every sentence goes to the most similar candidate, the whole image or
    one of its crops. Sentences that the whole image fits best describe no part and are dropped.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hnclip.config import ReadConfig, option_words
from hnclip.core import Box, InvalidImage, Problem, Record
from hnclip.data.decoding import cpu_count, decoding_threads, in_order
from hnclip.data.images import ImageTransform, preprocess_image, to_rgb
from hnclip.data.lexicon import CaptionFilter, filter_version, load_filter
from hnclip.data.manifest import Kind, manifest_path, record_mark, write_manifest
from hnclip.data.sources import open_data
from hnclip.data.texts import split_sentences
from hnclip.data.validate import list_problems
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.encode.loop import encode_captions, encode_pixels
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, models_of
from hnclip.options import PrepareRegions, PrepareText
from hnclip.prepare.proposers import FindBoxes, open_proposer
from hnclip.util.console import progress
from hnclip.util.text import counted

log = logging.getLogger(__name__)

Made = Generator[tuple[str, str, Any] | Problem, None, None]  # id, mark and content of lines of the manifest


@dataclass(frozen=True)
class PrepareResult:
    """What a call of `hnclip prepare` did.

    Args:
        records: of the split; `made` now, `kept` from earlier calls, `own` have regions of their own and were left as
            they are. The others have `problems`.
        counts: of what the manifest holds for these records, by name.
        next: the command that uses it.
    """

    kind: Kind
    data: str
    records: int
    made: int
    kept: int
    own: int
    counts: Mapping[str, int]
    problems: Sequence[Problem]
    manifest: Path
    next: str

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "manifest": str(self.manifest), "problems": [asdict(found) for found in self.problems]}

    def to_text(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in self.counts.items())
        lines = [f"{self.kind} of {counted(self.records, 'record')} of {self.data}:"]
        lines += [f"  {self.own:,} have regions of their own; name a --proposer to find others"] * bool(self.own)
        if self.problems:
            lines += [f"  {len(self.problems):,} skipped:", *list_problems(self.problems)]
        if self.made or self.kept:
            lines += [f"  {self.made:,} prepared now, {self.kept:,} before: {counts}", f"manifest: {self.manifest}"]
        return "\n".join([*lines, f"next: {self.next}"])


def prepare(options: PrepareRegions | PrepareText) -> PrepareResult:
    """Make what the manifest of the data lacks, one record at a time; a killed process loses the current one."""
    kind: Kind = "regions" if isinstance(options, PrepareRegions) else "text"
    read = options.read if options.out is None else replace(options.read, prepared=str(options.out))
    path = manifest_path(read, options.data, kind)
    data = open_data(options.data, options.read, splits=None if options.split is None else {options.split})
    split = options.split or ("train" if "train" in data.splits() else "all")
    # Unless the split was named, nothing is held out: a later training may hold out other records.
    records = data.part(split, validation_share=0.0 if options.split is None else options.read.validation_share)
    log.info(f"{counted(len(records), 'record')} of {options.data}, split {split}")
    # Unless a proposer is named, records with regions of their own keep them.
    keep_own = isinstance(options, PrepareRegions) and options.proposer == "auto"
    wanted = [record for record in records if not (keep_own and record.regions)]
    done, problems, kept = list[tuple[Record, Any]](), list[Problem](), 0
    if wanted:
        with (
            _open_regions(options) if isinstance(options, PrepareRegions) else _open_filter(options) as (
                by,
                tool,
                make,
            ),
            write_manifest(path, kind, by=by, tool=tool, data=options.data, overwrite=options.replace) as manifest,
        ):
            pending = [record for record in wanted if manifest.current(record) is None]
            kept = len(wanted) - len(pending)
            log.info(f"{kind} by {by}")
            with progress("records", len(wanted), kept) as bar, closing(make(pending)) as stream:
                for made in stream:
                    if isinstance(made, Problem):
                        problems.append(made)
                    else:
                        manifest.append(*made)
                    bar.advance()
            done = [(record, content) for record in wanted if (content := manifest.current(record)) is not None]
        if not done and len(wanted) == len(records):
            raise ValueError("\n".join([f"nothing of {options.data} could be prepared:", *list_problems(problems)]))
    if kind == "regions":
        counts = {"regions": sum(len(content) for _, content in done)}
    else:
        pairs = [pair for record, content in done for pair in zip(record.captions, content)]
        counts = {"captions": len(pairs), "changed": sum(old != new for old, new in pairs)}
    train = ["hnclip", "train", "--objective", "goal" if kind == "regions" else "structxlip", "--data", options.data]
    return PrepareResult(
        kind=kind,
        data=options.data,
        records=len(records),
        made=len(done) - kept,
        kept=kept,
        own=len(records) - len(wanted),
        counts=counts,
        problems=problems,
        manifest=path,
        next=shlex.join([*train, *option_words(read, ReadConfig(), "read.")]),
    )


Opened = Iterator[tuple[str, dict[str, Any], Callable[[Sequence[Record]], Made]]]
"""What makes the content, for people and with all settings, and a function that makes it."""


@contextmanager
def _open_filter(options: PrepareText) -> Opened:
    tool = {"filter": filter_version(options.filter)}
    yield options.filter, tool, partial(_filter, change=load_filter(options.filter), workers=options.workers)


def _filter(records: Sequence[Record], change: CaptionFilter, workers: int) -> Made:
    """Threads wait for the filter, which may ask a service."""

    def filtered(record: Record) -> tuple[str, str, Any]:
        try:
            return record.id, record_mark("text", record), [change(caption) for caption in record.captions]
        except Exception as error:  # the user's function may raise anything
            raise ValueError(
                f"the filter failed on a caption of {record.id} ({type(error).__name__}: {error}); what was done "
                "before is kept, and the same command continues"
            ) from error

    pool = ThreadPoolExecutor(workers)
    try:
        yield from in_order(pool, filtered, records, 4 * workers)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _open_regions(options: PrepareRegions) -> Opened:
    automatic = "felzenszwalb+grid" if options.weights is None else "sam"
    name = automatic if options.proposer == "auto" else options.proposer
    workers = options.workers or cpu_count()
    with open_proposer(name, weights=options.weights, device=options.device, workers=workers) as (find_boxes, settings):
        model = load(models_of(options.model)[0][1], **vars(options.opening), device=options.device)
        model.require_trained("matching regions")
        tool = {"proposer": settings, "model": model_fingerprint(model), "sentences": options.sentences}
        if name != "sam":
            log.info("these regions are not SAM's, which GOAL was published with")
        find = partial(_find_regions, model=model, find_boxes=find_boxes, options=options, workers=workers)
        yield f"{name}, matched by {model.name}", tool, find


def _find_regions(
    records: Sequence[Record], model: DualEncoder, find_boxes: FindBoxes, options: PrepareRegions, workers: int
) -> Made:
    """Threads decode, propose and crop the next images while the model encodes."""

    def candidates(record: Record) -> tuple[str, list[Box], Tensor] | Problem:
        try:
            mark = record_mark("regions", record)  # before it is read: if it changes in between, it is made again
            image = to_rgb(record.image.load())
            return mark, *crop_candidates(image, find_boxes(image), model.image_transform)
        except InvalidImage as error:
            return Problem(error.kind, record.id, str(error))

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
    """The boxes that are not too thin for the model, and [1 + P, 3, S, S], the whole image and their crops."""
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
        pixels: of `crop_candidates`.
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
