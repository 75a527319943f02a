"""Reads what `hnclip encode` wrote (search/shards.py): mapped vectors, ids, captions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from hnclip.search.shards import (
    CAPTIONS,
    IMAGES,
    JOB,
    MANIFEST,
    OWNERS,
    RECORDS,
    job_of,
    missing_shards,
    missing_text,
    read_job,
    shard_directory,
)
from hnclip.util.files import read_json


class Vectors:
    """Rows of several .npy files as one array [N, D]; a file is mapped into memory when a row of it is asked for."""

    def __init__(self, files: Sequence[Path], counts: Sequence[int], width: int, dtype: str) -> None:
        self.files, self.dtype = tuple(files), np.dtype(dtype)
        self._starts = np.array([0, *accumulate(counts)])  # [files + 1]
        self.shape = (int(self._starts[-1]), width)
        self._mapped: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.shape[0]

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """The first row of every file, and its rows [n, D]."""
        for number in range(len(self.files)):
            yield int(self._starts[number]), self._block(number)

    def __getitem__(self, chosen: int | slice | Sequence[int] | np.ndarray) -> np.ndarray:
        """Copies of some rows: [D] for a number, [n, D] for a slice or n numbers; negative ones count from the end."""
        if isinstance(chosen, slice):
            chosen = np.arange(*chosen.indices(len(self)))
        given = np.asarray(chosen)
        if given.size and (given.dtype.kind not in "iu" or given.min() < -len(self) or given.max() >= len(self)):
            raise IndexError(f"rows are chosen by whole numbers below {len(self)}, got {chosen!r}")
        rows = np.atleast_1d(given).astype(np.int64) % max(1, len(self))  # [n]
        found = np.empty((len(rows), self.shape[1]), self.dtype)  # [n, D]
        files = np.searchsorted(self._starts, rows, side="right") - 1  # [n], empty files never
        for number in np.unique(files):
            here = files == number
            found[here] = self._block(number)[rows[here] - self._starts[number]]
        return found if given.ndim else found[0]

    def _block(self, number: int) -> np.ndarray:
        if number not in self._mapped:
            block = np.load(self.files[number], mmap_mode="r", allow_pickle=False)
            expected = (int(self._starts[number + 1] - self._starts[number]), self.shape[1])
            if block.shape != expected or block.dtype != self.dtype:
                raise ValueError(
                    f"{self.files[number]} holds {block.shape} of {block.dtype}, {MANIFEST} says {expected} of "
                    f"{self.dtype}"
                )
            self._mapped[number] = block
        return self._mapped[number]


@dataclass(frozen=True)
class Encoded:
    """A complete directory of embeddings.

    Shape:
        images: I rows, or None if pictures were not encoded
        captions: T rows, or None
    """

    directory: Path
    manifest: Mapping[str, Any]
    images: Vectors | None
    captions: Vectors | None

    def records(self) -> Iterator[dict[str, Any]]:
        """For each row of `images`, and also if there are none, its id, its picture and its captions."""
        for number in range(len(self.manifest["shards"])):
            with (shard_directory(self.directory, number) / RECORDS).open(encoding="ascii") as lines:
                yield from map(json.loads, lines)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """[I]"""
        return tuple(record["id"] for record in self.records())

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """[T], the captions that `captions` are vectors of."""
        return tuple(text for record in self.records() for text in record["captions"])

    @cached_property
    def owners(self) -> np.ndarray:
        """[T], the row of each caption's picture."""
        if self.captions is None:
            return np.zeros(0, np.int64)
        first = accumulate((shard["rows"] for shard in self.manifest["shards"]), initial=0)
        places = (shard_directory(self.directory, number) for number in range(len(self.manifest["shards"])))
        return np.concatenate([np.load(place / OWNERS, allow_pickle=False) + row for place, row in zip(places, first)])


def open_embeddings(directory: str | Path, *, check: bool = False) -> Encoded:
    """Open what `hnclip encode` wrote; nothing in it is executed.

    Args:
        check: read every file and compare its checksum, instead of its size alone.

    Raises:
        ValueError: the directory is none of embeddings, is incomplete, or is damaged; the message says what to do.
    """
    directory = Path(directory)
    if not (directory / MANIFEST).is_file():
        raise ValueError(_incomplete(directory))
    job = job_of(directory / MANIFEST)
    manifest = read_json(directory / MANIFEST)
    places = [shard_directory(directory, number) for number in range(len(manifest["shards"]))]
    for place, shard in zip(places, manifest["shards"]):
        for name, file in shard["files"].items():
            if wrong := _wrong(place / name, file, check):
                raise ValueError(
                    f"{place / name} {wrong}: it is damaged. Remove {place} and make it anew with\n"
                    f"  {job.finish(directory)}"
                )

    def vectors(name: str, count: str) -> Vectors | None:
        if any(name not in shard["files"] for shard in manifest["shards"]):
            return None
        counts = [shard[count] for shard in manifest["shards"]]
        return Vectors([place / name for place in places], counts, job.width, job.dtype)

    return Encoded(directory, manifest, vectors(IMAGES, "rows"), vectors(CAPTIONS, "captions"))


def _wrong(path: Path, file: Mapping[str, Any], check: bool) -> str:
    try:
        if (size := path.stat().st_size) != file["bytes"]:
            return f"has {size:,} bytes instead of {file['bytes']:,}"
        if check:
            content = sha256()
            with path.open("rb") as opened:
                while part := opened.read(2**20):
                    content.update(part)
            if content.hexdigest() != file["sha256"]:
                return "is not what was written"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def _incomplete(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory} does not exist: make it with hnclip encode DATA --out {directory}"
    job = read_job(directory)
    if job is None:
        return f"{directory} holds no embeddings ({MANIFEST} and {JOB} are missing): make them with hnclip encode"
    missing = missing_shards(directory, job)
    what = missing_text(missing, job.shards) if missing else f"it has no {MANIFEST} yet"
    return f"{directory} is incomplete, {what}. Finish it with\n  {job.finish(directory)}"
