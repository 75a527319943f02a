"""Preprocessed images on disk: decoded and resized once per model geometry, then memory-mapped.

A cache directory holds `pixels.u8`, one row of 3·S·S bytes per distinct image, and `index.bin`, one `ENTRY` per known
image source. Both are append-only, and a row is written before its entry, so an interrupted writer leaves a smaller
cache. A file lock admits one writer; others wait and then find the images cached.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from hnclip.core import ImageSource, InvalidImage, Problem
from hnclip.data.decoding import Decoded, decode_all, source_hash
from hnclip.data.images import ImageTransform
from hnclip.util.console import Iterate
from hnclip.util.files import exclusive_lock, replace_file

log = logging.getLogger(__name__)

FORMAT = 3  # of the files and of the preprocessing; raise it when either changes
FLUSHED = 64  # rows between two flushes to disk; fewer than are verified
CHECKED = 256  # rows whose checksums are verified when a cache is opened
INDEX, PIXELS, LOCK = "index.bin", "pixels.u8", "lock"
Facts = tuple[int, ...]  # row, width, height and checksum of an image

# `source` is a hash of key and stamp, `content` of the bytes; `crc` is the checksum of the row, `check` of the entry.
ENTRY = np.dtype(
    [("source", "V16"), ("content", "V16"), ("row", "<i8")]
    + [(name, "<u4") for name in ("width", "height", "crc", "check")]
)


class CachedPixels:
    """Rows of an array in memory or in a mapped file, indexed like a uint8 tensor [N, 3, S, S]; indexing copies.

    Shape:
        array: [R, 3, S, S]
        rows: [N]; images with the same content have the same row
    """

    def __init__(self, array: np.ndarray, rows: np.ndarray) -> None:
        self.rows = rows
        self._array = np.asarray(array)  # indexing np.memmap is slow for small images

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), *self._array.shape[1:]))

    def select(self, chosen: Sequence[int]) -> CachedPixels:
        """Some of the images, or some several times; nothing is copied."""
        return CachedPixels(self._array, self.rows[np.asarray(chosen, dtype=np.int64)])

    def __getitem__(self, chosen: slice | Tensor | Sequence[int]) -> Tensor:
        rows = self.rows[chosen if isinstance(chosen, slice) else np.asarray(chosen, dtype=np.int64)]  # [n]
        copies = torch.empty((len(rows), *self.shape[1:]), dtype=torch.uint8, device="cpu")
        target = copies.numpy()
        for place in np.argsort(rows):  # in the order of the file
            target[place] = self._array[rows[place]]
        return copies  # [n, 3, S, S]


class LoadedImages(NamedTuple):
    """The K of N images that could be loaded: pixels [K, 3, S, S], indices among the N, width and height [K, 2] of the
    upright images; and by index what is wrong with the others."""

    pixels: CachedPixels
    kept: tuple[int, ...]
    sizes: np.ndarray
    problems: Mapping[int, Problem]


def cache_directory(given: str | None) -> Path:
    """`given`, else $HNCLIP_CACHE, else ~/.cache/hnclip."""
    return Path(given or os.environ.get("HNCLIP_CACHE") or "~/.cache/hnclip").expanduser()


def load_images(
    sources: Sequence[ImageSource],
    transform: ImageTransform,
    *,
    cache: Path | None,
    workers: int | None = None,
    progress: Iterate = iter,
) -> LoadedImages:
    """All images through `preprocess_image`; cached ones, known by key and stamp, are neither read nor decoded. Invalid
    images are tried again every time. OSError if the cache cannot be written.

    Args:
        cache: directory of all caches; with None, images are held in memory.
        workers: decoding threads; the number of CPUs, at most 16, if not given.
        progress: iterates over the files that have to be decoded.
    """
    store = _Memory(transform) if cache is None else _Store(cache / "images" / _cache_name(transform), transform)
    problems: dict[int, Problem] = {}
    names: dict[int, bytes] = {}
    for index, source in enumerate(sources):
        try:
            names[index] = source_hash(source)
        except InvalidImage as error:
            problems[index] = Problem(error.kind, source.key, str(error))
    failed: dict[bytes, Problem] = {}
    if any(name not in store.entries for name in names.values()):
        with store.writing():
            missing = {name: sources[index] for index, name in names.items() if name not in store.entries}
            # Closed before the files are, also if they cannot be written.
            with closing(decode_all(missing, transform, workers, known=store.known, progress=progress)) as results:
                for name, result in results:
                    if isinstance(result, Problem):
                        failed[name] = result
                    else:
                        store.add(name, result)
    problems |= {index: failed[name] for index, name in names.items() if name in failed}
    kept = tuple(index for index in names if index not in problems)
    found = np.array([store.entries[names[index]] for index in kept], dtype=np.int64).reshape(-1, 4)
    return LoadedImages(store.pixels(found[:, 0]), kept, found[:, 1:3], dict(sorted(problems.items())))


class _Memory:
    """The images of one call, in memory."""

    def __init__(self, transform: ImageTransform) -> None:
        self._shape = (3, transform.size, transform.size)
        self.entries: dict[bytes, Facts] = {}  # by source
        self.known: dict[bytes, Facts] = {}  # by content
        self._rows: list[np.ndarray] = []

    def writing(self) -> AbstractContextManager[None]:
        """Images can be added in this block."""
        return nullcontext()

    def add(self, name: bytes, image: Decoded) -> None:
        if image.content not in self.known:
            self.known[image.content] = (len(self._rows), *image.size, 0)
            self._rows.append(image.pixels)
        self.entries[name] = self.known[image.content]

    def pixels(self, rows: np.ndarray) -> CachedPixels:
        return CachedPixels(np.stack(self._rows) if self._rows else np.empty((0, *self._shape), np.uint8), rows)


class _Store(_Memory):
    """The cache of one geometry on disk."""

    def __init__(self, directory: Path, transform: ImageTransform) -> None:
        super().__init__(transform)
        self._directory, self._pixels, self._index = directory, directory / PIXELS, directory / INDEX
        self._row_bytes = 3 * transform.size**2
        self._read()

    def _read(self) -> tuple[np.ndarray, int]:
        """The valid entries of the index, and the number of damaged ones."""
        content = self._index.read_bytes() if self._index.exists() else b""
        every = np.frombuffer(content, ENTRY, len(content) // ENTRY.itemsize)
        rows = self._pixels.stat().st_size // self._row_bytes if self._pixels.exists() else 0
        valid = every[(every["check"] == _checksums(every)) & (every["row"] < rows)]
        valid = valid[~np.isin(valid["row"], self._damaged_rows(valid))]
        columns = (valid[name].tolist() for name in ("row", "width", "height", "crc"))
        facts = list(zip(*columns, strict=True))
        self.entries = dict(zip(valid["source"].tolist(), facts, strict=True))
        self.known = dict(zip(valid["content"].tolist(), facts, strict=True))
        return valid, len(every) - len(valid)

    def _damaged_rows(self, entries: np.ndarray) -> list[int]:
        """Rows with wrong checksums: none if those written last, which a power cut may have lost, and some others are
        right."""
        rows, first = np.unique(entries["row"], return_index=True)
        if not len(rows):  # a file without bytes cannot be mapped
            return []
        pixels = np.memmap(self._pixels, np.uint8, "r", shape=(int(rows[-1]) + 1, self._row_bytes))

        def wrong(chosen: Iterable[int]) -> list[int]:
            return [int(rows[at]) for at in chosen if zlib.crc32(pixels[rows[at]]) != entries["crc"][first[at]]]

        spread = range(0, len(rows), len(rows) // (CHECKED // 2) + 1)
        return wrong(range(len(rows))) if wrong({*spread, *range(len(rows))[-CHECKED // 2 :]}) else []

    def pixels(self, rows: np.ndarray) -> CachedPixels:
        if not len(rows):
            return super().pixels(rows)
        shape = (int(rows.max()) + 1, *self._shape)
        return CachedPixels(np.memmap(self._pixels, np.uint8, "r", shape=shape), rows)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the cache, repair it, and open its files."""
        with ExitStack() as stack:
            with self._explained():
                self._directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_lock(self._directory / LOCK))
                self._repair()  # also finds what another process wrote in the meantime
                pixels, index = (
                    stack.enter_context(path.open("ab", buffering=0)) for path in (self._pixels, self._index)
                )
                for file, size in ((pixels, self._row_bytes), (index, ENTRY.itemsize)):
                    file.truncate(file.tell() // size * size)  # of an interrupted writer
            self._files = pixels, index
            yield
            os.fsync(pixels.fileno())

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, NotImplementedError) as error:  # the latter on file systems without locks
            raise OSError(
                f"the image cache {self._directory} cannot be written ({error}): free some space, or choose another "
                "directory with --read.cache or HNCLIP_CACHE"
            ) from error

    def _repair(self) -> None:
        """Replace a damaged index by its valid entries. Readers keep the pixels that they have mapped."""
        valid, lost = self._read()
        if lost:
            every = lost + len(valid)
            log.warning(f"the image cache {self._directory} is damaged: {lost} of {every} images are decoded again")
            with replace_file(self._index) as partial:
                partial.write_bytes(valid.tobytes())
        if not len(valid):
            self._pixels.unlink(missing_ok=True)

    def add(self, name: bytes, image: Decoded) -> None:
        pixels, index = self._files
        with self._explained():
            if image.content not in self.known:
                row, content = pixels.tell() // self._row_bytes, image.pixels.tobytes()
                _write(pixels, content)
                if not row % FLUSHED:
                    os.fsync(pixels.fileno())
                self.known[image.content] = (row, *image.size, zlib.crc32(content))
            entry = np.array([(name, image.content, *self.known[image.content], 0)], ENTRY)
            entry["check"] = _checksums(entry)
            _write(index, entry.tobytes())
        self.entries[name] = self.known[image.content]


