"""Which file an image's name in a table means, in directories and tar files."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from unicodedata import normalize

from hnclip.config import ReadConfig
from hnclip.core import ImageSource
from hnclip.data.image_sources import FileImage, TarImage
from hnclip.data.records import ReadLog, RowError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(name: str) -> bool:
    return _URL.match(name) is not None


class ImageFinder:
    """The images in a directory, with all below it, or in an uncompressed tar file."""

    def __init__(self, root: str | Path, log: ReadLog) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))
        self.tar = index_tar(Path(self.root), log) if os.path.isfile(self.root) else None
        if self.tar is None and not os.path.isdir(self.root):
            raise ValueError(f"{root} should hold the images, but does not exist: name a directory or .tar file")
        self._by_name: dict[str, list[str]] | None = None

    def relative(self, name: str) -> str:
        """A name in a table as a normalised POSIX path, relative to the root if it lies below it."""
        path = os.path.normpath(name.replace("\\", "/"))
        return path[len(self.root) + 1 :] if path.startswith(self.root + "/") else path

    def at(self, path: str) -> FileImage:
        """The file of a path that `relative` returned, whether or not it exists."""
        if path.startswith(("/", "../")):
            folder, base = os.path.split(os.path.normpath(os.path.join(self.root, path)))
            return FileImage(base, folder)
        return FileImage(path, self.root)

    def find(self, name: str) -> ImageSource | None:
        """The image of exactly that path, below the root or absolute; None if there is none. Accents may be one
        character or, as macOS spells them, two."""
        path = self.relative(name)
        for spelled in [path] if path.isascii() else [path, normalize("NFC", path), normalize("NFD", path)]:
            if os.path.isfile(os.path.join(self.root, spelled)) if self.tar is None else spelled in self.tar:
                return self._source(spelled)
        return None

    def find_by_name(self, name: str) -> ImageSource | None:
        """The image whose path ends most like this one, at least with the same base name; None if there is none.

        Raises:
            RowError: several images fit equally well.
        """
        if self._by_name is None:
            self._by_name = {}
            for file in files_below(Path(self.root)) if self.tar is None else self.tar:
                self._by_name.setdefault(_parts(file)[0], []).append(file)
        parts = _parts(self.relative(name))
        shared = {
            file: len(list(takewhile(lambda pair: pair[0] == pair[1], zip(parts, _parts(file)))))
            for file in self._by_name.get(parts[0], ())
        }
        fitting = [file for file, count in shared.items() if count == max(shared.values())]
        if len(fitting) > 1:
            some = ", ".join(sorted(fitting)[:3])
            raise RowError("missing image", f"several images in {self.root} could be {name!r}: {some}")
        return self._source(fitting[0]) if fitting else None

    def _source(self, path: str) -> ImageSource:
        return self.at(path) if self.tar is None else self.tar[path]


class TableImages:
    """Finds the images that tables name: by path below `read.images` or the table's folder, on request by file name."""

    def __init__(self, read: ReadConfig, log: ReadLog) -> None:
        self._log = log
        self._images = [] if read.images is None else [ImageFinder(read.images, log)]
        self._search = read.match == "name"
        self._folders: dict[Path, ImageFinder] = {}
        self._roots = self._images
        self._prefix = ""
        self._by_name: list[str] = []  # names in tables that only a search by file name found

    def enter(self, folder: Path, prefix: str = "") -> None:
        """Go on with a table in this folder. `prefix` is the folder's path below that of the whole source: the same
        name in two folders is not the same image."""
        if folder not in self._folders:
            self._folders[folder] = ImageFinder(folder, self._log)
        self._roots = [*self._images, self._folders[folder]]
        self._prefix = "" if self._images else prefix

    def find(self, written: str) -> tuple[ImageSource, str]:
        """The image, and its name for ids. An image that does not exist is found to be missing when it is read."""
        if is_url(written) or "\0" in written or not self._roots:
            why = "is a URL: download the images first" if is_url(written) else "is no file here (--read.images)"
            raise RowError("missing image", f"{written!r} {why}")
        first, *others = self._roots
        name = first.relative(written)
        image: ImageSource = first.at(name)
        if others or first.tar is not None or self._search or not written.isascii():  # else the path alone decides
            image = self._look_up(written) or image
            for root in others:
                name = root.relative(name)
        return image, os.path.normpath(f"{self._prefix}/{name}") if self._prefix and name[0] != "/" else name

    def _look_up(self, written: str) -> ImageSource | None:
        found = next((image for root in self._roots if (image := root.find(written))), None)
        if found is None and self._search:
            found = next((image for root in self._roots if (image := root.find_by_name(written))), None)
            self._by_name += [] if found is None else [written]
        return found

    def warn_of_search(self) -> None:
        """Report how many images were found by file name."""
        if self._by_name:
            first = ", ".join(map(repr, self._by_name[:3]))
            self._log.warn("matched by name", self._roots[0].root, f"{len(self._by_name):,} rows, first {first}")


def _parts(path: str) -> list[str]:
    return normalize("NFC", path).split("/")[::-1]


def files_below(root: Path, report: Callable[[OSError], None] | None = None) -> Iterator[str]:
    """Paths of all files below, relative to the root, sorted by directory; hidden ones are left out. Links to
    directories are followed, and each directory is visited once. `report` is called with the error of a directory that
    cannot be listed.
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


def index_tar(path: Path, log: ReadLog) -> dict[str, TarImage]:
    """The regular files in an uncompressed tar by their names, without a leading `./`, read from its headers; of two
    files with one name the later counts. A damaged or incomplete tar keeps its first files, with a problem."""
    with path.open("rb") as file:
        total = file.seek(0, os.SEEK_END)
        file.seek(0)
        files: dict[str, TarImage] = {}
        try:
            tar = tarfile.TarFile(fileobj=file)
        except (tarfile.TarError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} is not an uncompressed tar file ({error}); decompress a .tar.gz first") from error
        try:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # else every header stays in memory
                if member.offset_data + member.size > total:
                    raise tarfile.ReadError(f"{member.name} is cut off")
                # Links have no content of their own, and sparse files are not stored in one piece.
                if member.isreg() and not member.issparse():
                    name = member.name.removeprefix("./")
                    files[name] = TarImage(path, name, member.offset_data, member.size)
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes anything but a header for the end
                raise tarfile.ReadError("bad header")
        except (tarfile.TarError, ValueError, OverflowError) as error:
            detail = f"the tar file is damaged or incomplete ({error}); {len(files)} files before that are used"
            log.problem("unreadable row", str(path), detail)
    return files
