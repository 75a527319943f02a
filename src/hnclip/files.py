"""Files, directories and transactions that are there whole or not at all or have one writer, and settings by name."""

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


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place, in one step, when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(path, "new")
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
    """A temporary directory beside `path` that takes its place when the block ends without an error.

    Two renames swap an existing directory for the new one; a process killed between them leaves the old one beside
    it as `.NAME.old-…`, and `recover_directory` puts it back.
    """
    path = path.resolve()  # behind a link it is the linked directory that is replaced
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} exists and is not a directory")
    partial, old = _beside(path, "new"), _beside(path, "old")
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
    """Finish what a kill interrupted in `replace_directory`: bring back the old directory if no new one came, and
    clear away what was left unfinished."""
    path = path.resolve()
    old = _left_beside(path, "old")
    if old and not path.exists():
        os.replace(old.pop(), path)
    for leftover in [*old, *_left_beside(path, "new")]:
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def only_process(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file for this process, or say `busy`; the lock ends with the process, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)  # less what the umask takes; os.open's own 0o777 runs
    try:
        _lock(handle, path, busy)
        yield
    finally:
        os.close(handle)


@contextmanager
def writing(database: sqlite3.Connection) -> Iterator[None]:
    """A transaction of SQLite that no other writer shares; an error undoes it."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # some errors have ended it already
            database.execute("ROLLBACK")
        raise


def file_name(*names: str) -> str:
    """Names as the name of a file. The end of a long one tells more than its beginning.

    >>> file_name("convergence", "scenes/park")
    'convergence-scenes-park'
    """
    plain = ("".join(letter if letter.isalnum() else "-" for letter in name).strip("-") for name in names)
    return "-".join(plain)[-60:].strip("-")


def read_settings(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} holds {type(settings).__name__}, not an object of settings")
    return settings


def _lock(handle: int, path: Path, busy: str) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: no advisory locks of this kind; two writers are then the user's care
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(busy) from error
    except OSError as error:  # some network file systems know no locks
        raise ValueError(
            f"{path} cannot be locked ({error.strerror or error}), and without a lock two processes could write at "
            "once: use a directory on another file system"
        ) from error


def _beside(path: Path, mark: str) -> Path:
    return path.with_name(f".{path.name}.{mark}-{secrets.token_hex(4)}")


def _left_beside(path: Path, mark: str) -> list[Path]:
    """The directories that `_beside` named for this path, oldest first."""
    name = re.compile(rf"\.{re.escape(path.name)}\.{mark}-[0-9a-f]{{8}}")
    found = [other for other in path.parent.glob(".*") if name.fullmatch(other.name) and other.is_dir()]
    return sorted(found, key=lambda other: other.stat().st_mtime)


def _flush(file: Path) -> None:
    """Bytes to the disk before the rename, so that a power cut cannot leave a name without its content."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
