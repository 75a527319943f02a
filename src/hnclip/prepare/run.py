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
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hnclip.config import Opening, ReadConfig, option_words
from hnclip.core import Box, InvalidImage, Problem, Record
from hnclip.data.decoding import cpu_count, decoding_threads, in_order
from hnclip.data.images import ImageTransform, preprocess_image, to_rgb
from hnclip.data.lexicon import CaptionFilter, filter_version, load_filter
from hnclip.data.manifest import Kind, manifest_path, record_mark, write_manifest
from hnclip.data.sources import open_data
from hnclip.data.texts import Splitting, split_sentences
from hnclip.data.validate import list_problems
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.encode.loop import encode_captions, encode_pixels
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
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


Maker = tuple[str, dict[str, Any], Callable[[Sequence[Record]], Made]]
"""What makes the content, for people and with all settings, and a function that makes it."""


def prepare_regions(
    data: str,
    *,
    opening: Opening | None = None,
    read: ReadConfig | None = None,
    proposer: str = "auto",
    weights: Path | None = None,
    model: str = "bundled",
    sentences: Splitting = "careful",
    split: str | None = None,
    replace: bool = False,
    batch: int = 128,
    workers: int | None = None,
    device: str = "auto",
) -> PrepareResult:
    """Find regions of the images, and the sentences of the captions that describe them.

    Args:
        data: as of `open_data`, read with `read`.
        opening: how the model is loaded that matches sentences to regions; of a run its best epoch.
        proposer: "sam", "felzenszwalb", "grid" or "felzenszwalb+grid". "auto": sam if `weights` are given, otherwise
            felzenszwalb+grid, for records without regions of their own.
        weights: directory of SAM's weights, as saved by transformers.
        sentences: how captions are split: "careful" knows decimals and abbreviations, "dots" is GOAL's `split(".")`.
        split: train if not given, all records if the data declare no splits.
        replace: overwrite a manifest instead of continuing it.
        batch: crops or sentences encoded at once.
        workers: images processed at once before they are encoded; the number of processors if not given.
    """
    count = cpu_count() if workers is None else workers

    @contextmanager
    def open_regions() -> Iterator[Maker]:
        automatic = "felzenszwalb+grid" if weights is None else "sam"
        name = automatic if proposer == "auto" else proposer
        with open_proposer(name, weights=weights, device=device, workers=count) as (find_boxes, settings):
            encoder = load(model, **vars(opening or Opening()), device=device)
            encoder.require_trained("matching regions")
            tool = {"proposer": settings, "model": model_fingerprint(encoder), "sentences": sentences}
            if name != "sam":
                log.info("these regions are not SAM's, which GOAL was published with")
            find = partial(_find_regions, encoder, find_boxes, sentences=sentences, batch=batch, workers=count)
            yield f"{name}, matched by {encoder.name}", tool, find

    # Unless a proposer is named, records with regions of their own keep them.
    return _prepare("regions", data, read, split, replace, open_regions, keep_own=proposer == "auto")


def prepare_text(
    data: str,
    *,
    read: ReadConfig | None = None,
    filter: str = "lexicon",
    split: str | None = None,
    replace: bool = False,
    workers: int = 1,
) -> PrepareResult:
    """Remove words of appearance (colours, materials, textures) from the captions.

    Args:
        data, read, split, replace: as of `prepare_regions`.
        filter: as of `load_filter`.
        workers: records filtered at once, for a function that waits for a service.
    """

    @contextmanager
    def open_filter() -> Iterator[Maker]:
        tool = {"filter": filter_version(filter)}
        yield filter, tool, partial(_filter, change=load_filter(filter), workers=workers)

    return _prepare("text", data, read, split, replace, open_filter)


def _prepare(
    kind: Kind,
    source: str,
    read: ReadConfig | None,
    split: str | None,
    overwrite: bool,
    open_maker: Callable[[], AbstractContextManager[Maker]],
    keep_own: bool = False,
) -> PrepareResult:
    """Make what the manifest of the data lacks, one record at a time; a killed process loses the current one."""
    read = read or ReadConfig()
    path = manifest_path(read, source, kind)
    data = open_data(source, read, splits=None if split is None else {split})
    chosen = split or ("train" if "train" in data.splits() else "all")
    # Unless the split was named, nothing is held out: a later training may hold out other records.
    records = data.part(chosen, validation_share=0.0 if split is None else read.validation_share)
    log.info(f"{counted(len(records), 'record')} of {source}, split {chosen}")
    wanted = [record for record in records if not (keep_own and record.regions)]
    done, problems, kept = list[tuple[Record, Any]](), list[Problem](), 0
    if wanted:
        with (
            open_maker() as (by, tool, make),
            write_manifest(path, kind, by=by, tool=tool, data=source, overwrite=overwrite) as manifest,
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
            raise ValueError("\n".join([f"nothing of {source} could be prepared:", *list_problems(problems)]))
    if kind == "regions":
        counts = {"regions": sum(len(content) for _, content in done)}
    else:
        pairs = [pair for record, content in done for pair in zip(record.captions, content)]
        counts = {"captions": len(pairs), "changed": sum(old != new for old, new in pairs)}
    method = "goal" if kind == "regions" else "structxlip"
    train = ["hnclip", "train", source, "--model", "MODEL", "--method", method]
    return PrepareResult(
        kind=kind,
        data=source,
        records=len(records),
        made=len(done) - kept,
        kept=kept,
        own=len(records) - len(wanted),
        counts=counts,
        problems=problems,
        manifest=path,
        next=shlex.join([*train, *option_words(read, ReadConfig(), "read.")]),
    )


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


def _find_regions(
    model: DualEncoder,
    find_boxes: FindBoxes,
    records: Sequence[Record],
    *,
    sentences: Splitting,
    batch: int,
    workers: int,
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
            parts = [part for caption in record.captions for part in split_sentences(caption, sentences)]
            reasons = model.text_transform.validate(distinct := list(dict.fromkeys(parts)))
            readable = [text for text, reason in zip(distinct, reasons) if reason is None]
            if isinstance(found, Problem):
                yield found
            elif not readable:
                yield Problem("empty caption", record.id, "no sentence of its captions holds a word")
            else:
                mark, boxes, pixels = found
                yield record.id, mark, match_sentences(model, boxes, pixels, readable, batch=batch)


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
