"""Which file an image's name in a table means, in directories and tar files."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

from hnclip.core import ImageSource, Problem
from hnclip.data.image_sources import FileImage, TarImage

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_COMPRESSED = {b"\x1f\x8b": "gunzip -k", b"BZh": "bunzip2 -k", b"\xfd7zXZ": "unxz -k", b"(\xb5/\xfd": "unzstd"}


class ImageFinder:
    """The images in a directory, with all below it, or in an uncompressed tar file.

    Directories are listed once each, when a name first needs them.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = os.path.abspath(root)
        self._tar: TarIndex | None = None
        self._folders: dict[str, dict[str, str]] = {}
        self._by_name: dict[str, list[str]] | None = None
        if os.path.isfile(self.root):
            self._tar = index_tar(Path(self.root))
        elif not os.path.isdir(self.root):
            raise ValueError(f"{root} should hold the images, but does not exist: name a directory or .tar file")

    @property
    def is_directory(self) -> bool:
        return self._tar is None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Damage of the tar file."""
        return () if self._tar is None else self._tar.problems

    def relative(self, name: str) -> str:
        """A name in a table as a normalised POSIX path, relative to the root if it lies below it."""
        path = os.path.normpath(name.replace("\\", "/"))
        return path[len(self.root) + 1 :] if path.startswith(self.root + "/") else path

    def at(self, name: str) -> FileImage:
        """The file of that path, whether or not it exists."""
        path = self.relative(name)
        if path.startswith(("/", "../")):
            folder, base = os.path.split(os.path.normpath(os.path.join(self.root, path)))
            return FileImage(base, folder)
        return FileImage(path, self.root)

    def find(self, name: str) -> ImageSource | None:
        """The image of exactly that path, below the root or absolute; None if there is none."""
        for path in dict.fromkeys((self.relative(name), name)):  # a name may contain real backslashes
            found = self._spelling(path)
            if found is not None:
                return self._source(found)
        return None

    def find_by_name(self, name: str) -> ImageSource | None:
        """The image whose path ends most like this one, at least with the same base name; None if there is none.

        Raises:
            ValueError: several images fit equally well.
        """
        path = self.relative(name)
        if self._by_name is None:
            self._by_name = {}
            for file in files_below(Path(self.root)) if self._tar is None else self._tar.files:
                self._by_name.setdefault(_parts(file)[0], []).append(file)
        same = self._by_name.get(_parts(path)[0], [])
        shared = [_shared_end(path, file) for file in same]
        fitting = [file for file, count in zip(same, shared) if count == max(shared)]
        if len(fitting) > 1:
            raise ValueError(
                f"several images in {self.root} could be {name!r}: {', '.join(sorted(fitting)[:3])}; name images by "
                "their path"
            )
        return self._source(fitting[0]) if fitting else None

    def _source(self, path: str) -> ImageSource:
        return self.at(path) if self._tar is None else self._tar.image(path)

    def _spelling(self, path: str) -> str | None:
        """The path as the directory or tar spells it. Archives packed on macOS spell accents as two characters."""
        folder, slash, base = path.rpartition("/")
        if self._tar is not None:
            folder, slash, base = "", "", path
        names = self._names(folder or slash)
        found = names.get(base) or names.get(normalize("NFC", base))
        return None if found is None else folder + slash + found

    def _names(self, folder: str) -> dict[str, str]:
        """The files of the tar, or of a directory that is absolute or below the root: each by its name, and by its
        name with composed accents."""
        if folder not in self._folders:
            names: Iterable[str] = ()
            if self._tar is not None:
                names = self._tar.files
            else:
                with suppress(OSError), os.scandir(os.path.join(self.root, folder)) as entries:  # absent or unreadable
                    names = [entry.name for entry in entries if entry.is_file()]
            self._folders[folder] = {normalize("NFC", name): name for name in names} | {name: name for name in names}
        return self._folders[folder]


def is_url(name: str) -> bool:
    return _URL.match(name) is not None


def _parts(path: str) -> list[str]:
    return normalize("NFC", path).split("/")[::-1]


def _shared_end(first: str, second: str) -> int:
    """How many trailing parts two paths have in common."""
    count = 0
    for one, other in zip(_parts(first), _parts(second)):
        if one != other:
            break
        count += 1
    return count


def files_below(root: Path, report: Callable[[OSError], None] | None = None) -> Iterator[str]:
    """Paths of all files below, relative to the root, sorted by directory; hidden ones are left out. Links to
    directories are followed, and each directory is visited once.

    Args:
        report: called for directories that cannot be listed; the error's `filename` says which.
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


@dataclass(frozen=True)
class TarIndex:
    """The regular files in a tar, in their order, and its damage. If a name occurs twice, the later file counts.

    `files` has offset and size of each file by its name, without a leading `./`.
    """

    path: Path
    files: dict[str, tuple[int, int]]
    problems: tuple[Problem, ...] = ()

    def image(self, name: str) -> TarImage:
        return TarImage(self.path, name, *self.files[name])


def index_tar(path: Path) -> TarIndex:
    """Index an uncompressed tar by its headers. A damaged or incomplete one keeps its first files, with a problem."""
    with path.open("rb") as file:
        start = file.read(8)
        for magic, command in _COMPRESSED.items():
            if start.startswith(magic):
                raise ValueError(
                    f"{path} is compressed, and images inside cannot be read in place: run `{command} {path}` and use "
                    "the .tar that it writes"
                )
        total = file.seek(0, os.SEEK_END)
        file.seek(0)
        files: dict[str, tuple[int, int]] = {}
        try:
            tar = tarfile.TarFile(fileobj=file)
        except (tarfile.TarError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} is not a tar file: {error}") from error
        try:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # else every header stays in memory
                if member.offset_data + member.size > total:
                    raise tarfile.ReadError(f"{member.name} is cut off")
                # Links have no content of their own, and sparse files are not stored in one piece.
                if member.isreg() and not member.issparse():
                    files[member.name.removeprefix("./")] = (member.offset_data, member.size)
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes anything but a header for the end
                raise tarfile.ReadError("bad header")
        except (tarfile.TarError, ValueError, OverflowError) as error:
            detail = f"the tar file is damaged or incomplete ({error}); {len(files)} files before that are used"
            return TarIndex(path, files, (Problem("unreadable row", str(path), detail),))
    return TarIndex(path, files)
