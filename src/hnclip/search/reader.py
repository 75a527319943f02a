"""Reads an index: one state of it, whatever a writer does at the same time. Nothing here imports torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from hnclip.core import ImageSource, InvalidImage, Problem
from hnclip.data.image_sources import FileImage, TarImage
from hnclip.search.database import (
    Kind,
    check_vectors,
    connect,
    content_hash,
    current_database,
    database_errors,
    read_ids,
    read_meta,
)
from hnclip.search.vectors import map_rows

CHECKED = 2**26  # bytes of a file whose checksum is compared whenever it is opened; updates compare those of all files
CHUNK = 500  # values in one query; old versions of SQLite allow 999
ATTEMPTS, PAUSE = 4, 0.05  # further ones to open an index that may be changing, and seconds before each


@dataclass(frozen=True)
class IndexedImage:
    """A file of the index.

    Args:
        id: stays the same as long as there is a file of this name.
        image: id of its content, which files with equal bytes share; `hash` identifies it.
        place: where it is (`place_of`).
        width, height: of the upright image.
    """

    id: int
    name: str
    image: int
    hash: bytes
    place: str
    width: int
    height: int
    captions: tuple[str, ...]


@dataclass(frozen=True)
class IndexedCaption:
    """A caption of the index, and the files that have it."""

    text: str
    files: tuple[IndexedImage, ...]


def place_of(image: ImageSource, root: Path | None) -> str:
    """Where an image is, as JSON: a file, or a part of a tar file, below the root relative to it, so that the folder
    may move as a whole; "{}" for an image that only its data set can give."""
    if isinstance(image, FileImage):
        return json.dumps({"file": _relative(image.path, root)})
    if isinstance(image, TarImage):
        tar = _relative(image.tar, root)
        return json.dumps({"tar": tar, "name": image.name, "offset": image.offset, "size": image.size})
    return "{}"


def source_at(place: str, root: Path | None) -> ImageSource | None:
    """The image at a place; None if only its data set can give it."""
    found, base = json.loads(place), root or Path()  # an absolute path stays as it is
    if "file" in found:
        return FileImage(base / found["file"])
    if "tar" in found:
        return TarImage(base / found["tar"], found["name"], found["offset"], found["size"])
    return None


def _relative(path: Path, root: Path | None) -> str:
    absolute = Path(os.path.abspath(path))
    return (absolute.relative_to(root) if root and absolute.is_relative_to(root) else absolute).as_posix()


class IndexReader:
    """An index opened for reading. Threads may share it."""

    def __init__(self, path: str | Path) -> None:
        """
        Raises:
            ValueError: there is no index, or it is damaged or of another format; the message says what to do.
        """
        self.path = Path(path)
        self._lock = Lock()
        for last in (False,) * ATTEMPTS + (True,):
            self.database_file = current_database(self.path)
            try:
                self._open()
                return
            except (OSError, ValueError):
                # A file that disappears while a writer replaces or compacts the index is there under a new name.
                if last:
                    raise
                time.sleep(PAUSE)

    def _open(self) -> None:
        with database_errors(self.path):
            self._database = connect(self.database_file)
        try:
            with database_errors(self.path):
                self._database.execute("BEGIN")  # one state of the database for all that follows
                self._version = self._data_version()
                self.about, self.files, self.extras = read_meta(self._database, self.path)
                self.ids, self.deleted = dict[Kind, np.ndarray](), dict[Kind, np.ndarray]()
                for kind, rows in self.files.items():
                    self.ids[kind], self.deleted[kind] = read_ids(self._database, kind, rows)  # [N], [deleted]
                self._database.execute("COMMIT")
            check_vectors(self.path, self.about, self.files, limit=CHECKED)
            self.vectors: dict[Kind, np.ndarray] = {
                kind: map_rows(self.path / rows.name, rows.rows, self.about.width)  # [N, D]
                for kind, rows in self.files.items()
            }
        except BaseException:
            self._database.close()
            raise
        self.root = None if self.about.root is None else Path(self.about.root)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> IndexReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def changed(self) -> bool:
        """Whether a writer has committed something since the index was opened."""
        if current_database(self.path) != self.database_file:
            return True
        with self._lock, database_errors(self.path):
            return self._data_version() != self._version

    def count(self, kind: Kind) -> int:
        """Files, or captions, that can be found."""
        if kind == "captions":
            return len(self.ids[kind]) - len(self.deleted[kind])
        return self._query("SELECT count(*) FROM files")[0][0]

    def file(self, number: int) -> IndexedImage | None:
        """The file of an id."""
        return next(iter(self._files("files.id", [number])), None)

    def files_of(self, images: Sequence[int]) -> dict[int, list[IndexedImage]]:
        """The files of images, by the image's id, in the order of their own ids."""
        found: dict[int, list[IndexedImage]] = {}
        for file in self._files("files.image", images):
            found.setdefault(file.image, []).append(file)
        return found

    def captions(self, ids: Sequence[int]) -> dict[int, IndexedCaption]:
        """Captions that a file has, by id."""
        texts = dict(self._query_many("SELECT id, text FROM captions WHERE id IN ({})", ids))
        pairs = list(self._query_many("SELECT DISTINCT caption, file FROM said WHERE caption IN ({})", list(texts)))
        files = {file.id: file for file in self._files("files.id", sorted({file for _, file in pairs}))}
        owners: dict[int, list[IndexedImage]] = {}
        for caption, file in sorted(pairs):
            if file in files:
                owners.setdefault(caption, []).append(files[file])
        return {caption: IndexedCaption(texts[caption], tuple(some)) for caption, some in owners.items()}

    def problems(self) -> list[Problem]:
        """What could not be indexed."""
        rows = self._query("SELECT kind, name, detail FROM problems ORDER BY name")
        return [Problem(kind, name, detail) for kind, name, detail in rows]

    def thumbnail(self, image: int) -> bytes:
        """A small JPEG of an image. KeyError if the image was deleted."""
        found = self._query("SELECT jpeg FROM thumbnails WHERE image = ?", (image,))
        if not found:
            raise KeyError(image)
        return found[0][0]

    def source(self, file: IndexedImage) -> ImageSource | None:
        """Where the image of a file is now; None if only its data set can give it."""
        return source_at(file.place, self.root)

    def content(self, file: IndexedImage) -> bytes:
        """The bytes of a file, exactly as they were indexed. InvalidImage if it is gone or has changed."""
        source = self.source(file)
        if source is None:
            raise InvalidImage("missing image", f"{file.name} is not a file of its own")
        content = source.read()
        if content_hash(content) != file.hash:
            raise InvalidImage("missing image", f"{file.name} has changed since it was indexed: index it again")
        return content

    def _data_version(self) -> int:
        """Changes with every commit of another connection."""
        return self._database.execute("PRAGMA data_version").fetchone()[0]

    def _files(self, column: str, values: Sequence[int]) -> list[IndexedImage]:
        found: list[Any] = sorted(
            self._query_many(
                "SELECT files.id, name, image, hash, place, width, height FROM files JOIN images ON images.id = image "
                f"WHERE {column} IN ({{}})",
                values,
            )
        )
        said: dict[int, list[str]] = {}
        for file, _, text in sorted(
            self._query_many(
                "SELECT file, number, text FROM said JOIN captions ON captions.id = caption WHERE file IN ({})",
                [row[0] for row in found],
            )
        ):
            said.setdefault(file, []).append(text)
        return [IndexedImage(*row, tuple(said.get(row[0], ()))) for row in found]  # type: ignore[call-arg]

    def _query_many(self, question: str, values: Sequence[int]) -> Iterator[Any]:
        """The rows of a query with a list of values in place of {}, of which SQLite takes only so many at once."""
        for start in range(0, len(values), CHUNK):
            some = [int(value) for value in values[start : start + CHUNK]]
            yield from self._query(question.format(",".join("?" * len(some))), some)

    def _query(self, question: str, values: Iterable[Any] = ()) -> list[Any]:
        with self._lock, database_errors(self.path):
            return self._database.execute(question, tuple(values)).fetchall()
