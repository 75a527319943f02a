"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place, in one step, when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        _flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replace_directory(path: Path) -> Iterator[Path]:
    """A temporary directory beside `path` that takes its place when the block ends without an error.

    Two renames swap an existing directory for the new one; a process killed between them leaves the old one beside
    it as `.NAME.old…`, and `recover_directory` puts it back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.new", dir=path.parent))
    partial.chmod(0o755)
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                _flush(file)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old", dir=path.parent))
            os.replace(path, old)
            os.replace(partial, path)
            shutil.rmtree(old)
        else:
            os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def recover_directory(path: Path) -> None:
    """Finish what a kill interrupted in `replace_directory`: bring back the old directory if no new one came, and
    clear away what was left unfinished."""
    old = sorted(path.parent.glob(f".{path.name}.old*"), key=lambda found: found.stat().st_mtime)
    if not path.exists():
        while old and not path.exists():
            candidate = old.pop()
            if any(candidate.iterdir()):
                os.replace(candidate, path)
    for leftover in [*old, *path.parent.glob(f".{path.name}.new*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def _flush(file: Path) -> None:
    """Bytes to the disk before the rename, so that a power cut cannot leave a name without its content."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
