"""A new generation of an index, without what is dead."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hnclip.search.index.catalogue import State, database_uri, explained, write_state
from hnclip.search.index.generations import begin_generation, next_generation, room
from hnclip.search.index.layout import CATALOGUE, KINDS, THUMBNAILS, TOKENS, About, generation_directory
from hnclip.search.index.vectors import mapped, row_files
from hnclip.util.files import transaction

if TYPE_CHECKING:
    from hnclip.search.index.writer import IndexWriter

_TOGETHER = 2**24  # bytes that are copied at once

# Items that go on, if all their rows are among the first ones that are really there.
_LIVING = """
CREATE TEMP TABLE living AS SELECT id, row FROM old.items WHERE died IS NULL AND row < ?1 AND NOT EXISTS
    (SELECT 1 FROM old.said WHERE said.item = items.id AND said.row >= ?2)
"""
_COPY = """
CREATE UNIQUE INDEX temp.living_ids ON living (id);
INSERT INTO items SELECT items.id, name, image_rows.new, place, stamp, born, NULL FROM living
    JOIN old.items ON items.id = living.id JOIN image_rows ON image_rows.old = items.row;
INSERT INTO said SELECT item, number, caption_rows.new FROM old.said
    JOIN living ON living.id = said.item JOIN caption_rows ON caption_rows.old = said.row;
INSERT INTO captions SELECT new, content, text FROM caption_rows JOIN old.captions ON captions.row = caption_rows.old;
INSERT INTO problems SELECT * FROM old.problems;
DELETE FROM sqlite_sequence;
INSERT INTO sqlite_sequence SELECT name, seq FROM old.sqlite_sequence
"""


def compact(writer: IndexWriter, *, images: int | None = None, captions: int | None = None) -> None:
    """Let the writer go on with a generation that holds what lives, and nothing else. Ids of items stay, rows do not;
    engines have to be made anew. Whoever reads the old generation goes on reading it.

    Args:
        images, captions: of the rows only so many are there; items that show others go.

    Raises:
        OSError: no room; the index is as it was.
    """
    number = next_generation(writer.path)
    directory = generation_directory(writer.path, number)
    limits = (
        writer.state.images if images is None else images,
        writer.state.captions if captions is None else captions,
    )
    try:
        with room(writer.path), explained(writer.path):
            database = begin_generation(writer.path, number, writer.about)
            try:
                state = _fill(database, directory, writer.directory, writer.about, writer.state, limits)
            except BaseException:
                database.close()
                raise
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    writer.go_on(number, database, state)


def _fill(
    database: sqlite3.Connection, new: Path, old: Path, about: About, state: State, limits: tuple[int, int]
) -> State:
    database.execute("ATTACH DATABASE ? AS old", (database_uri(old / CATALOGUE, "ro"),))
    database.execute(_LIVING, limits)
    rows = {
        "images": _numbered(database, "image_rows", "SELECT DISTINCT row FROM living ORDER BY row"),
        "captions": _numbered(
            database,
            "caption_rows",
            "SELECT DISTINCT said.row FROM old.said JOIN living ON living.id = said.item ORDER BY said.row",
        ),
    }
    for kind in KINDS:
        before, after = (row_files(place, kind, about.width, about.storage).files() for place in (old, new))
        for (source, size), (target, _) in zip(before, after):
            _copy_rows(source, target, size, rows[kind])
    if about.patches:
        _copy_rows(old / TOKENS, new / TOKENS, 2 * about.patches * about.width, rows["images"])
    _copy_thumbnails(database, old / THUMBNAILS, new / THUMBNAILS)
    state = replace(state, version=state.version + 1, images=len(rows["images"]), captions=len(rows["captions"]))
    with transaction(database):
        database.executemany("INSERT INTO pictures VALUES (?, ?, ?, ?, ?, ?)", _placed(database))
        for statement in _COPY.split(";"):
            database.execute(statement)
        write_state(database, state)
    database.execute("DETACH DATABASE old")
    return state


def _numbered(database: sqlite3.Connection, table: str, question: str) -> np.ndarray:
    """Rows that go on, in their order, [n]; the table says which number each has from now on."""
    rows = [row for (row,) in database.execute(question)]
    database.execute(f"CREATE TEMP TABLE {table} (new INTEGER PRIMARY KEY, old INTEGER NOT NULL UNIQUE)")
    database.executemany(f"INSERT INTO {table} VALUES (?, ?)", enumerate(rows))
    return np.array(rows, np.int64)


def _placed(database: sqlite3.Connection) -> Iterator[tuple[object, ...]]:
    """Pictures as they are numbered now, one thumbnail behind the other."""
    at = 0
    for *picture, size in database.execute(
        "SELECT new, content, width, height, thumbnail_size FROM image_rows "
        "JOIN old.pictures ON pictures.row = image_rows.old ORDER BY new"
    ):
        yield (*picture, at, size)
        at += size


def _copy_rows(source: Path, target: Path, size: int, rows: np.ndarray) -> None:
    count = int(rows[-1]) + 1 if len(rows) else 0
    content = mapped(source, np.dtype(np.uint8), (count, size))
    step = max(1, _TOGETHER // size)
    with target.open("wb") as file:
        for start in range(0, len(rows), step):
            file.write(content[rows[start : start + step]].tobytes())
        file.flush()
        os.fsync(file.fileno())


def _copy_thumbnails(database: sqlite3.Connection, source: Path, target: Path) -> None:
    source.touch()  # where it is missing no row goes on
    with source.open("rb") as old, target.open("wb") as new:
        for at, size in database.execute(
            "SELECT thumbnail_at, thumbnail_size FROM image_rows "
            "JOIN old.pictures ON pictures.row = image_rows.old ORDER BY new"
        ):
            old.seek(at)
            new.write(old.read(size))
        new.flush()
        os.fsync(new.fileno())
