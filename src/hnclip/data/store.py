"""Resized pictures on disk: rows of bytes in one file, and an index of which picture is which row.

A store is a directory. `pixels.u8` holds the rows and is mapped into memory for reading. `index.sqlite` has two tables:
`pictures`, from the hash of a picture's bytes to its row, and `names`, from the hash of a picture's key and stamp to
the same row, so that a file which did not change is not even read. A row is written and flushed before the index names
it, and never changes afterwards: whoever is killed leaves a smaller store, not a wrong one. SQLite's lock keeps writers
apart.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hnclip.util.files import transaction

LAYOUT = 1  # of the two files; part of a store's name
PATIENCE = 300.0  # seconds to wait for another writer
ELSEWHERE = "choose another directory with --read.cache or HNCLIP_CACHE"
ASKED = 500  # names in one question; old versions of SQLite allow 999

SCHEMA = """
CREATE TABLE pictures (row INTEGER PRIMARY KEY, content BLOB NOT NULL UNIQUE);
CREATE TABLE names (name BLOB PRIMARY KEY, row INTEGER NOT NULL) WITHOUT ROWID;
"""


class MappedPixels:
    """Pictures in a mapped file, used like a uint8 tensor [N, 3, S, S] that gives copies.

    Args:
        file: rows of 3·S·S bytes.
        rows: [N], the row of each picture; pictures of the same content have the same one.
        size: side S.
    """

    def __init__(self, file: FileIO, rows: Sequence[int], size: int) -> None:
        self.rows = np.array(rows, dtype=np.int64)  # [N]
        shape = (int(self.rows.max(initial=-1)) + 1, 3, size, size)
        # No file of no bytes can be mapped. A plain array, since np.memmap's own indexing is slow for small pictures.
        self._pixels = np.asarray(np.memmap(file, np.uint8, "r", shape=shape) if rows else np.empty(shape, np.uint8))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), *self._pixels.shape[1:]))

    def __getitem__(self, chosen: slice | Tensor | Sequence[int]) -> Tensor:
        """Copies of some pictures.

        Shape:
            chosen: a slice, or n integers; negative ones count from the end
            returns [n, 3, S, S] uint8
        """
        rows = self.rows[chosen if isinstance(chosen, slice) else _integers(chosen)]  # [n]
        found = torch.empty((len(rows), *self.shape[1:]), dtype=torch.uint8, device="cpu")
        target = found.numpy()
        for place in np.argsort(rows):  # in the file's order: kinder to a disk
            target[place] = self._pixels[rows[place]]
        return found  # [n, 3, S, S]


def _integers(chosen: Tensor | Sequence[int]) -> np.ndarray:
    wanted = torch.as_tensor(chosen, device="cpu")  # [n]
    if wanted.shape == (0,):
        return np.empty(0, np.int64)  # torch takes an empty list for floats
    if wanted.ndim != 1 or wanted.dtype not in (torch.int64, torch.int32):
        raise IndexError(f"pictures are chosen by a slice or a list of integers, got {chosen!r}")
    return wanted.numpy()


@dataclass(frozen=True)
class Entry:
    """A picture on its way into a store. `pixels` [3, S, S] is None if they are there already, or about to be."""

    name: bytes
    content: bytes
    pixels: Tensor | None


class Store:
    """An open store. Only one thread may use it."""

    def __init__(self, directory: Path, size: int, index: sqlite3.Connection, pixels: FileIO) -> None:
        self._directory, self._size, self._index, self._pixels = directory, size, index, pixels
        self._row_bytes = 3 * size * size

    def rows(self, names: Sequence[bytes]) -> dict[bytes, int]:
        """Those of the names that the store knows, and their rows."""
        with _explained(self._directory):
            return self._look_up("SELECT name, row FROM names WHERE name IN", names)

    def contents(self) -> set[bytes]:
        """The hashes of all pictures in the store."""
        with _explained(self._directory):
            return {content for (content,) in self._index.execute("SELECT content FROM pictures")}

    def add(self, entries: Sequence[Entry]) -> dict[bytes, int]:
        """Take in pictures, all or none of them. Returns the rows of those names whose content is there now.

        Content that is there already, from another process perhaps, is not written again.
        """
        if not entries:
            return {}
        with _explained(self._directory, len(entries) * self._row_bytes), transaction(self._index):
            rows = self._look_up(
                "SELECT content, row FROM pictures WHERE content IN", [entry.content for entry in entries]
            )
            first = _end(self._index)
            new: list[bytes] = []
            self._pixels.seek(first * self._row_bytes)
            for entry in entries:
                if entry.pixels is not None and entry.content not in rows:
                    _write(self._pixels, entry.pixels)
                    rows[entry.content] = first + len(new)
                    new.append(entry.content)
            if new:
                os.fsync(self._pixels.fileno())
            self._index.executemany("INSERT INTO pictures VALUES (?, ?)", enumerate(new, first))
            named = {entry.name: rows[entry.content] for entry in entries if entry.content in rows}
            self._index.executemany("INSERT OR IGNORE INTO names VALUES (?, ?)", named.items())
        return named

    def require_room(self, pictures: int) -> None:
        """OSError if so many more, at least one, could not be taken in."""
        needed = pictures * self._row_bytes
        with _explained(self._directory, needed):
            if not self._pixels.writable():
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            if needed > shutil.disk_usage(self._directory).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def mapped(self, rows: Sequence[int]) -> MappedPixels:
        return MappedPixels(self._pixels, rows, self._size)

    def _look_up(self, question: str, hashes: Sequence[bytes]) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for start in range(0, len(hashes), ASKED):
            part = hashes[start : start + ASKED]
            found.update(self._index.execute(f"{question} ({','.join('?' * len(part))})", part))
        return found


@contextmanager
def open_store(directory: Path, size: int) -> Iterator[Store]:
    """The store of this directory, for pictures of side `size`; made if there is none.

    A store whose index is damaged is not used again: its pixels are removed, and `directory`-1 takes its place. The
    damaged index stays as a sign of that to other processes, which may be looking at it at the same moment.
    """
    for number in count():
        place = directory.with_name(f"{directory.name}-{number}") if number else directory
        with _explained(place):
            place.mkdir(parents=True, exist_ok=True)
            index = sqlite3.connect(place / "index.sqlite", timeout=PATIENCE, isolation_level=None)
        with closing(index):
            file = place / "pixels.u8"
            with _explained(place):
                if not _sound(index):
                    file.unlink(missing_ok=True)
                    continue
                _set_up(index, file)
                pixels = _open_pixels(file)
            with pixels:
                with _explained(place):
                    _drop_missing(index, pixels, 3 * size * size)
                yield Store(place, size, index, pixels)
                return


def _sound(index: sqlite3.Connection) -> bool:
    try:
        return index.execute("PRAGMA quick_check").fetchall() == [("ok",)]
    except sqlite3.OperationalError:  # locked, or no right to read: that says nothing about the content
        raise
    except sqlite3.DatabaseError:
        return False


def _set_up(index: sqlite3.Connection, file: Path) -> None:
    """Make the tables of a new index, and do away with pixels that no index speaks of any more."""
    made = "SELECT count(*) FROM sqlite_master WHERE name IN ('pictures', 'names')"
    if index.execute(made).fetchone() == (2,):
        return
    with transaction(index):
        if index.execute(made).fetchone() != (2,):  # unless another process was quicker
            file.unlink(missing_ok=True)
            for statement in SCHEMA.split(";"):
                index.execute(statement)


def _open_pixels(file: Path) -> FileIO:
    """Without a buffer, which would try to write again at closing what a full disk refused."""
    try:
        file.touch()
        return file.open("r+b", buffering=0)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return file.open("rb", buffering=0)  # a store that can only be read will do, if nothing is missing


def _write(file: FileIO, pixels: Tensor) -> None:
    rest = pixels.numpy().reshape(-1).data
    while rest:
        rest = rest[file.write(rest) :]


def _drop_missing(index: sqlite3.Connection, pixels: FileIO, row_bytes: int) -> None:
    """Forget the rows that a file cut short no longer holds."""
    # The index is asked before the file: it never speaks of a row before the row is written.
    if _end(index) * row_bytes <= os.fstat(pixels.fileno()).st_size:
        return
    with transaction(index):
        whole = os.fstat(pixels.fileno()).st_size // row_bytes
        index.execute("DELETE FROM pictures WHERE row >= ?", (whole,))
        index.execute("DELETE FROM names WHERE row >= ?", (whole,))


def _end(index: sqlite3.Connection) -> int:
    """The first row that is free."""
    (last,) = index.execute("SELECT max(row) FROM pictures").fetchone()
    return 0 if last is None else last + 1


@contextmanager
def _explained(directory: Path, needed: int = 0) -> Iterator[None]:
    """Errors of the disk and of SQLite, with the directory and what can be done."""
    try:
        yield
    except (OSError, sqlite3.DatabaseError) as error:
        full = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
        if getattr(error, "errno", None) in full or "disk is full" in str(error):
            wanted = f"{needed:,} bytes are needed, " if needed else ""
            raise OSError(
                errno.ENOSPC,
                f"no room for the picture cache {directory}: {wanted}{shutil.disk_usage(directory).free:,} bytes are "
                f"free; make room, or {ELSEWHERE}",
            ) from error
        raise OSError(
            f"the picture cache {directory} cannot be used ({error}); mend or remove it, or {ELSEWHERE}"
        ) from error
