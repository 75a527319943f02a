"""An index as a reader sees it: one version of it, whatever is written meanwhile. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from hnclip.core import ImageSource, InvalidImage, Problem
from hnclip.search.index.catalogue import (
    ASKED,
    content_hash,
    explained,
    one_moment,
    open_catalogue,
    read_state,
    thumbnails_end,
)
from hnclip.search.index.layout import (
    CATALOGUE,
    KINDS,
    THUMBNAILS,
    TOKENS,
    Kind,
    damaged,
    generation_directory,
    read_header,
)
from hnclip.search.index.places import source_at
from hnclip.search.index.vectors import StoredVectors, from_bf16, mapped, row_files


@dataclass(frozen=True)
class Item:
    """A picture under a name, and what is said of it.

    Args:
        id: stays the same as long as neither picture, name nor captions change.
        row: of its vector; items of the same content share it.
        place: where it lies (index/places.py).
        shape: width and height of the upright picture.
    """

    id: int
    name: str
    row: int
    place: str
    shape: tuple[int, int]
    captions: tuple[str, ...]


@dataclass(frozen=True)
class Caption:
    """A caption in the index, and the items that it is said of."""

    row: int
    text: str
    items: tuple[Item, ...]


class Index:
    """An open index. Threads may share it."""

    def __init__(self, path: str | Path) -> None:
        """
        Raises:
            ValueError: there is no index, or it is damaged or of another layout; the message says what to do.
        """
        self.path = Path(path)
        self._lock = Lock()
        while True:
            self.generation = read_header(self.path)
            try:
                self._open()
                return
            except (ValueError, OSError):  # a writer may have put another generation in its place meanwhile
                if read_header(self.path) == self.generation:
                    raise

    def _open(self) -> None:
        """Open all files of the generation: they are there to the end, whoever removes their names."""
        self.directory = generation_directory(self.path, self.generation)
        with ExitStack() as opened:
            self._database = opened.enter_context(closing(open_catalogue(self.directory / CATALOGUE, self.path)))
            with explained(self.path):
                self._database.execute("PRAGMA query_only = ON")
                with one_moment(self._database):
                    self.about, self.state = read_state(self._database, self.path)
                    self._dead = {kind: self._read_dead(kind) for kind in KINDS}
                    thumbnails = thumbnails_end(self._database, self.state.images)
            self.root = None if self.about.root is None else Path(self.about.root)
            self._check_sizes(thumbnails)
            self._vectors = {kind: self._open_vectors(kind) for kind in KINDS}
            shape = (self.state.images, self.about.patches, self.about.width)
            self._tokens = mapped(self.directory / TOKENS, np.dtype(np.uint16), shape) if self.about.patches else None
            self._thumbnails = opened.enter_context((self.directory / THUMBNAILS).open("rb", buffering=0))
            self._opened = opened.pop_all()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._opened.close()

    def vectors(self, kind: Kind) -> StoredVectors:
        return self._vectors[kind]

    def dead(self, kind: Kind) -> np.ndarray:
        """Rows of vectors that no item has any more, in order: they are never found."""
        return self._dead[kind]

    def count(self) -> int:
        """Items."""
        question = "SELECT count(*) FROM items WHERE born <= ?1 AND (died IS NULL OR died > ?1)"
        return self._ask(question, (self.state.version,))[0][0]

    def items(self, rows: Sequence[int]) -> dict[int, tuple[Item, ...]]:
        """The items of rows of images, in the order of their ids."""
        found: dict[int, list[Item]] = {}
        for item in self._items("items.row", rows):
            found.setdefault(item.row, []).append(item)
        return {row: tuple(some) for row, some in found.items()}

    def item(self, number: int) -> Item | None:
        """The item of an id, if this version has it."""
        if not 0 <= number < 2**63:  # SQLite knows no others
            return None
        return next(iter(self._items("items.id", [number])), None)

    def captions(self, rows: Sequence[int]) -> dict[int, Caption]:
        """The captions of rows of captions."""
        owners: dict[int, list[int]] = {}
        texts: dict[int, str] = {}
        for some in _parts(rows):
            marks = ",".join("?" * len(some))
            texts.update(self._ask(f"SELECT row, text FROM captions WHERE row IN ({marks})", some))
            for row, item in self._ask(
                f"SELECT DISTINCT row, item FROM said WHERE row IN ({marks}) ORDER BY item", some
            ):
                owners.setdefault(row, []).append(item)
        items = {item.id: item for item in self._items("items.id", [one for some in owners.values() for one in some])}
        return {
            row: Caption(row, text, tuple(items[one] for one in owners.get(row, ()) if one in items))
            for row, text in texts.items()
        }

    def all_items(self) -> Iterator[Item]:
        """Every item, in the order of ids."""
        first = 0
        question = (
            "SELECT id FROM items WHERE id > ?1 AND born <= ?2 AND (died IS NULL OR died > ?2) ORDER BY id LIMIT ?3"
        )
        while ids := [number for (number,) in self._ask(question, (first, self.state.version, ASKED))]:
            yield from self._items("items.id", ids)
            first = ids[-1]

    def problems(self) -> list[Problem]:
        """What could not be indexed."""
        return [
            Problem(kind, name, detail)
            for name, kind, detail in self._ask("SELECT name, kind, detail FROM problems ORDER BY name")
        ]

    def thumbnail(self, row: int) -> bytes:
        """A small JPEG of the picture in a row."""
        at, size = self._picture(row, "thumbnail_at, thumbnail_size")
        with self._lock:  # one place in the file for all threads
            self._thumbnails.seek(at)
            content = self._thumbnails.read(size)
        if content is None or len(content) < size:
            raise ValueError(damaged(self.path, f"{THUMBNAILS} is cut short"))
        return content

    def source(self, item: Item) -> ImageSource | None:
        """Where the item's picture lies now; None if only the data set that it came from could give it."""
        return source_at(item.place, self.root)

    def content(self, item: Item) -> bytes:
        """The bytes of the item's picture, exactly as they were indexed.

        Raises:
            InvalidImage: it is gone, or other bytes lie there now, whatever they are.
        """
        source = self.source(item)
        if source is None:
            raise InvalidImage("missing image", f"{item.name} is no file of its own")
        content = source.read()
        if content_hash(content) != self._picture(item.row, "content")[0]:
            raise InvalidImage("missing image", f"{item.name} has changed since it was indexed: index it again")
        return content

    def tokens(self, rows: Sequence[int]) -> np.ndarray | None:
        """Patch vectors [n, P, D] float32 of rows of images, if the index keeps them."""
        if self._tokens is None:
            return None
        return from_bf16(self._tokens[np.asarray(rows, np.int64)])

    def stale(self) -> bool:
        """Whether there is a newer version by now."""
        if read_header(self.path) != self.generation:
            return True
        return self._ask("SELECT version FROM state")[0][0] != self.state.version

    def _open_vectors(self, kind: Kind) -> StoredVectors:
        files = row_files(self.directory, kind, self.about.width, self.about.storage)
        return StoredVectors(files, getattr(self.state, kind), self.about.width, getattr(self.state, f"{kind}_slack"))

    def _check_sizes(self, thumbnails: int) -> None:
        """Every file must hold what the catalogue names."""
        wanted = [(self.directory / THUMBNAILS, thumbnails)]
        if self.about.patches:
            wanted.append((self.directory / TOKENS, 2 * self.state.images * self.about.patches * self.about.width))
        for kind in KINDS:
            files = row_files(self.directory, kind, self.about.width, self.about.storage)
            wanted += [(file, getattr(self.state, kind) * row) for file, row in files.files()]
        for file, needed in wanted:
            size = file.stat().st_size if file.exists() else -1
            if size < needed or size < 0:
                what = f"holds {size:,} bytes of {needed:,}" if size >= 0 else "is missing"
                raise ValueError(
                    f"{self.path} is damaged: {self.directory.name}/{file.name} {what}. Mend it by indexing again:\n"
                    f"  {self.about.command(self.path)}"
                )

    def _read_dead(self, kind: Kind) -> np.ndarray:
        found = self._database.execute("SELECT row FROM dead WHERE kind = ? ORDER BY row", (kind,)).fetchall()
        return np.array([row for (row,) in found], np.int64)

    def _items(self, column: str, values: Sequence[int]) -> Iterator[Item]:
        said: dict[int, list[str]] = {}
        found: list[tuple[Any, ...]] = []
        for some in _parts(values):
            marks = ",".join("?" * len(some))
            found += self._ask(
                "SELECT items.id, items.name, items.row, items.place, pictures.width, pictures.height "
                f"FROM items JOIN pictures ON pictures.row = items.row WHERE {column} IN ({marks}) "
                "AND born <= ? AND (died IS NULL OR died > ?) ORDER BY items.id",
                [*some, self.state.version, self.state.version],
            )
        for some in _parts([item[0] for item in found]):
            marks = ",".join("?" * len(some))
            for item, text in self._ask(
                "SELECT said.item, captions.text FROM said JOIN captions ON captions.row = said.row "
                f"WHERE said.item IN ({marks}) ORDER BY said.item, said.number",
                some,
            ):
                said.setdefault(item, []).append(text)
        for number, name, row, place, width, height in found:
            yield Item(number, name, row, place, (width, height), tuple(said.get(number, ())))

    def _picture(self, row: int, columns: str) -> tuple[Any, ...]:
        found = self._ask(f"SELECT {columns} FROM pictures WHERE row = ?", (int(row),))
        if not found:
            raise ValueError(f"{self.path} has no picture in row {row}")
        return found[0]

    def _ask(self, question: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock, explained(self.path):
            return self._database.execute(question, tuple(values)).fetchall()


def _parts(values: Sequence[int]) -> Iterator[list[int]]:
    plain = [int(value) for value in values]
    for start in range(0, len(plain), ASKED):
        yield plain[start : start + ASKED]
