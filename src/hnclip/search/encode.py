"""Bulk encoding: pictures and captions into a directory of vectors, resumable, by any number of processes.

Records are cut into shards by position, and a process makes those of its partition (search/shards.py). Batches never
reach from one shard into the next, so a shard's bytes do not depend on who makes it or on what was made before.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hnclip.command import differences
from hnclip.config import ReadConfig
from hnclip.core import ImageSource, Problem, Record
from hnclip.data.image_cache import LoadedImages, cache_directory, load_images
from hnclip.data.images import ImageTransform
from hnclip.data.records import DataSet
from hnclip.data.validate import check_rows, check_share, drop_unreadable
from hnclip.encode.loop import encode_captions
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, models_of
from hnclip.options import Encode, Opening
from hnclip.search.fingerprint import model_fingerprint, pictures_fingerprint, records_fingerprint
from hnclip.search.shards import (
    LEFT_OUT,
    Job,
    Shard,
    claim,
    missing_shards,
    missing_text,
    read_shard,
    remove_shard,
    shard_directory,
    write_manifest,
    write_shard,
)
from hnclip.search.sources import open_source
from hnclip.util.console import progress
from hnclip.util.device import find_device
from hnclip.util.text import counted

log = logging.getLogger(__name__)

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Outcome:
    """What a call did, and how far the directory is.

    `encoded` and `kept` count the shards of this partition that were made now, or were there already; `missing` are
    those of all partitions that are not there yet, and `finish` the command that makes them. Once the directory is
    complete there is its `manifest`.
    """

    out: Path
    partition: str
    shards: int
    encoded: int
    kept: int
    missing: tuple[int, ...]
    finish: str
    seconds: float
    manifest: Mapping[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        counts = (
            {name: self.manifest[name] for name in ("rows", "captions", "truncated", "left_out")}
            if self.manifest
            else {}
        )
        own = {name: value for name, value in vars(self).items() if name not in ("out", "manifest")}
        return {"out": str(self.out), "complete": self.manifest is not None, **own, **counts}

    def to_text(self) -> str:
        made = (
            f"encoded {counted(self.encoded, 'shard')} in {self.seconds:.0f} s" if self.encoded else "nothing to encode"
        )
        there = f", {self.kept} of {counted(self.encoded + self.kept, 'shard')} there already" if self.kept else ""
        if self.manifest is None:
            what = missing_text(self.missing, self.shards)
            return f"{made}{there}\n{what}: other partitions make them, or\n  {self.finish}"
        pictures, captions = (
            counted(self.manifest[name], what) for name, what in (("rows", "picture"), ("captions", "caption"))
        )
        held = {"both": f"{pictures}, {captions}", "images": pictures, "captions": f"{captions} of {pictures}"}
        lines = [f"{made}{there}", f"complete: {self.out}: {held[self.manifest['only']]}"]
        if lost := self.manifest["left_out"]:
            lines.append(f"{counted(lost, 'record')} left out, see {self.out / LEFT_OUT}")
        if cut := self.manifest["truncated"]:
            lines.append(f"{counted(cut, 'caption')} cut at the model's context")
        return "\n".join(lines)


class Encoder:
    """Data and model of a job, opened once; makes one shard after the other. Every engine works with this."""

    def __init__(self, options: Encode) -> None:
        if options.threads:
            torch.set_num_threads(options.threads)
        self.options = options
        self.data = open_source(options.data, options.read, split=options.split, only=options.only)
        check_rows(self.data, largest=options.read.max_bad)
        self.model = load(models_of(options.model)[0][1], **vars(options.opening)).eval()
        self.model.require_trained("encoding")
        self.job = _job(options, self.data, self.model)
        self._lost, self._problems = 0, list[Problem]()

    def records(self, number: int) -> tuple[Record, ...]:
        return self.data.records[self.job.rows(number)]

    def pending(self, numbers: Iterable[int]) -> list[int]:
        """Those shards that are not there, made by this job from the pictures as they are now."""
        found = {number: self._current(number) for number in numbers}
        for shard in found.values():
            if shard is not None:
                self._count(shard)
        return [number for number, shard in found.items() if shard is None]

    def make(self, number: int, advance: Advance) -> None:
        """Encode a shard and put it in place, unless it is there by now."""
        out = self.options.out
        if self._current(number) is not None:
            return
        if shard_directory(out, number).exists():
            remove_shard(out, number)
        about = {"job": self.job.fingerprint, "pictures": self._stamp(number)}  # before the pictures are read
        shard = encode_records(self.records(number), self.model, self.options, self.job.width, advance)
        self._count(write_shard(out, number, shard, about))

    def finish(self) -> dict[str, Any] | None:
        """The manifest, written if every shard is there; else None."""
        shards = []
        for number in range(self.job.shards):
            found = self._found(number)
            if found is None:
                return None
            shards.append(found)
        problems = [Problem(**problem) for shard in shards for problem in shard["problems"]]
        self._check_lost(sum(map(_lost, shards)), problems)
        return write_manifest(self.options.out, self.job, shards, [*self.data.problems, *problems])

    def _current(self, number: int) -> dict[str, Any] | None:
        found = self._found(number)
        return found if found is not None and found["pictures"] == self._stamp(number) else None

    def _found(self, number: int) -> dict[str, Any] | None:
        out = self.options.out
        found = read_shard(out, number)
        if found is not None and found["job"] != self.job.fingerprint:
            raise ValueError(
                f"shard {number} of {out} is of another model, other data or other options: two different calls wrote "
                f"into one directory. Remove {shard_directory(out, number)} and go on with\n  {self.job.finish(out)}"
            )
        return found

    def _count(self, shard: Mapping[str, Any]) -> None:
        """What is lost here is lost for all partitions: beyond the limit there is no need to go on."""
        self._lost += _lost(shard)
        self._problems += [Problem(**problem) for problem in shard["problems"]]
        self._check_lost(self._lost, self._problems)

    def _check_lost(self, lost: int, problems: Sequence[Problem]) -> None:
        largest = 0.0 if self.data.exact else self.options.read.max_bad
        total = len(self.data.records)
        check_share(lost, total, problems, what="records", largest=largest, name=self.data.name)

    def _stamp(self, number: int) -> str:
        return "" if self.options.only == "captions" else pictures_fingerprint(self.records(number))


def encode(options: Encode) -> Outcome:
    """Make the shards of a partition that are not there yet; whoever makes the last one completes the directory."""
    start = time.monotonic()
    if options.engine == "ray":
        from hnclip.search.ray_engine import import_ray, ray_shards

        import_ray()  # said before the model is opened
        device = torch.device("cpu")  # actors have devices of their own
    else:
        device = find_device(options.device)
    encoder = Encoder(options)
    job, out = encoder.job, options.out
    claim(out, job)
    log.info(f"model: {job.source}; data: {job.records:,} records of {job.data} in {counted(job.shards, 'shard')}")
    part, parts = options.part
    own = range(part, job.shards, parts)
    pending = encoder.pending(own)
    items = {number: _items(encoder.records(number), options) for number in own}
    done = sum(items.values()) - sum(items[number] for number in pending)
    with progress("images and captions", sum(items.values()), done) as bar:
        if options.engine == "ray":
            for number in ray_shards(options, pending):
                bar.advance(items[number])
        else:
            encoder.model.to(device)
            for number in pending:
                encoder.make(number, bar.advance)
    manifest = encoder.finish()
    missing = [] if manifest else missing_shards(out, job)
    if manifest is None and not missing:  # another process put the last one in place just now
        manifest = encoder.finish()
    return Outcome(
        out=out,
        partition=options.partition,
        shards=job.shards,
        encoded=len(pending),
        kept=len(own) - len(pending),
        missing=tuple(missing),
        finish=job.finish(out),
        seconds=time.monotonic() - start,
        manifest=manifest,
    )


def encode_records(
    records: Sequence[Record], model: DualEncoder, options: Encode, width: int, advance: Advance
) -> Shard:
    """The vectors of these records; those that cannot be used are left out, as in training and evaluation.

    Memory: the vectors, the captions' tokens, and two batches of pictures.

    Args:
        width: of a vector.
        advance: told how many pictures and captions were worked off.
    """
    total = len(records)
    problems: list[Problem] = []
    images = captions = None
    owners = np.zeros(0, np.int64)
    truncated = 0
    if options.only != "images":
        records, problems = drop_unreadable(records, model.text_transform)
    if options.only != "captions":
        records, images, bad = _encode_pictures(records, model, options, width, advance)
        problems += bad
    if options.only != "images":
        tokenized = model.text_transform([caption for record in records for caption in record.captions])
        truncated = tokenized.truncated
        owners = np.repeat(np.arange(len(records)), [len(record.captions) for record in records])  # [T]

        def walk(steps: range) -> Iterator[int]:
            for step in steps:
                yield step
                advance(min(options.batch, len(owners) - step))

        captions = np.zeros((0, width), options.dtype)
        if len(owners):
            found = encode_captions(model, tokenized, batch=options.batch, progress=walk).cpu()  # [T, D]
            captions = found.numpy().astype(options.dtype)
    return Shard(records, images, captions, owners, total - len(records), truncated, problems)


def _encode_pictures(
    records: Sequence[Record], model: DualEncoder, options: Encode, width: int, advance: Advance
) -> tuple[list[Record], np.ndarray, list[Problem]]:
    """Those records whose pictures can be used, and their vectors [I, D]."""
    kept: list[Record] = []
    problems: list[Problem] = []
    parts = [torch.zeros(0, width)]
    cache = cache_directory(options.read.cache) if options.cache else None
    images = [record.image for record in records]
    pending: torch.Tensor | None = None
    with torch.no_grad():
        for start, loaded in _batches(images, model.image_transform, options, cache):
            if pending is not None:
                parts.append(pending.float().cpu())  # an accelerator has worked on it while `loaded` was decoded
            pending = model.encode_images(loaded.pixels[:].to(model.device)).vectors if loaded.kept else None
            kept += [records[start + index] for index in loaded.kept]
            problems += [replace(bad, where=records[start + index].id) for index, bad in loaded.problems.items()]
            advance(min(options.batch, len(records) - start))
        if pending is not None:
            parts.append(pending.float().cpu())
    return kept, torch.cat(parts).numpy().astype(options.dtype), problems


def _batches(
    images: Sequence[ImageSource], transform: ImageTransform, options: Encode, cache: Path | None
) -> Iterator[tuple[int, LoadedImages]]:
    """Pictures by position, `batch` at a time: what can be used of each batch does not change the others."""
    starts = range(0, len(images), options.batch)
    if cache is None:
        for start in starts:
            part = images[start : start + options.batch]
            yield start, load_images(part, transform, cache=None, workers=options.threads or None)
        return
    loaded = load_images(images, transform, cache=cache, workers=options.threads or None)
    for start in starts:
        low, high = np.searchsorted(loaded.kept, [start, start + options.batch])
        yield (
            start,
            LoadedImages(
                loaded.pixels.select(range(low, high)),
                tuple(index - start for index in loaded.kept[low:high]),
                loaded.sizes[low:high],
                {at - start: bad for at, bad in loaded.problems.items() if start <= at < start + options.batch},
            ),
        )


def _lost(shard: Mapping[str, Any]) -> int:
    return shard["records"] - shard["rows"]


def _items(records: Sequence[Record], options: Encode) -> int:
    """Pictures and captions to encode."""
    pictures = 0 if options.only == "captions" else len(records)
    return pictures + (0 if options.only == "images" else sum(len(record.captions) for record in records))


def _job(options: Encode, data: DataSet, model: DualEncoder) -> Job:
    return Job(
        model=options.model,
        source=model.source,
        data=data.name,
        command=_command(options),
        model_fingerprint=model_fingerprint(model),
        data_fingerprint=records_fingerprint(data.records),
        split=options.split,
        records=len(data.records),
        only=options.only,
        dtype=options.dtype,
        width=model.width,
        batch=options.batch,
        shard_size=options.shard_size,
    )


def _command(options: Encode) -> str:
    """What makes all shards, without --out."""
    words = ["hnclip", "encode", options.data, "--model", options.model]
    usual = Encode(data=options.data, out=options.out, opening=Opening(), read=ReadConfig())
    for name in ("split", "only", "dtype", "shard_size", "batch", "threads"):
        if (value := getattr(options, name)) != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += differences(options.opening, usual.opening, "")
    return shlex.join([*words, *differences(options.read, usual.read, "read.")])
