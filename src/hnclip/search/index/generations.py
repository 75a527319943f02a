"""Generations of an index, directories of which the header names the one that counts."""

from __future__ import annotations

import errno
import re
import shutil
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hnclip.search.index.catalogue import create_catalogue
from hnclip.search.index.layout import (
    CATALOGUE,
    ENGINES,
    FORMAT,
    HEADER,
    KINDS,
    LOCK,
    THUMBNAILS,
    TOKENS,
    About,
    generation_directory,
)
from hnclip.search.index.vectors import row_files
from hnclip.util.files import read_json

_NUMBER = re.compile(r"[0-9]{6,}")
_ROWS = frozenset(file.name for kind in KINDS for file, _ in row_files(Path(), kind, width=1, storage="bf16").files())
_FILES = _ROWS | {CATALOGUE, f"{CATALOGUE}-journal", THUMBNAILS, TOKENS}


def begin_generation(path: Path, generation: int, about: About) -> sqlite3.Connection:
    """Empty files of a generation that does not count yet; what a killed writer left of it is removed."""
    directory = generation_directory(path, generation)
    if _is_generation(directory):
        remove_generation(path, generation)
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
    return sorted(int(entry.name) for entry in path.iterdir() if _is_generation(entry))


def next_generation(path: Path) -> int:
    """A number that nothing there has, neither a generation nor a directory of the user's."""
    return 1 + max([0, *(int(entry.name) for entry in path.iterdir() if _NUMBER.fullmatch(entry.name))])


def has_lost_header(path: Path) -> bool:
    """Whether there are vectors but no header that says which of them count; a writer that is killed before it has
    written the first header leaves no vectors."""
    if not path.is_dir() or (path / HEADER).exists():
        return False
    directories = (generation_directory(path, number) for number in generations(path))
    return any(file.exists() and file.stat().st_size for place in directories for file in map(place.joinpath, _ROWS))


def clear_away(path: Path, keep: Collection[int]) -> None:
    """Remove other generations, and headers that a killed writer did not finish; nothing else that lies there."""
    for number in generations(path):
        if number not in keep:
            remove_generation(path, number)
    for file in path.glob(f".{HEADER}.*"):
        file.unlink(missing_ok=True)


def remove_generation(path: Path, generation: int) -> None:
    """Remove the files of a generation, and its directory unless somebody has put other things there."""
    directory = generation_directory(path, generation)
    shutil.rmtree(directory / ENGINES, ignore_errors=True)
    with suppress(OSError):  # what cannot be removed now is cleared away some other time
        for name in _FILES:
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()


def check_place(path: Path) -> None:
    """Refuse to make an index of something else.

    Raises:
        ValueError: a file, or a directory with other things than an index.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} exists and is no index of hnclip: choose another --out")
    if not path.is_dir() or has_lost_header(path):
        return
    if (path / HEADER).exists():
        if not _is_own_header(path):
            raise ValueError(f"{path / HEADER} is not that of an index of hnclip: choose another --out")
    elif not all(map(_is_own, path.iterdir())):
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


def _is_generation(directory: Path) -> bool:
    """Whether it is spelt as a generation and holds nothing but files of one: folders of photographs are called 202301,
    too, and what is taken for a generation may be removed."""
    if not _NUMBER.fullmatch(directory.name) or directory.is_symlink() or not directory.is_dir():
        return False
    if directory.name != generation_directory(directory.parent, int(directory.name)).name:
        return False
    entries = {entry.name: entry.is_dir() for entry in directory.iterdir()}
    if entries.pop(ENGINES, False) and CATALOGUE not in entries:  # engines are made of one that is whole
        return False
    return all(name in _FILES and not is_directory for name, is_directory in entries.items())


def _is_own(entry: Path) -> bool:
    """Whether it may belong to an index that was killed before it had a header."""
    return entry.name == LOCK or entry.name.startswith(f".{HEADER}.") or _is_generation(entry)


def _is_own_header(path: Path) -> bool:
    """Whether the header is that of an index; of one that cannot be read what lies beside it tells."""
    try:
        return read_json(path / HEADER).get("format") == FORMAT
    except ValueError:
        return bool(generations(path))
