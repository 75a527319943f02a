"""Generations of an index, directories of which the header names the one that counts."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from hnclip.search.index.catalogue import create_catalogue
from hnclip.search.index.layout import (
    CATALOGUE,
    HEADER,
    KINDS,
    LOCK,
    THUMBNAILS,
    TOKENS,
    About,
    generation_directory,
)
from hnclip.search.index.vectors import row_files


def begin_generation(path: Path, generation: int, about: About) -> sqlite3.Connection:
    """Empty files of a generation that does not count yet; what lay there is removed."""
    directory = generation_directory(path, generation)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / THUMBNAILS).touch()
    if about.patches:
        (directory / TOKENS).touch()
    for kind in KINDS:
        for file, _ in row_files(directory, kind, about.width, about.storage).files():
            file.touch()
    return create_catalogue(directory / CATALOGUE, about.to_json())


def generations(path: Path) -> list[int]:
    """Those that lie there, whether they count or not."""
    return sorted(int(entry.name) for entry in path.iterdir() if entry.name.isdecimal() and entry.is_dir())


def clear_away(path: Path, keep: Collection[int]) -> None:
    """Remove other generations, and headers that a killed writer did not finish; nothing else that lies there."""
    for number in generations(path):
        if number not in keep:
            shutil.rmtree(generation_directory(path, number), ignore_errors=True)
    for file in path.glob(f".{HEADER}.*"):
        file.unlink(missing_ok=True)


def check_place(path: Path) -> None:
    """Refuse to make an index of something else.

    Raises:
        ValueError: a file, or a directory with other things than an index.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} exists and is no index of hnclip: choose another --out")
    if path.is_dir() and not (path / HEADER).exists() and any(not _own(entry.name) for entry in path.iterdir()):
        raise ValueError(f"{path} is a directory that holds other things than an index: choose another --out")


@contextmanager
def room(path: Path) -> Iterator[None]:
    """Errors of the disk, with the index and what can be done."""
    try:
        yield
    except OSError as error:
        full = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
        if error.errno in full or "disk is full" in str(error):
            raise OSError(f"no room for {path}: make some, then the same command goes on where it was") from error
        raise


def _own(name: str) -> bool:
    """Whether a file may belong to an index that was killed before it had a header."""
    return name == LOCK or name.isdecimal() or name.startswith(f".{HEADER}.")
