"""Preprocessed images on disk: decoded and resized once per model geometry, then memory-mapped.

A cache directory holds `pixels.u8`, one row of 3·S·S bytes per distinct image, and `index.bin`, one `ENTRY` per known
image source. Both are append-only, and a row is written before its entry, so an interrupted writer leaves a smaller
cache. A file lock admits one writer; others wait and then find the images cached.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from hnclip.util.files import read_json, replace_file

log = logging.getLogger(__name__)

FORMAT = 3  # of the files and of the preprocessing; raise it when either changes
FLUSHED = 64  # rows between two flushes to disk; fewer than are verified
CHECKED = 256  # rows whose checksums are verified when a cache is opened
ABOUT = "about.json"
ELSEWHERE = "free some space, or choose another directory with --read.cache or HNCLIP_CACHE"

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
    store = _Memory(transform) if cache is None else _Store(cache / "images" / _geometry(transform), transform)
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
    found = np.array([store.entries[names[index]] for index in kept], dtype=np.int64).reshape(
        -1, 3
    )  # row, width, height
    return LoadedImages(store.pixels(found[:, 0]), kept, found[:, 1:], dict(sorted(problems.items())))


class _Memory:
    """The images of one call, in memory."""

    def __init__(self, transform: ImageTransform) -> None:
        self._transform = transform
        self.entries: dict[bytes, tuple[int, int, int]] = {}  # row, width and height by source
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
        self._pixels, self._index = directory / "pixels.u8", directory / "index.bin"
        self._row_bytes = 3 * transform.size**2
        self.entries: dict[bytes, tuple[int, int, int]] = {}  # row, width and height by source
        self._known: dict[bytes, tuple[int, int, int, int]] = {}  # the same and the checksum, by content
        self._read()

    def _read(self) -> np.ndarray | None:
        """Read the index. If it is damaged, warn and return the valid entries: none if rows are damaged."""
        content = self._index.read_bytes() if self._index.exists() else b""
        every = np.frombuffer(content, ENTRY, len(content) // ENTRY.itemsize)
        rows = self._pixels.stat().st_size // self._row_bytes if self._pixels.exists() else 0
        valid = every[(every["check"] == _checksums(every)) & (every["row"] < rows)]
        if not self._rows_are_valid(valid):
            valid = valid[:0]
        facts = list(zip(*(valid[name].tolist() for name in ("row", "width", "height", "crc")), strict=True))
        self._known = dict(zip((found.tobytes() for found in valid["content"]), facts, strict=True))
        self.entries = {name.tobytes(): fact[:3] for name, fact in zip(valid["source"], facts, strict=True)}
        if len(valid) == len(every):
            return None
        lost = f"{len(every) - len(valid)} of {len(every)}"
        log.warning(f"the image cache {self._directory} is damaged: {lost} images are decoded again")
        return valid

    def _rows_are_valid(self, entries: np.ndarray) -> bool:
        """Compare checksums of the rows written last, which a power cut may have lost, and of some others."""
        if not len(entries):
            return True
        half = CHECKED // 2
        chosen = np.unique([*range(len(entries))[-half:], *np.linspace(0, len(entries) - 1, half, dtype=int)])
        with self._pixels.open("rb") as file:
            for row, crc in zip(entries["row"][chosen].tolist(), entries["crc"][chosen].tolist(), strict=True):
                file.seek(row * self._row_bytes)
                if zlib.crc32(file.read(self._row_bytes)) != crc:
                    return False
        return True

    def pixels(self, rows: np.ndarray) -> CachedPixels:
        shape = (int(rows.max(initial=-1)) + 1, 3, self._transform.size, self._transform.size)
        empty = np.empty(shape, np.uint8)  # a file without bytes cannot be mapped
        return CachedPixels(np.memmap(self._pixels, np.uint8, "r", shape=shape) if len(rows) else empty, rows)

    def add(self, wanted: Mapping[bytes, ImageSource], workers: int, progress: Iterate) -> dict[bytes, Problem]:
        """Decode and append images, each as soon as it is ready. Returns the problems of those that are invalid."""
        problems: dict[bytes, Problem] = {}
        with _explained(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            with _waiting(FileLock(self._directory / "lock")):
                self._repair(self._read())  # also finds what another process wrote in the meantime
                missing = {name: source for name, source in wanted.items() if name not in self.entries}
                self._check_space(len(missing))
                with self._pixels.open("ab", buffering=0) as pixels, self._index.open("ab", buffering=0) as index:
                    pixels.truncate(pixels.tell() // self._row_bytes * self._row_bytes)  # of an interrupted writer
                    index.truncate(index.tell() // ENTRY.itemsize * ENTRY.itemsize)
                    for name, result in decode_all(missing, self._transform, self._known, workers, progress):
                        if isinstance(result, Problem):
                            problems[name] = result
                        else:
                            self._append(name, result, pixels, index)
                    os.fsync(pixels.fileno())
        return problems

    def _repair(self, valid: np.ndarray | None) -> None:
        """Rewrite a damaged index. Readers keep the pixels that they have mapped."""
        if valid is not None:
            with replace_file(self._index) as partial:
                partial.write_bytes(valid.tobytes())
            if not len(valid):
                self._pixels.unlink(missing_ok=True)
        with replace_file(self._directory / ABOUT) as partial:
            partial.write_text(json.dumps({"format": FORMAT, **_geometry_of(self._transform)}), encoding="utf-8")

    def _check_space(self, images: int) -> None:
        needed, free = images * self._row_bytes, shutil.disk_usage(self._directory).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, {free:,} are free")

    def _append(self, name: bytes, image: Decoded, pixels: FileIO, index: FileIO) -> None:
        """Write the pixels, unless the same content has a row, then the entry."""
        fact = self._known.get(image.content)
        if fact is None:
            row = os.fstat(pixels.fileno()).st_size // self._row_bytes
            content = image.pixels.tobytes()
            _write(pixels, content)
            fact = self._known[image.content] = (row, *image.size, zlib.crc32(content))
            if not row % FLUSHED:
                os.fsync(pixels.fileno())
        entry = np.array([(name, image.content, *fact, 0)], ENTRY)
        entry["check"] = _checksums(entry)
        _write(index, entry.tobytes())
        self.entries[name] = fact[:3]


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


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"the image cache {directory} cannot be written ({error}): {ELSEWHERE}") from error


def _geometry_of(transform: ImageTransform) -> dict[str, int | bool | str | None]:
    return {name: getattr(transform, name) for name in ("size", "shortest", "squash", "resample")}


def _geometry(transform: ImageTransform) -> str:
    """The name of a cache: everything that its bytes depend on apart from the images."""
    settings = [str(value) for value in _geometry_of(transform).values()]
    return f"{FORMAT}-{'-'.join(settings)}".replace("-None", "").replace("-False", "").replace("-True", "-squash")


@dataclass(frozen=True)
class CacheInfo:
    """A directory of cached images. `geometry` is empty for one of another format, which is not used any more."""

    path: Path
    geometry: str
    bytes: int


def list_caches(cache: Path) -> list[CacheInfo]:
    """All image caches in the cache directory, with their sizes on disk."""
    found = []
    for path in sorted((cache / "images").glob("*/")):
        about = read_json(path / ABOUT) if (path / ABOUT).exists() else {}
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        geometry = f"{about['size']} px, {about['resample']}" if about.get("format") == FORMAT else ""
        found.append(CacheInfo(path, geometry, size))
    return found
