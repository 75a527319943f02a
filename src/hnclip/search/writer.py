"""Writes an index: every commit is there as a whole or not at all, whenever the process is killed."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import sys
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hnclip.core import Problem
from hnclip.search.database import (
    APPLICATION,
    COMMAND,
    FORMAT,
    KINDS,
    SCHEMA,
    About,
    Kind,
    RowFile,
    check_vectors,
    connect,
    content_hash,
    current_database,
    database_errors,
    database_files,
    published_database,
    read_ids,
    read_meta,
    text_hash,
)
from hnclip.search.vectors import append_bytes, checksum, invalid_rows, map_rows
from hnclip.util.files import exclusive_lock, replace_file, transaction

log = logging.getLogger(__name__)

LOCK = "lock"
DELETED_SHARE, DELETED_LEAST = 0.25, 1000  # of rows: with more of them the vectors are written to a new file
_OWN = re.compile(r"(index|images|captions|text)-.*|lock|\.?command\.txt.*")
_COPIED = 4096  # rows copied at once

Noted = dict[str, tuple[Problem, str]]
"""Problems with the stamps of the files, by name."""


@dataclass(frozen=True)
class NewImage:
    """Content that the index does not have yet.

    Shape:
        vector: [D], of length 1
    """

    hash: bytes
    vector: np.ndarray
    size: tuple[int, int]
    thumbnail: bytes


@dataclass(frozen=True)
class NewFile:
    """A file to insert, or to update if there is one of this name. Its image and captions are in the index or in the
    same change."""

    name: str
    hash: bytes
    place: str
    stamp: str
    captions: tuple[str, ...] = ()


@dataclass
class Change:
    """What one commit inserts or updates.

    Args:
        captions: vectors [D] of texts that the index does not have yet.
    """

    images: list[NewImage] = field(default_factory=list)
    captions: dict[str, np.ndarray] = field(default_factory=dict)
    files: list[NewFile] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Known:
    """A file as the index knows it; `captions` is `captions_hash` of them."""

    stamp: str
    place: str
    hash: bytes
    captions: bytes


def captions_hash(captions: Sequence[str]) -> bytes:
    return content_hash(b"".join(map(text_hash, captions)))


class IndexWriter:
    """The only writer of an index; see `open_writer`."""

    def __init__(self, path: Path, database: Path) -> None:
        self.path, self._file = path, database
        with database_errors(path):
            self._database = connect(database)
            self._database.execute("PRAGMA journal_mode = WAL")  # no effect where the file system does not allow it
            self.about, self.files, self.extras = read_meta(self._database, path)
        check_vectors(path, self.about, self.files, limit=0)

    def close(self) -> None:
        self._database.close()

    def verify(self) -> None:
        """Compare vectors with their checksums. ValueError if they differ."""
        check_vectors(self.path, self.about, self.files, limit=sys.maxsize)

    def known(self) -> dict[str, Known]:
        """All files by name."""
        question = "SELECT name, stamp, place, hash, captions FROM files JOIN images ON images.id = image"
        return {name: Known(*row) for name, *row in self._query(question)}

    def problems(self) -> Noted:
        rows = self._query("SELECT name, kind, detail, stamp FROM problems")
        return {name: (Problem(kind, name, detail), stamp) for name, kind, detail, stamp in rows}

    def hashes(self, kind: Kind) -> set[bytes]:
        """Of the images or texts that have a vector, also of those that no file has any more."""
        return {found for (found,) in self._query(f"SELECT hash FROM {kind}")}

    def captions_of(self, name: str) -> tuple[str, ...]:
        question = (
            "SELECT text FROM files JOIN said ON said.file = files.id JOIN captions ON captions.id = caption "
            "WHERE name = ? ORDER BY number"
        )
        return tuple(text for (text,) in self._query(question, name))

    def counts(self) -> tuple[int, int]:
        """Files, and captions that a file has."""
        return self._query("SELECT (SELECT count(*) FROM files), (SELECT count(*) FROM captions)")[0]

    def commit(self, change: Change) -> None:
        """Apply a change.

        Raises:
            ValueError: a vector is not finite or not of length 1; the index is as it was.
            OSError: the disk is full or fails; the index is as it was.
        """
        added: dict[Kind, RowFile] = {
            "images": self._append("images", [new.vector for new in change.images]),
            "captions": self._append("captions", [*change.captions.values()]),
        }
        with self._transaction():
            for number, new in enumerate(change.images, self.files["images"].next_id):
                self._database.execute("INSERT INTO images VALUES (?, ?, ?, ?)", (number, new.hash, *new.size))
                self._database.execute("INSERT INTO thumbnails VALUES (?, ?)", (number, new.thumbnail))
            for number, text in enumerate(change.captions, self.files["captions"].next_id):
                self._database.execute("INSERT INTO captions VALUES (?, ?, ?)", (number, text_hash(text), text))
            for file in change.files:
                self._insert_file(file)
            for kind, rows in added.items():
                self._set(kind, asdict(rows))
        self.files = added

    def finish(self, deleted: Collection[str], problems: Noted) -> None:
        """End an update: delete these files, and images and captions that no file has any more; note what could not be
        indexed."""
        execute, many = self._database.execute, self._database.executemany
        names, same = [(name,) for name in deleted], problems == self.problems()
        with self._transaction():
            many("DELETE FROM said WHERE file = (SELECT id FROM files WHERE name = ?)", names)
            many("DELETE FROM files WHERE name = ?", names)
            for kind, used in (("images", "SELECT image FROM files"), ("captions", "SELECT caption FROM said")):
                unused = f"FROM {kind} WHERE id NOT IN ({used})"
                execute(f"INSERT INTO deleted SELECT '{kind}', id {unused}")
                execute(f"DELETE {unused}")
            execute("DELETE FROM thumbnails WHERE image IN (SELECT id FROM deleted WHERE kind = 'images')")
            if not same:  # otherwise readers would take it for a change
                noted = ((name, problem.kind, problem.detail, stamp) for name, (problem, stamp) in problems.items())
                execute("DELETE FROM problems")
                many("INSERT INTO problems VALUES (?, ?, ?, ?)", noted)

    def set_about(self, about: About) -> None:
        """The folder or the model has moved, or another engine is to search."""
        with self._transaction():
            self._set("about", asdict(about))
        self.about = about

    def set_extra(self, key: str, value: dict[str, Any] | None) -> None:
        """What an engine or the text encoder keeps in the directory; None if it keeps nothing any more."""
        with self._transaction():
            self._set(key, value)
        self.extras = {**self.extras, key: value}

    def compact(self, *, least: int = DELETED_LEAST) -> bool:
        """Write vectors without deleted rows to new files if there are many of them; whether that was done."""
        done = False
        for kind in KINDS:
            gone = self._query("SELECT count(*) FROM deleted WHERE kind = ?", kind)[0][0]
            if gone >= least and gone > DELETED_SHARE * self.files[kind].rows:
                self._compact(kind)
                done = True
        return done

    def publish(self) -> None:
        """Make a new database the current one, and delete files that belong to an older one."""
        if not self._is_published():
            with database_errors(self.path):
                self._database.execute(f"PRAGMA user_version = {FORMAT}")
        write_command(self.path, self.about)
        self.delete_leftovers()

    def delete_leftovers(self) -> None:
        """Delete files that nothing refers to: of older databases, and of killed writers. Until this database is
        published, readers may use them."""
        if not self._is_published():
            return
        kept = {LOCK, COMMAND, self._file.name, f"{self._file.name}-wal", f"{self._file.name}-shm"}
        kept |= {rows.name for rows in self.files.values()}
        kept |= {str(extra.get("file")) for extra in self.extras.values() if isinstance(extra, dict)}
        for file in self.path.iterdir():
            if file.name not in kept and _OWN.fullmatch(file.name):
                with suppress(OSError):  # some systems keep files that are open; the next run deletes them
                    shutil.rmtree(file) if file.is_dir() else file.unlink()

    def _is_published(self) -> bool:
        return self._query("PRAGMA user_version")[0][0] > 0

    def new_name(self, stem: str, suffix: str) -> str:
        """A file name that the directory has not used: STEM-NUMBER.SUFFIX."""
        return _new_name(self.path, stem, suffix)

    def _append(self, kind: Kind, vectors: Sequence[np.ndarray]) -> RowFile:
        """Write vectors behind the committed ones; the file as the commit will record it."""
        rows = self.files[kind]
        if not vectors:
            return rows
        stored = np.stack(vectors).astype(np.float16)  # [n, D]
        if len(invalid_rows(stored)):
            raise ValueError(f"the model's vectors of some {kind} are not finite or not of length 1")
        content, count = stored.tobytes(), len(stored)
        append_bytes(self.path / rows.name, rows.rows * 2 * self.about.width, content)
        crc = zlib.crc32(content, rows.crc)
        return replace(rows, rows=rows.rows + count, crc=crc, next_id=rows.next_id + count)

    def _insert_file(self, new: NewFile) -> None:
        (number,) = self._database.execute(
            "INSERT INTO files (name, image, place, stamp, captions) "
            "VALUES (?, (SELECT id FROM images WHERE hash = ?), ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "image = excluded.image, place = excluded.place, stamp = excluded.stamp, captions = excluded.captions "
            "RETURNING id",
            (new.name, new.hash, new.place, new.stamp, captions_hash(new.captions)),
        ).fetchone()
        self._database.execute("DELETE FROM said WHERE file = ?", (number,))
        self._database.executemany(
            "INSERT INTO said VALUES (?, ?, (SELECT id FROM captions WHERE hash = ?))",
            [(number, place, text_hash(text)) for place, text in enumerate(new.captions)],
        )

    def _compact(self, kind: Kind) -> None:
        old, file = self.files[kind], self.path / self.new_name(kind, ".f16")
        with database_errors(self.path):
            ids, deleted = read_ids(self._database, kind, old)
        kept = np.delete(np.arange(old.rows), deleted)  # [K]
        vectors = map_rows(self.path / old.name, old.rows, self.about.width)  # [N, D]
        with file.open("wb") as opened:
            for start in range(0, len(kept), _COPIED):
                opened.write(vectors[kept[start : start + _COPIED]].tobytes())
            opened.flush()
            os.fsync(opened.fileno())
        new = replace(old, name=file.name, rows=len(kept), crc=checksum(file, file.stat().st_size))
        with self._transaction():
            self._database.execute("INSERT OR REPLACE INTO compacted VALUES (?, ?)", (kind, ids[kept].tobytes()))
            self._database.execute("DELETE FROM deleted WHERE kind = ?", (kind,))
            self._set(kind, asdict(new))
        self.files = {**self.files, kind: new}

    def _set(self, key: str, value: Any) -> None:
        self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def _query(self, question: str, *values: Any) -> list[Any]:
        with database_errors(self.path):
            return self._database.execute(question, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with database_errors(self.path), transaction(self._database):
            yield


@contextmanager
def open_writer(path: Path, about: About, *, replace: bool = False) -> Iterator[IndexWriter]:
    """The writer of an index, which is created if there is none.

    Args:
        replace: write a new database; readers see the current one until `publish`. One that an
            interrupted call has begun, with the same model and data, is continued.

    Raises:
        Busy: another process writes to the index.
        ValueError: the directory holds something else, or the index is damaged.
    """
    path.mkdir(parents=True, exist_ok=True)
    other = [] if database_files(path) else [file.name for file in path.iterdir() if not _OWN.fullmatch(file.name)]
    if other:
        raise ValueError(f"{path} holds other files ({other[0]}): choose another --out")
    with explain_full_disk(path), _lock(path):
        new = published_database(path) is None
        if replace and not new:
            database = _unfinished(path, about) or _create(path, about)
        else:
            database = _create(path, about) if new else current_database(path)
        with closing(IndexWriter(path, database)) as writer:
            if new:  # there is nothing that readers could go on with: they see it grow
                writer.publish()
            yield writer


def refuse_second_writer(path: Path) -> None:
    """Busy if another process writes to an index: a look ahead of work that it would waste."""
    if (path / LOCK).exists():
        with _lock(path):
            pass


def _lock(path: Path) -> AbstractContextManager[None]:
    return exclusive_lock(path / LOCK, f"another process is writing to {path}: wait until it has finished")


def write_command(path: Path, about: About) -> None:
    """The command that updates an index, for messages about one that is damaged."""
    with replace_file(path / COMMAND) as file:
        file.write_text(about.command + "\n", encoding="utf-8")


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Errors of a full disk, with what was lost: nothing."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT) or "database or disk is full" in str(error)
        if not full:
            raise
        raise OSError(
            f"the disk of {path} is full ({error}); the index is intact with what was committed. Free some space and "
            "run the same command again"
        ) from error


def _unfinished(path: Path, about: About) -> Path | None:
    """A database that an interrupted call has begun, if it is intact, and of the same model and data."""
    numbered = database_files(path)
    database = numbered[max(numbered)]
    if database == published_database(path):
        return None
    with suppress(ValueError, OSError), closing(IndexWriter(path, database)) as writer:
        writer.verify()
        own = writer.about
        if (own.fingerprint, own.data, own.split) == (about.fingerprint, about.data, about.split):
            return database
    return None


def _create(path: Path, about: About) -> Path:
    """A new database without files, which is not published yet."""
    database = path / _new_name(path, "index", ".db")
    named = {kind: RowFile(_new_name(path, kind, ".f16")) for kind in KINDS}
    for name in (database.name, *(rows.name for rows in named.values())):
        (path / name).touch()
    with database_errors(path), closing(connect(database)) as created, transaction(created):
        created.execute(f"PRAGMA application_id = {APPLICATION}")
        for statement in SCHEMA.split(";"):
            created.execute(statement)
        for key, value in (("about", about), *named.items()):
            created.execute("INSERT INTO meta VALUES (?, ?)", (key, json.dumps(vars(value))))
    return database


def _new_name(directory: Path, stem: str, suffix: str) -> str:
    used = [re.match(rf"{re.escape(stem)}-(\d+)", file.name) for file in directory.iterdir()]
    return f"{stem}-{max((int(match[1]) for match in used if match), default=0) + 1}{suffix}"
