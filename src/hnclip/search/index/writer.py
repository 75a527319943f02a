"""Changes an index, a version at a time: all of a change is there afterwards, or nothing of it."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from hnclip.data.records import Problem
from hnclip.files import only_process
from hnclip.search.index.catalogue import (
    ASKED,
    State,
    create_catalogue,
    explained,
    open_catalogue,
    text_hash,
    writing,
)
from hnclip.search.index.layout import (
    CATALOGUE,
    HEADER,
    LOCK,
    THUMBNAILS,
    TOKENS,
    About,
    Kind,
    generation_directory,
    read_header,
    write_header,
)
from hnclip.search.index.vectors import append, row_files, to_bf16, whole_rows, write_at

KINDS: tuple[Kind, ...] = ("images", "captions")


@dataclass(frozen=True)
class NewPicture:
    """Content that the index does not have yet.

    Shape:
        vector [D] of length 1; tokens [P, D] if the index keeps them
    """

    content: bytes
    vector: np.ndarray
    shape: tuple[int, int]
    thumbnail: bytes
    tokens: np.ndarray | None = None


@dataclass(frozen=True)
class NewItem:
    """A picture under a name; one that had the name before ends. Its content and captions are in the index, or come
    with the same change."""

    name: str
    content: bytes
    place: str
    stamp: str
    captions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """What a version does to the one before.

    Args:
        captions: vectors [D] of texts that the index does not have yet.
        gone: names of items that end.
        stamps: of items whose file has another stamp but the same content.
        problems: by stamp, what could not be indexed; a problem of the same name goes.
        solved: names of problems that are none any more.
    """

    pictures: Sequence[NewPicture] = ()
    captions: Mapping[str, np.ndarray] = field(default_factory=dict)
    items: Sequence[NewItem] = ()
    gone: Collection[str] = ()
    stamps: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[tuple[Problem, str]] = ()
    solved: Collection[str] = ()


@dataclass(frozen=True)
class Known:
    """A living item as the next run compares it."""

    stamp: str
    place: str
    content: bytes
    captions: tuple[str, ...]


class IndexWriter:
    """The only writer of an index, see `open_writer`. Its `state` is that of the last change."""

    def __init__(self, path: Path, generation: int, database: sqlite3.Connection, about: About, state: State) -> None:
        self.path, self.generation, self.about, self.state = path, generation, about, state
        self.directory = generation_directory(path, generation)
        self._database = database

    def known(self) -> Iterator[tuple[str, Known]]:
        """Living items by name."""
        said: dict[int, list[str]] = {}
        for item, text in self._database.execute(
            "SELECT said.item, captions.text FROM said JOIN captions ON captions.row = said.row JOIN items ON "
            "items.id = said.item WHERE items.died IS NULL ORDER BY said.item, said.number"
        ):
            said.setdefault(item, []).append(text)
        for number, name, stamp, place, content in self._database.execute(
            "SELECT items.id, items.name, items.stamp, items.place, pictures.content FROM items "
            "JOIN pictures ON pictures.row = items.row WHERE items.died IS NULL ORDER BY items.id"
        ):
            yield name, Known(stamp, place, content, tuple(said.get(number, ())))

    def problems(self) -> dict[str, str]:
        """Stamps of what could not be indexed, by name."""
        return dict(self._database.execute("SELECT name, stamp FROM problems"))

    def known_contents(self, contents: Sequence[bytes]) -> set[bytes]:
        """Those that the index has a vector of, also where no item shows it any more."""
        return set(self._rows("pictures", contents))

    def known_texts(self, texts: Sequence[str]) -> set[str]:
        hashes = {text_hash(text): text for text in texts}
        return {hashes[found] for found in self._rows("captions", list(hashes))}

    def commit(self, change: Change) -> None:
        """Make the next version.

        Raises:
            OSError: the disk is full or fails; the index is as it was.
        """
        with _room(self.path), explained(self.path):
            there = self._rows("pictures", [new.content for new in change.pictures])
            pictures = [new for mark, new in {new.content: new for new in change.pictures}.items() if mark not in there]
            there = self._rows("captions", [text_hash(text) for text in change.captions])
            texts = [text for text in change.captions if text_hash(text) not in there]
            thumbnails = self._write_pictures(pictures)
            image_slack = self._write_vectors("images", [new.vector for new in pictures])
            caption_slack = self._write_vectors("captions", [change.captions[text] for text in texts])
            old = self.state
            state = State(
                version=old.version + 1,
                images=old.images + len(pictures),
                captions=old.captions + len(texts),
                images_slack=max(old.images_slack, image_slack),
                captions_slack=max(old.captions_slack, caption_slack),
            )
            with writing(self._database):
                self._many(
                    "INSERT INTO pictures VALUES (?, ?, ?, ?, ?, ?)",
                    (
                        (old.images + number, new.content, *new.shape, at, len(new.thumbnail))
                        for number, (new, at) in enumerate(zip(pictures, thumbnails))
                    ),
                )
                self._many(
                    "INSERT INTO captions VALUES (?, ?, ?)",
                    ((old.captions + number, text_hash(text), text) for number, text in enumerate(texts)),
                )
                ended = self._end([*change.gone, *(item.name for item in change.items)], state.version)
                for item in change.items:
                    self._bear(item, state.version)
                self._bury(ended)
                self._many(
                    "UPDATE items SET stamp = ? WHERE name = ? AND died IS NULL",
                    ((stamp, name) for name, stamp in change.stamps.items()),
                )
                self._many("DELETE FROM problems WHERE name = ?", ((name,) for name in change.solved))
                self._many(
                    "INSERT OR REPLACE INTO problems VALUES (?, ?, ?, ?)",
                    ((problem.where, problem.kind, problem.detail, stamp) for problem, stamp in change.problems),
                )
                self._set_state(state)
        self.state = state

    def set_about(self, about: About) -> None:
        """Say anew what the index is about: the folder has moved, or another engine is to search it."""
        with explained(self.path), writing(self._database):
            self._database.execute("UPDATE about SET text = ?", (about.to_json(),))
        self.about = about

    def dead(self, kind: Kind) -> int:
        """Rows that nothing shows any more."""
        return self._database.execute("SELECT count(*) FROM dead WHERE kind = ?", (kind,)).fetchone()[0]

    def _write_pictures(self, pictures: Sequence[NewPicture]) -> list[int]:
        """Thumbnails and tokens behind those that are there; returns where each thumbnail begins."""
        if not pictures:
            return []
        (end,) = self._database.execute("SELECT max(thumbnail_at + thumbnail_size) FROM pictures").fetchone()
        starts = list(accumulate((len(new.thumbnail) for new in pictures), initial=end or 0))[:-1]
        write_at(self.directory / THUMBNAILS, starts[0], b"".join(new.thumbnail for new in pictures))
        if self.about.patches:
            row = 2 * self.about.patches * self.about.width
            tokens = [new.tokens for new in pictures if new.tokens is not None]
            if [found.shape for found in tokens] != [(self.about.patches, self.about.width)] * len(pictures):
                raise ValueError(f"every picture needs {self.about.patches} patch vectors of width {self.about.width}")
            write_at(self.directory / TOKENS, self.state.images * row, to_bf16(np.stack(tokens)).tobytes())
        return starts

    def _write_vectors(self, kind: Kind, vectors: Sequence[np.ndarray]) -> float:
        if not vectors:
            return 0.0
        files = row_files(self.directory, kind, self.about.width, self.about.storage)
        together = np.stack(vectors).astype(np.float32)  # [n, D]
        if together.shape[1] != self.about.width or not np.isfinite(together).all():
            raise ValueError(f"vectors must be {self.about.width} finite numbers each, got {together.shape}")
        return append(files, getattr(self.state, kind), together)

    def _end(self, names: Collection[str], version: int) -> list[tuple[int, int]]:
        """End the living items of these names; returns their ids and rows."""
        ended = []
        for name in names:
            found = self._database.execute(
                "SELECT id, row FROM items WHERE name = ? AND died IS NULL", (name,)
            ).fetchone()
            if found is not None:
                self._database.execute("UPDATE items SET died = ? WHERE id = ?", (version, found[0]))
                ended.append(found)
        return ended

    def _bear(self, item: NewItem, version: int) -> None:
        rows = self._rows("pictures", [item.content])
        said = self._rows("captions", [text_hash(text) for text in item.captions])
        if len(rows) != 1 or len(said) != len(set(item.captions)):
            raise ValueError(f"{item.name}: its picture or a caption of it has no vector")
        number = self._database.execute(
            "INSERT INTO items (name, row, place, stamp, born) VALUES (?, ?, ?, ?, ?)",
            (item.name, rows[item.content], item.place, item.stamp, version),
        ).lastrowid
        captions = [said[text_hash(text)] for text in item.captions]
        self._many("INSERT INTO said VALUES (?, ?, ?)", ((number, at, row) for at, row in enumerate(captions)))
        self._database.execute("DELETE FROM dead WHERE kind = 'images' AND row = ?", (rows[item.content],))
        self._many("DELETE FROM dead WHERE kind = 'captions' AND row = ?", ((row,) for row in captions))

    def _bury(self, ended: Sequence[tuple[int, int]]) -> None:
        """Rows that ended items had and no living one has are dead."""
        self._many(
            "INSERT OR IGNORE INTO dead SELECT 'images', ?1 WHERE NOT EXISTS "
            "(SELECT 1 FROM items WHERE row = ?1 AND died IS NULL)",
            ((row,) for _, row in ended),
        )
        self._many(
            "INSERT OR IGNORE INTO dead SELECT 'captions', said.row FROM said WHERE said.item = ? AND NOT EXISTS "
            "(SELECT 1 FROM said AS other JOIN items ON items.id = other.item WHERE other.row = said.row "
            "AND items.died IS NULL)",
            ((number,) for number, _ in ended),
        )

    def _forget_missing(self) -> None:
        """Forget rows that a file cut short no longer holds and all behind them, and the items that show them."""
        images, captions = self._whole("images"), self._whole("captions")
        if (images, captions) == (self.state.images, self.state.captions):
            return
        state = replace(self.state, version=self.state.version + 1, images=images, captions=captions)
        with explained(self.path), writing(self._database):
            lost = self._database.execute(
                "SELECT id FROM items WHERE row >= ? UNION SELECT item FROM said WHERE row >= ?", (images, captions)
            ).fetchall()
            left = self._database.execute("SELECT id, row FROM items WHERE row < ?", (images,)).fetchall()
            gone = {number for (number,) in lost}
            self._many("DELETE FROM items WHERE id = ?", lost)
            self._bury([(number, row) for number, row in left if number in gone])
            self._many("DELETE FROM said WHERE item = ?", lost)
            for kind, table, rows in (("images", "pictures", images), ("captions", "captions", captions)):
                self._database.execute(f"DELETE FROM {table} WHERE row >= ?", (rows,))
                self._database.execute("DELETE FROM dead WHERE kind = ? AND row >= ?", (kind, rows))
            self._set_state(state)
        self.state = state

    def _whole(self, kind: Kind) -> int:
        """Committed rows that are really there."""
        count: int = getattr(self.state, kind)
        count = min(count, whole_rows(row_files(self.directory, kind, self.about.width, self.about.storage)))
        if kind == "images":
            thumbnails = _size(self.directory / THUMBNAILS)
            question = "SELECT count(*) FROM pictures WHERE row < ? AND thumbnail_at + thumbnail_size <= ?"
            count = self._database.execute(question, (count, thumbnails)).fetchone()[0]  # they lie in order of rows
            if self.about.patches:
                count = min(count, _size(self.directory / TOKENS) // (2 * self.about.patches * self.about.width))
        return count

    def _set_state(self, state: State) -> None:
        self._database.execute(
            "UPDATE state SET version = ?, images = ?, captions = ?, images_slack = ?, captions_slack = ?",
            astuple(state),
        )

    def _rows(self, table: str, contents: Sequence[bytes]) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for start in range(0, len(contents), ASKED):
            part = contents[start : start + ASKED]
            marks = ",".join("?" * len(part))
            found.update(self._database.execute(f"SELECT content, row FROM {table} WHERE content IN ({marks})", part))
        return found

    def _many(self, statement: str, values: Iterable[Sequence[Any]]) -> None:
        self._database.executemany(statement, values)


@contextmanager
def open_writer(path: Path, about: About) -> Iterator[IndexWriter]:
    """The index of this path, to be written by this process alone; made if there is none.

    What a killed writer left behind is cleared away, and rows that a file cut short no longer holds are forgotten, so
    that their pictures are indexed again.

    Args:
        about: what a new index is about; an existing one keeps its own.

    Raises:
        ValueError: another process is writing, or what lies there is no index.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} exists and is no index of hnclip: choose another --out")
    if path.is_dir() and not (path / HEADER).exists() and any(not _own(entry.name) for entry in path.iterdir()):
        raise ValueError(f"{path} is a directory that holds other things than an index: choose another --out")
    with _room(path):
        path.mkdir(parents=True, exist_ok=True)
    busy = f"another process is writing {path}: wait until it is done"
    with only_process(path / LOCK, busy), _room(path):
        if not (path / HEADER).exists():
            begin_generation(path, 1, about).close()
            write_header(path, 1)
        generation = read_header(path)
        directory = generation_directory(path, generation)
        for other in path.iterdir():
            if other.is_dir() and other != directory:  # never counted, or counts no more
                shutil.rmtree(other, ignore_errors=True)
        database, own, state = open_catalogue(directory / CATALOGUE, path, write=True)
        with closing(database):
            writer = IndexWriter(path, generation, database, About.from_json(own), state)
            writer._forget_missing()
            yield writer


def begin_generation(path: Path, generation: int, about: About) -> sqlite3.Connection:
    """Empty files of a generation that does not count yet; what lay there is removed."""
    directory = generation_directory(path, generation)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / THUMBNAILS).touch()
    for kind in KINDS:
        for file, _ in row_files(directory, kind, about.width, about.storage).files():
            file.touch()
    return create_catalogue(directory / CATALOGUE, about.to_json())


def _own(name: str) -> bool:
    """Whether a file may belong to an index that was killed before it had a header."""
    return name == LOCK or name.isdigit() or name.startswith(f".{HEADER}.")


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


@contextmanager
def _room(path: Path) -> Iterator[None]:
    """Errors of the disk, with the index and what can be done."""
    try:
        yield
    except OSError as error:
        full = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
        if error.errno in full or "disk is full" in str(error):
            raise OSError(
                errno.ENOSPC, f"no room for {path}: make some, then the same command goes on where it was"
            ) from error
        raise
