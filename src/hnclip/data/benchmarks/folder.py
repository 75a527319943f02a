"""The folder of a benchmark: which of its files are there, and where."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hnclip.data.readers.locate import Pictures


@dataclass(frozen=True)
class NeededFile:
    """A file, or directory of files, that a benchmark is read from.

    `name` is its path in the folder as published, `what` says what it holds, `origin` where it comes from; `also` are
    other names that it goes by.
    """

    name: str
    what: str
    origin: str
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.what}), from {self.origin}"


@dataclass(frozen=True)
class Folder:
    """A benchmark's folder and the pictures that belong to it."""

    root: Path
    pictures: Pictures

    def find(self, file: NeededFile) -> Path | None:
        """Where the file lies, under any of its names; None if it does not."""
        return find_below(self.root, (file.name, *file.also))

    def path(self, file: NeededFile) -> Path:
        """Where a file lies that is known to be there."""
        found = self.find(file)
        if found is None:
            raise ValueError(f"{self.root} lacks {file}")
        return found


def find_below(root: Path, names: Iterable[str]) -> Path | None:
    """The first of these names that exists in the folder or one level below it."""
    for name in names:
        if (root / name).exists():
            return root / name
        below = [folder / name for folder in _folders(root) if (folder / name).exists()]
        if len(below) > 1:
            raise ValueError(f"{name} lies in {root} more than once: {below[0]} and {below[1]}; keep one of them")
        if below:
            return below[0]
    return None


def _folders(root: Path) -> list[Path]:
    with os.scandir(root) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith("."))
