"""Atomic files and directories, exclusive locks, and JSON objects."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` atomically if the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _temporary(path, "new")
    partial.touch()
    mode = partial.stat().st_mode  # what the umask allows; a writer that makes its own file may be stricter
    try:
        yield partial
        partial.chmod(mode)
        _flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replace_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that replaces `path` if the block ends without an error.

    An existing directory is swapped by two renames. A process killed between them leaves the old one as
    `.NAME.old-…`, and `recover_directory` restores it.
    """
    path = path.resolve()  # a link stays, its target is replaced
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} exists and is not a directory")
    partial, old = _temporary(path, "new"), _temporary(path, "old")
    partial.mkdir(parents=True)
    mode = partial.stat().st_mode & 0o666  # what the umask allows; some writers make their files private
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                file.chmod(mode)
                _flush(file)
        if path.exists():
            os.replace(path, old)
            try:
                os.replace(partial, path)
            except BaseException:
                os.replace(old, path)
                raise
            shutil.rmtree(old)
        else:
            os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def recover_directory(path: Path) -> None:
    """Finish an interrupted `replace_directory`: restore the old directory if there is no new one, and delete
    temporary directories."""
    path = path.resolve()
    old = _leftovers(path, "old")
    if old and not path.exists():
        os.replace(old.pop(), path)
    for leftover in [*old, *_leftovers(path, "new")]:
        shutil.rmtree(leftover, ignore_errors=True)


class Busy(ValueError):
    """Another process holds a lock."""


@contextmanager
def exclusive_lock(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file, or raise `Busy` with the message `busy`. The lock ends with the process, even if killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise Busy(busy) from error
    except (NotImplementedError, OSError) as error:  # some network file systems have no locks
        raise ValueError(
            f"{path} cannot be locked ({error}), and without a lock two processes could write at once: use a directory "
            "on another file system"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """An SQLite write transaction, rolled back if the block raises."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # some errors have ended it already
            database.execute("ROLLBACK")
        raise


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError if it holds anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


def _temporary(path: Path, mark: str) -> Path:
    return path.with_name(f".{path.name}.{mark}-{secrets.token_hex(4)}")


def _leftovers(path: Path, mark: str) -> list[Path]:
    """Directories that `_temporary` named for this path, oldest first."""
    name = re.compile(rf"\.{re.escape(path.name)}\.{mark}-[0-9a-f]{{8}}")
    found = [other for other in path.parent.glob(".*") if name.fullmatch(other.name) and other.is_dir()]
    return sorted(found, key=lambda other: other.stat().st_mtime)


def _flush(file: Path) -> None:
    """Write the bytes to disk before the rename, so that a power cut cannot leave a name without its content."""
    with file.open("rb+") as handle:  # Windows flushes only files that are open for writing
        os.fsync(handle.fileno())
