"""Which file a picture's name means: names in published tables seldom fit the machine they are read on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from unicodedata import normalize
from urllib.parse import unquote, urlsplit

from hnclip.core import ImageSource, Problem
from hnclip.data.pictures import FileImage
from hnclip.data.readers.tars import TarIndex, index_tar


class Pictures:
    """The pictures in a directory, with all below it, or in an uncompressed tar file; found by name.

    Directories are listed once each, when a name first needs them; no file is looked at one by one.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.problems: tuple[Problem, ...] = ()
        """What is wrong with the tar file."""
        self._tar: TarIndex | None = None
        self._folders: dict[str, set[str]] = {}
        self._by_base: dict[str, list[str]] | None = None
        self._found_exactly: set[str] = set()
        self._found_by_end: dict[str, str] = {}
        if self.root.is_file():
            self._tar = index_tar(self.root)
            self.problems = self._tar.problems
        elif not self.root.is_dir():
            raise ValueError(
                f"{self.root}, where the pictures should be, does not exist: name a directory or .tar file"
            )

    def find(self, name: str) -> ImageSource:
        """The picture of that path below the root; else the only one whose path ends like it, by base name at least;
        else a FileImage of where it should be, so that looking at it says "missing image".

        Raises ValueError where several pictures fit, and where two names that contradict each other lead to one
        picture: `train/1.jpg` and `test/1.jpg` must not both become the only `1.jpg` that is there.
        """
        if "\0" in name:
            raise ValueError(f"{name!r} cannot be a file's name")
        exact = self._exact_path(name)
        if exact is not None:
            self._found_exactly.add(exact)
            self._check_agree(exact, exact, self._found_by_end.get(exact))
            return self._picture(exact)
        path = plain_name(name)
        fitting = self._ending_like(path)
        if not fitting:
            return FileImage(self.root / path)
        if len(fitting) > 1:
            raise ValueError(
                f"several pictures in {self.root} could be {name!r}: {', '.join(sorted(fitting)[:3])}; "
                "name pictures by their path"
            )
        found = fitting[0]
        self._check_agree(found, path, found if found in self._found_exactly else self._found_by_end.get(found))
        self._found_by_end.setdefault(found, path)
        return self._picture(found)

    def has(self, name: str) -> bool:
        """Whether there is a picture, or several, that the name could mean."""
        return self._exact_path(name) is not None or bool(self._ending_like(plain_name(name)))

    def same_name(self, name: str) -> list[tuple[str, ImageSource]]:
        """Every picture with the base name of this path, each with its own path, the root's included."""
        return [(str(self.root / path), self._picture(path)) for path in self._same_base(plain_name(name))]

    def exact(self, name: str) -> ImageSource | None:
        """The picture of exactly that path, below the root or absolute; None if there is none."""
        path = self._exact_path(name)
        return None if path is None else self._picture(path)

    def _exact_path(self, name: str) -> str | None:
        if self._has(name):
            return name
        path = plain_name(name)
        return path if self._has(path) else None

    def _has(self, path: str) -> bool:
        if self._tar is not None:
            return path in self._tar.files
        folder, slash, base = path.rpartition("/")
        return base in self._list(folder or (slash and "/"))

    def _picture(self, path: str) -> ImageSource:
        return FileImage(self.root / path) if self._tar is None else self._tar.image(path)

    def _list(self, folder: str) -> set[str]:
        """The files in a directory below the root, or in an absolute one."""
        if folder not in self._folders:
            try:
                with os.scandir(os.path.join(self.root, folder)) as entries:
                    self._folders[folder] = {entry.name for entry in entries if entry.is_file()}
            except OSError:  # absent, no directory, or not ours to read: no picture is found there
                self._folders[folder] = set()
        return self._folders[folder]

    def _ending_like(self, path: str) -> list[str]:
        """The files of the same base name that share the most trailing parts with this path."""
        found = self._same_base(path)
        if len(found) < 2:
            return found
        shared = [shared_end(path, file) for file in found]
        return [file for file, count in zip(found, shared) if count == max(shared)]

    def _same_base(self, path: str) -> list[str]:
        if self._by_base is None:
            self._by_base = {}
            for file in files_below(self.root) if self._tar is None else self._tar.files:
                self._by_base.setdefault(_parts(file)[0], []).append(file)
        return self._by_base.get(_parts(path)[0], [])

    def _check_agree(self, picture: str, name: str, earlier: str | None) -> None:
        if earlier is None or earlier == name:
            return
        if shared_end(earlier, name) < min(len(_parts(earlier)), len(_parts(name))):
            raise ValueError(f"{earlier!r} and {name!r} would both be the picture {picture} in {self.root}")


def plain_name(name: str) -> str:
    """A picture's name as a POSIX path: slashes of either kind, no `./`; of an address only its last part."""
    if "://" in name:
        return PurePosixPath(unquote(urlsplit(name).path)).name or name
    return os.path.normpath(name.replace("\\", "/"))


def _parts(path: str) -> list[str]:
    """The parts of a path, the last one first. Archives packed on macOS spell accents as two characters, tables
    written elsewhere as one; here they are equal."""
    return normalize("NFC", path).split("/")[::-1]


def shared_end(first: str, second: str) -> int:
    """How many trailing parts two paths have in common."""
    count = 0
    for one, other in zip(_parts(first), _parts(second)):
        if one != other:
            break
        count += 1
    return count


def files_below(root: Path, report: Callable[[OSError], None] | None = None) -> Iterator[str]:
    """Paths of all files below, relative to the root. Links to directories are followed, each place visited once; what
    is hidden is left out, and with it macOS's companions.

    Args:
        report: told of directories that cannot be listed; `filename` says which.
    """
    visited = set()
    for folder, folders, files in os.walk(root, onerror=report, followlinks=True):
        place = os.path.realpath(folder)
        if place in visited:
            folders.clear()
            continue
        visited.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = os.path.relpath(folder, root)
        for name in sorted(name for name in files if not name.startswith(".")):
            yield name if below == "." else f"{below}/{name}"
