"""Changes an index, a version at a time: all of a change is there afterwards, or nothing of it."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from hnclip.core import Problem
from hnclip.search.index.catalogue import (
    State,
    explained,
    open_catalogue,
    read_state,
    text_hash,
    texts_hash,
    thumbnails_end,
    write_state,
)
from hnclip.search.index.changes import Change, Known, NewPicture
from hnclip.search.index.compact import compact
from hnclip.search.index.generations import (
    clear_away,
    remove_generation,
    room,
)
from hnclip.search.index.layout import (
    CATALOGUE,
    KINDS,
    THUMBNAILS,
    TOKENS,
    About,
    Kind,
    generation_directory,
    read_header,
    write_header,
)
from hnclip.search.index.lives import bear_item, bury_rows, end_items, rows_of
from hnclip.search.index.vectors import append, first_bad, row_files, to_bf16, whole_rows, write_at
from hnclip.util.files import transaction


class IndexWriter:
    """The only writer of an index, see `open_writer`. Its `state` is that of the last change."""

    def __init__(self, path: Path, generation: int, *, counts: bool = True) -> None:
        """
        Args:
            counts: whether readers see this generation; one that does not waits for `publish`.
        """
        self.path, self.generation, self.counts = path, generation, counts
        self._database = open_catalogue(self.directory / CATALOGUE, path)
        try:
            with explained(path):
                # Readers wait while the file is written to: that is to be at the end of a transaction, not all along.
                self._database.execute("PRAGMA cache_spill = OFF")
                self.about, self.state = read_state(self._database, path)
        except BaseException:
            self._database.close()
            raise

    @property
    def directory(self) -> Path:
        return generation_directory(self.path, self.generation)

    def close(self) -> None:
        self._database.close()

    def known(self) -> Iterator[tuple[str, Known]]:
        """Living items by name."""
        said: dict[int, bytes] = {}
        with explained(self.path):
            for item, texts in groupby(
                self._database.execute(
                    "SELECT said.item, captions.text FROM said JOIN captions ON captions.row = said.row JOIN items ON "
                    "items.id = said.item WHERE items.died IS NULL ORDER BY said.item, said.number"
                ),
                key=itemgetter(0),
            ):
                said[item] = texts_hash([text for _, text in texts])
            none = texts_hash(())
            for number, name, stamp, place, content in self._database.execute(
                "SELECT items.id, items.name, items.stamp, items.place, pictures.content FROM items "
                "JOIN pictures ON pictures.row = items.row WHERE items.died IS NULL ORDER BY items.id"
            ):
                yield name, Known(stamp, place, content, said.get(number, none))

    def problems(self) -> dict[str, tuple[Problem, str]]:
        """What could not be indexed, with its stamp, by name."""
        with explained(self.path):
            return {
                name: (Problem(kind, name, detail), stamp)
                for name, kind, detail, stamp in self._database.execute(
                    "SELECT name, kind, detail, stamp FROM problems"
                )
            }

    def contents(self) -> set[bytes]:
        """Pictures that the index has a vector of, also where no item shows it any more."""
        with explained(self.path):
            return {content for (content,) in self._database.execute("SELECT content FROM pictures")}

    def captions_of(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """What is said of living items of these names, as far as there are such items and captions."""
        said: dict[str, tuple[str, ...]] = {}
        question = (
            "SELECT captions.text FROM items JOIN said ON said.item = items.id "
            "JOIN captions ON captions.row = said.row WHERE items.name = ? AND items.died IS NULL ORDER BY said.number"
        )
        with explained(self.path):
            for name in names:
                if texts := tuple(text for (text,) in self._database.execute(question, (name,))):
                    said[name] = texts
        return said

    def known_texts(self, texts: Sequence[str]) -> set[str]:
        """Those that the index has a vector of."""
        hashes = {text_hash(text): text for text in texts}
        with explained(self.path):
            return {hashes[found] for found in rows_of(self._database, "captions", list(hashes))}

    def commit(self, change: Change) -> None:
        """Make the next version.

        Raises:
            ValueError: a vector is not of length 1; the index is as it was, as with the next.
            OSError: the disk is full or fails.
        """
        with room(self.path), explained(self.path):
            there = rows_of(self._database, "pictures", [new.content for new in change.pictures])
            pictures = [new for mark, new in {new.content: new for new in change.pictures}.items() if mark not in there]
            there = rows_of(self._database, "captions", [text_hash(text) for text in change.captions])
            texts = [text for text in change.captions if text_hash(text) not in there]
            names = {item.content: item.name for item in reversed(change.items)}
            shown = [names.get(new.content, new.content.hex()) for new in pictures]
            images = self._checked_vectors([new.vector for new in pictures], shown)
            captions = self._checked_vectors([change.captions[text] for text in texts], texts)
            thumbnails = self._write_pictures(pictures)
            image_slack = self._write_vectors("images", images)
            caption_slack = self._write_vectors("captions", captions)
            old = self.state
            state = State(
                version=old.version + 1,
                images=old.images + len(pictures),
                captions=old.captions + len(texts),
                images_slack=max(old.images_slack, image_slack),
                captions_slack=max(old.captions_slack, caption_slack),
            )
            with transaction(self._database):
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
                ending = [*change.gone, *(item.name for item in change.items)]
                ended = end_items(self._database, ending, state.version)
                for item in change.items:
                    bear_item(self._database, item, state.version)
                bury_rows(self._database, ended, old)
                self._many(
                    "UPDATE items SET stamp = ? WHERE name = ? AND died IS NULL",
                    ((stamp, name) for name, stamp in change.stamps.items()),
                )
                self._many("DELETE FROM problems WHERE name = ?", ((name,) for name in change.solved))
                self._many(
                    "INSERT OR REPLACE INTO problems VALUES (?, ?, ?, ?)",
                    ((problem.where, problem.kind, problem.detail, stamp) for problem, stamp in change.problems),
                )
                write_state(self._database, state)
        self.state = state

    def set_about(self, about: About) -> None:
        """Say anew what the index is about: the folder has moved, or another engine is to search it. Readers learn of
        it as of any other change."""
        state = replace(self.state, version=self.state.version + 1)
        with room(self.path), explained(self.path), transaction(self._database):
            self._database.execute("UPDATE about SET text = ?", (about.to_json(),))
            write_state(self._database, state)
        self.about, self.state = about, state

    def dead(self, kind: Kind) -> int:
        """Rows that nothing shows any more."""
        with explained(self.path):
            return self._database.execute("SELECT count(*) FROM dead WHERE kind = ?", (kind,)).fetchone()[0]

    def ended(self) -> tuple[int, int]:
        """Items that are no more, of all."""
        with explained(self.path):
            return self._database.execute("SELECT count(died), count(*) FROM items").fetchone()

    def living(self) -> tuple[int, int]:
        """Items, and captions that one of them has."""
        ended, items = self.ended()
        return items - ended, self.state.captions - self.dead("captions")

    def forget_missing(self) -> None:
        """Forget rows that a file cut short no longer holds and all behind them, and the items that show them.

        In a generation of its own: rows are not given a second time in the same one, where engines know them.
        """
        whole = {kind: self._whole(kind) for kind in KINDS}
        if whole != {kind: getattr(self.state, kind) for kind in KINDS}:
            compact(self, **whole)

    def publish(self) -> None:
        """From here on this generation is the index."""
        if not self.counts:
            with room(self.path):
                write_header(self.path, self.generation)
            self.counts = True
            clear_away(self.path, [self.generation])

    def go_on(self, generation: int, database: sqlite3.Connection, state: State) -> None:
        """Go on with another generation of the same index instead of this one.

        Raises:
            OSError: the header could not be written, or not for certain: the writer goes on with the one it names.
        """
        old = self.generation
        try:
            if self.counts:
                with room(self.path):
                    write_header(self.path, generation)
        except BaseException:
            if read_header(self.path) == generation:
                self._follow(generation, database, state)  # the old one stays: a power cut may bring its header back
            else:
                database.close()
                remove_generation(self.path, generation)
            raise
        self._follow(generation, database, state)
        remove_generation(self.path, old)

    def _follow(self, generation: int, database: sqlite3.Connection, state: State) -> None:
        self._database.close()
        self.generation, self._database, self.state = generation, database, state

    def _write_pictures(self, pictures: Sequence[NewPicture]) -> list[int]:
        """Thumbnails and tokens behind those that are there; returns where each thumbnail begins."""
        if not pictures:
            return []
        end = thumbnails_end(self._database, self.state.images)
        starts = list(accumulate((len(new.thumbnail) for new in pictures), initial=end))[:-1]
        write_at(self.directory / THUMBNAILS, starts[0], b"".join(new.thumbnail for new in pictures))
        if self.about.patches:
            row = 2 * self.about.patches * self.about.width
            tokens = [new.tokens for new in pictures if new.tokens is not None]
            if [found.shape for found in tokens] != [(self.about.patches, self.about.width)] * len(pictures):
                raise ValueError(f"every picture needs {self.about.patches} patch vectors of width {self.about.width}")
            write_at(self.directory / TOKENS, self.state.images * row, to_bf16(np.stack(tokens)).tobytes())
        return starts

    def _checked_vectors(self, vectors: Sequence[np.ndarray], names: Sequence[str]) -> np.ndarray:
        """[n, D]"""
        if not vectors:
            return np.zeros((0, self.about.width), np.float32)
        together = np.stack(vectors).astype(np.float32)  # [n, D]
        if together.shape[1:] != (self.about.width,):
            raise ValueError(f"vectors must be {self.about.width} numbers each, got {together.shape}")
        bad = first_bad(together)
        if bad is not None:
            length = float(np.linalg.norm(together[bad]))
            raise ValueError(f"the vector of {names[bad]!r} must be finite and of length 1, its length is {length:.6g}")
        return together

    def _write_vectors(self, kind: Kind, vectors: np.ndarray) -> float:
        files = row_files(self.directory, kind, self.about.width, self.about.storage)
        return append(files, getattr(self.state, kind), vectors) if len(vectors) else 0.0

    def _whole(self, kind: Kind) -> int:
        """Committed rows that are really there."""
        count: int = getattr(self.state, kind)
        count = min(count, whole_rows(row_files(self.directory, kind, self.about.width, self.about.storage)))
        if kind == "images":
            if self.about.patches:
                count = min(count, _size(self.directory / TOKENS) // (2 * self.about.patches * self.about.width))
            thumbnails = _size(self.directory / THUMBNAILS)
            if thumbnails < thumbnails_end(self._database, count):
                question = "SELECT count(*) FROM pictures WHERE row < ? AND thumbnail_at + thumbnail_size <= ?"
                count = self._database.execute(question, (count, thumbnails)).fetchone()[0]  # they lie in order of rows
        return count

    def _many(self, statement: str, values: Iterable[Sequence[Any]]) -> None:
        self._database.executemany(statement, values)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
