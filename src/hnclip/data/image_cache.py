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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from filelock import BaseFileLock, FileLock, Timeout
from torch import Tensor

from hnclip.core import ImageSource, InvalidImage, Problem
from hnclip.data.decoding import Decoded, cpu_count, decode_all, hash_bytes
from hnclip.data.images import ImageTransform
from hnclip.util.console import Iterate
from hnclip.util.files import exclusive_lock, replace_file
from hnclip.util.text import readable_size

log = logging.getLogger(__name__)

FORMAT = 3  # of the files and of the preprocessing; raise it when either changes
FLUSHED = 64  # rows between two flushes to disk; fewer than are verified
CHECKED = 256  # rows whose checksums are verified when a cache is opened
INDEX, PIXELS, LOCK = "index.bin", "pixels.u8", "lock"
OLD_INDEX = "index.sqlite"  # of formats 1 and 2

# `source` is a hash of key and stamp, `content` of the bytes; `crc` is the checksum of the row, `check` of the entry.
ENTRY = np.dtype(
    {
        "names": ["source", "content", "row", "width", "height", "crc", "check"],
        "formats": ["V16", "V16", "<i8", "<u4", "<u4", "<u4", "<u4"],
    }
)


class CachedPixels:
    """Rows of an array in memory or in a mapped file, indexed like a uint8 tensor [N, 3, S, S]; indexing copies.

    Args:
        array: [R, 3, S, S]
        rows: [N]; images with the same content have the same row.
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


@dataclass(frozen=True)
class LoadedImages:
    """The K of N images that could be loaded.

    Shape:
        pixels: uint8 [K, 3, S, S]
        kept: their indices among the N, in order
        sizes: [K, 2], width and height of the upright image
        problems: by index, what is wrong with the others
    """

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
    """All images through `preprocess_image`; cached ones are neither read nor decoded.

    Images derived from the same file (crops, edge maps) are made from one decode of it. An image is known by its key
    and stamp; invalid images are tried again every time.

    Args:
        cache: directory of all caches; with None, images are held in memory.
        workers: decoding threads; the number of CPUs, at most 16, if not given.
        progress: iterates over the files that have to be decoded.

    Raises:
        OSError: the cache cannot be written.
    """
    store: _Memory | _Store
    store = _Memory(transform) if cache is None else _Store(cache / "images" / _cache_name(transform), transform)
    problems: dict[int, Problem] = {}
    names: dict[int, bytes] = {}
    for index, source in enumerate(sources):
        try:
            names[index] = hash_bytes(f"{source.key}\0{source.stamp()}".encode("utf-8", "surrogatepass"))
        except InvalidImage as error:
            problems[index] = Problem(error.kind, source.key, str(error))
    missing = {name: sources[index] for index, name in names.items() if name not in store.entries}
    failed = store.add(missing, workers or cpu_count(), progress) if missing else {}
    problems |= {index: failed[name] for index, name in names.items() if name in failed}
    kept = tuple(index for index in names if index not in problems)
    found = np.array([store.entries[names[index]] for index in kept], dtype=np.int64).reshape(-1, 3)
    return LoadedImages(store.pixels(found[:, 0]), kept, found[:, 1:], dict(sorted(problems.items())))


class _Memory:
    """The images of one call, in memory."""

    def __init__(self, transform: ImageTransform) -> None:
        self._transform = transform
        self.entries: dict[bytes, tuple[int, ...]] = {}  # row, width and height by source
        self._rows: dict[bytes, np.ndarray] = {}  # by content

    def add(self, wanted: Mapping[bytes, ImageSource], workers: int, progress: Iterate) -> dict[bytes, Problem]:
        problems: dict[bytes, Problem] = {}
        numbers: dict[bytes, int] = {}
        for name, result in decode_all(wanted, self._transform, (), workers, progress):
            if isinstance(result, Problem):
                problems[name] = result
            else:
                self._rows[result.content] = result.pixels
                self.entries[name] = (numbers.setdefault(result.content, len(numbers)), *result.size)
        return problems

    def pixels(self, rows: np.ndarray) -> CachedPixels:
        shape = (3, self._transform.size, self._transform.size)
        return CachedPixels(np.stack([*self._rows.values()]) if len(rows) else np.empty((0, *shape), np.uint8), rows)


class _Store:
    """The cache of one geometry on disk."""

    def __init__(self, directory: Path, transform: ImageTransform) -> None:
        self._directory, self._transform = directory, transform
        self._pixels, self._index = directory / PIXELS, directory / INDEX
        self._row_bytes = 3 * transform.size**2
        valid, _ = self._read()
        self.entries = _facts(valid, "source")  # row, width and height by source

    def _read(self) -> tuple[np.ndarray, int]:
        """The valid entries of the index, and the number of damaged ones."""
        content = self._index.read_bytes() if self._index.exists() else b""
        every = np.frombuffer(content, ENTRY, len(content) // ENTRY.itemsize)
        rows = self._pixels.stat().st_size // self._row_bytes if self._pixels.exists() else 0
        valid = every[(every["check"] == _checksums(every)) & (every["row"] < rows)]
        valid = valid[~np.isin(valid["row"], self._damaged_rows(valid))]
        return valid, len(every) - len(valid)

    def _damaged_rows(self, entries: np.ndarray) -> list[int]:
        """Rows with wrong checksums: none if those written last, which a power cut may have lost, and some others are
        right."""
        rows, first = np.unique(entries["row"], return_index=True)
        crcs = entries["crc"][first]
        last = range(len(rows))[-CHECKED // 2 :]
        sample = np.union1d(last, np.arange(0, len(rows), len(rows) // (CHECKED // 2) + 1)).astype(int)

        def damaged(file: FileIO, chosen: np.ndarray | slice) -> Iterator[int]:
            for row, crc in zip(rows[chosen].tolist(), crcs[chosen].tolist(), strict=True):
                file.seek(row * self._row_bytes)
                if zlib.crc32(file.read(self._row_bytes)) != crc:
                    yield row

        if not len(rows):
            return []
        with self._pixels.open("rb", buffering=0) as file:
            return [] if next(damaged(file, sample), None) is None else list(damaged(file, slice(None)))

    def pixels(self, rows: np.ndarray) -> CachedPixels:
        shape = (int(rows.max(initial=-1)) + 1, 3, self._transform.size, self._transform.size)
        if not len(rows):  # a file without bytes cannot be mapped
            return CachedPixels(np.empty(shape, np.uint8), rows)
        return CachedPixels(np.memmap(self._pixels, np.uint8, "r", shape=shape), rows)

    def add(self, wanted: Mapping[bytes, ImageSource], workers: int, progress: Iterate) -> dict[bytes, Problem]:
        """Decode and append images, each as soon as it is ready. Returns the problems of those that are invalid."""
        problems: dict[bytes, Problem] = {}
        with ExitStack() as stack:
            with self._explained():
                self._directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_waiting(FileLock(self._directory / LOCK)))
                valid = self._repaired()  # also finds what another process wrote in the meantime
                pixels = stack.enter_context(self._pixels.open("ab", buffering=0))
                index = stack.enter_context(self._index.open("ab", buffering=0))
                pixels.truncate(pixels.tell() // self._row_bytes * self._row_bytes)  # of an interrupted writer
                index.truncate(index.tell() // ENTRY.itemsize * ENTRY.itemsize)
            self.entries, known = _facts(valid, "source"), _facts(valid, "content", "crc")
            missing = {name: source for name, source in wanted.items() if name not in self.entries}
            self._warn_of_space(len(missing))
            results = decode_all(missing, self._transform, known, workers, progress)
            for name, result in stack.enter_context(closing(results)):
                if isinstance(result, Problem):
                    problems[name] = result
                    continue
                with self._explained():
                    if result.content not in known:
                        known[result.content] = self._append_row(result, pixels)
                    self._append_entry(name, result.content, known[result.content], index)
            os.fsync(pixels.fileno())
        return problems

    def _repaired(self) -> np.ndarray:
        """The valid entries; a damaged index is replaced by them. Readers keep the pixels that they have mapped."""
        valid, lost = self._read()
        if lost:
            log.warning(
                f"the image cache {self._directory} is damaged: {lost} of {lost + len(valid)} images are decoded again"
            )
            with replace_file(self._index) as partial:
                partial.write_bytes(valid.tobytes())
        if not len(valid):
            self._pixels.unlink(missing_ok=True)
        return valid

    def _warn_of_space(self, images: int) -> None:
        needed, free = images * self._row_bytes, shutil.disk_usage(self._directory).free
        if needed > free:
            log.warning(
                f"the image cache {self._directory} may need {readable_size(needed)}, and {readable_size(free)} are "
                "free: --read.cache or HNCLIP_CACHE chooses another directory"
            )

    def _append_row(self, image: Decoded, pixels: FileIO) -> tuple[int, ...]:
        row = os.fstat(pixels.fileno()).st_size // self._row_bytes
        content = image.pixels.tobytes()
        _write(pixels, content)
        if not row % FLUSHED:
            os.fsync(pixels.fileno())
        return row, *image.size, zlib.crc32(content)

    def _append_entry(self, name: bytes, content: bytes, facts: tuple[int, ...], index: FileIO) -> None:
        entry = np.array([(name, content, *facts, 0)], ENTRY)
        entry["check"] = _checksums(entry)
        _write(index, entry.tobytes())
        self.entries[name] = facts[:3]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, NotImplementedError) as error:  # the latter on file systems without locks
            raise OSError(
                f"the image cache {self._directory} cannot be written ({error}): free some space, or choose another "
                "directory with --read.cache or HNCLIP_CACHE"
            ) from error


def _facts(entries: np.ndarray, key: str, *more: str) -> dict[bytes, tuple[int, ...]]:
    """Row, width and height, and more fields, by a key."""
    columns = [entries[name].tolist() for name in ("row", "width", "height", *more)]
    return dict(zip(entries[key].tolist(), zip(*columns, strict=True), strict=True))


def _write(file: FileIO, content: bytes) -> None:
    written = file.write(content)
    if written != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _checksums(entries: np.ndarray) -> np.ndarray:
    """[N] uint32 over all other fields of each entry; zeros are no valid entry."""
    words = entries.view(np.uint32).reshape(len(entries), ENTRY.itemsize // 4)[:, :-1]
    return np.bitwise_xor.reduce(words, axis=1) ^ np.uint32(0x9E3779B9)


@contextmanager
def _waiting(lock: BaseFileLock) -> Iterator[None]:
    try:
        lock.acquire(timeout=1)
    except Timeout:
        log.info("waiting for another process that fills the image cache")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _cache_name(transform: ImageTransform) -> str:
    """Everything that the bytes of a cache depend on apart from the images: `3-224px-bicubic`."""
    parts = [f"{FORMAT}-{transform.size}px"]
    parts += [f"shortest{transform.shortest}"] * (transform.shortest is not None) + ["squash"] * transform.squash
    return "-".join([*parts, transform.resample])


@dataclass(frozen=True)
class CacheInfo:
    """A cache of one geometry. `geometry` is empty if it has another format and is not used any more."""

    path: Path
    geometry: str
    images: int
    bytes: int


def list_caches(cache: Path) -> list[CacheInfo]:
    """All image caches in the cache directory, with the images that they know and their sizes on disk."""
    found = []
    for path in sorted((cache / "images").glob("*/")):
        if not ((path / INDEX).exists() or (path / OLD_INDEX).exists()):
            continue  # something else
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