def _write(file: FileIO, content: bytes) -> None:
    if file.write(content) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _checksums(entries: np.ndarray) -> np.ndarray:
    """[N] uint32 over all other fields of each entry; zeros are no valid entry."""
    words = entries.view(np.uint32).reshape(len(entries), ENTRY.itemsize // 4)[:, :-1]
    return np.bitwise_xor.reduce(words, axis=1) ^ np.uint32(0x9E3779B9)


def _lock(path: Path) -> AbstractContextManager[object]:
    try:
        return FileLock(path).acquire(timeout=1)
    except Timeout:
        log.info("waiting for another process that fills the image cache")
        return FileLock(path).acquire()


def _cache_name(transform: ImageTransform) -> str:
    """Everything that the bytes of a cache depend on apart from the images: `3-224px-bicubic`."""
    parts = [f"{FORMAT}-{transform.size}px"]
    parts += [f"shortest{transform.shortest}"] * (transform.shortest is not None) + ["squash"] * transform.squash
    return "-".join([*parts, transform.resample])


@dataclass(frozen=True)
class CacheInfo:
    """A cache of one geometry, which is empty if it has another format and is not used any more."""

    path: Path
    geometry: str
    images: int
    bytes: int


def list_caches(cache: Path) -> list[CacheInfo]:
    """All image caches in the cache directory, with the images that they know and their sizes on disk."""
    found = []
    for path in sorted(index.parent for index in (cache / "images").glob("*/index.*")):
        number, _, geometry = path.name.partition("-")
        current = number == str(FORMAT)
        images = (path / INDEX).stat().st_size // ENTRY.itemsize if current else 0
        size = sum(file.stat().st_size for file in path.iterdir())
        found.append(CacheInfo(path, geometry.replace("-", ", ") if current else "", images, size))
    return found


def delete_cache(info: CacheInfo) -> None:
    """Delete a cache, or raise ValueError if a process is filling it. Running trainings keep the pixels they use."""
    with exclusive_lock(info.path / LOCK, f"{info.path} is in use: another process is filling it"):
        shutil.rmtree(info.path)
