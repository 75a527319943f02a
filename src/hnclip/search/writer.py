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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
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
    read_ids,
    read_meta,
    text_hash,
)
from hnclip.search.vectors import append_bytes, checksum, invalid_rows, map_rows
from hnclip.util.files import exclusive_lock, replace_file, transaction
from hnclip.util.text import shorten

log = logging.getLogger(__name__)

LOCK = "lock"
PARTIAL = "new.db"  # a database that is not finished yet: of an index that is created or replaced
DELETED_SHARE, DELETED_LEAST = 0.25, 1000  # of rows: with more of them the vectors are written anew
_OWN = re.compile(r"(index|images|captions|text)-.*|new\.db.*|lock|command\.txt")
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


@dataclass(frozen=True)
class Change:
    """What one commit changes.

    Args:
        captions: vectors [D] of texts that the index does not have yet.
        deleted: names of files.
        problems: all that could not be indexed, with the files' stamps; None leaves what is noted.
    """

    images: Sequence[NewImage] = ()
    captions: Mapping[str, np.ndarray] = field(default_factory=dict)
    files: Sequence[NewFile] = ()
    deleted: Collection[str] = ()
    problems: Collection[tuple[Problem, str]] | None = None


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

    def hashes(self) -> set[bytes]:
        """Of the images that have a vector, also of those that no file has any more."""
        return {found for (found,) in self._query("SELECT hash FROM images")}

    def captions_of(self, name: str) -> tuple[str, ...]:
        question = (
            "SELECT text FROM files JOIN said ON said.file = files.id JOIN captions ON captions.id = caption "
            "WHERE name = ? ORDER BY number"
        )
        return tuple(text for (text,) in self._query(question, name))

    def known_texts(self, texts: Sequence[str]) -> set[str]:
        """Those that have a vector."""
        return {text for text in texts if self._has("captions", text_hash(text))}

    def counts(self) -> dict[Kind, int]:
        """Files, and captions that a file has."""
        files, captions = (self._query(f"SELECT count(*) FROM {name}")[0][0] for name in ("files", "captions"))
        return {"images": files, "captions": captions}

    def commit(self, change: Change) -> None:
        """Apply a change.

        Raises:
            ValueError: a vector is not finite or not of length 1; the index is as it was.
            OSError: the disk is full or fails; the index is as it was.
        """
        images = list({new.hash: new for new in change.images if not self._has("images", new.hash)}.values())
        texts = [text for text in change.captions if not self._has("captions", text_hash(text))]
        names = {file.hash: file.name for file in change.files}
        added: dict[Kind, RowFile] = {
            "images": self._append(
                "images", [new.vector for new in images], [names.get(new.hash, "an image") for new in images]
            ),
            "captions": self._append("captions", [change.captions[text] for text in texts], texts),
        }
        with self._transaction():
            self._insert_images(images)
            self._insert_captions(texts)
            self._insert_files(change.files)
            self._delete_files(change.deleted)
            if change.problems is not None:
                self._database.execute("DELETE FROM problems")
                noted = ((problem.where, problem.kind, problem.detail, stamp) for problem, stamp in change.problems)
                self._many("INSERT INTO problems VALUES (?, ?, ?, ?)", noted)
            for kind, rows in added.items():
                self._set(kind, asdict(rows))
        self.files = added

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

    def delete_unused(self) -> None:
        """Delete images and captions that no file has."""
        with self._transaction():
            for kind, used in (("images", "SELECT image FROM files"), ("captions", "SELECT caption FROM said")):
                execute, deleted = self._database.execute, f"SELECT id FROM deleted WHERE kind = '{kind}'"
                execute(f"INSERT INTO deleted SELECT '{kind}', id FROM {kind} WHERE id NOT IN ({used})")
                execute(f"DELETE FROM {kind} WHERE id IN ({deleted})")
                if kind == "images":
                    execute(f"DELETE FROM thumbnails WHERE image IN ({deleted})")

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
        if self._file.name == PARTIAL:
            target = self.path / f"index-{max(database_files(self.path), default=0) + 1}.db"
            with database_errors(self.path):
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._database.execute("PRAGMA journal_mode = DELETE")  # a database with a log cannot be renamed
                self._database.close()
                os.replace(self._file, target)
                _flush_names(self.path)
                self._file = target
                self._database = connect(target)
                self._database.execute("PRAGMA journal_mode = WAL")
        write_command(self.path, self.about)
        self.delete_leftovers()

    def delete_leftovers(self) -> None:
        """Delete files that nothing refers to: of older databases, and of killed writers."""
        kept = {LOCK, COMMAND, self._file.name, f"{self._file.name}-wal", f"{self._file.name}-shm"}
        kept |= {rows.name for rows in self.files.values()}
        kept |= {str(extra.get("file")) for extra in self.extras.values() if isinstance(extra, dict)}
        if self._file.name == PARTIAL:
            return
        for file in self.path.iterdir():
            if file.name not in kept and _OWN.fullmatch(file.name):
                with suppress(OSError):  # some systems keep files that are open; the next run deletes them
                    shutil.rmtree(file) if file.is_dir() else file.unlink()

    def new_name(self, stem: str, suffix: str) -> str:
        """A file name that the directory has not used: STEM-NUMBER.SUFFIX."""
        return _new_name(self.path, stem, suffix)

    def _append(self, kind: Kind, vectors: Sequence[np.ndarray], names: Sequence[str]) -> RowFile:
        """Write vectors behind the committed ones; the file as the commit will record it."""
        rows = self.files[kind]
        if not vectors:
            return rows
        stored = np.stack(vectors).astype(np.float16)  # [n, D]
        if len(bad := invalid_rows(stored)):
            raise ValueError(f"the model's vector of {shorten(names[bad[0]], 80)!r} is not finite or not of length 1")
        content = stored.tobytes()
        append_bytes(self.path / rows.name, rows.rows * 2 * self.about.width, content)
        count = len(stored)
        crc = zlib.crc32(content, rows.crc)
        return replace(rows, rows=rows.rows + count, crc=crc, next_id=rows.next_id + count)

    def _insert_images(self, images: Sequence[NewImage]) -> None:
        for number, new in enumerate(images, self.files["images"].next_id):
            self._database.execute("INSERT INTO images VALUES (?, ?, ?, ?)", (number, new.hash, *new.size))
            self._database.execute("INSERT INTO thumbnails VALUES (?, ?)", (number, new.thumbnail))

    def _insert_captions(self, texts: Sequence[str]) -> None:
        numbered = enumerate(texts, self.files["captions"].next_id)
        self._many("INSERT INTO captions VALUES (?, ?, ?)", ((id, text_hash(text), text) for id, text in numbered))

    def _insert_files(self, files: Sequence[NewFile]) -> None:
        for new in files:
            (number,) = self._database.execute(
                "INSERT INTO files (name, image, place, stamp, captions) "
                "VALUES (?, (SELECT id FROM images WHERE hash = ?), ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "image = excluded.image, place = excluded.place, stamp = excluded.stamp, captions = excluded.captions "
                "RETURNING id",
                (new.name, new.hash, new.place, new.stamp, captions_hash(new.captions)),
            ).fetchone()
            self._database.execute("DELETE FROM said WHERE file = ?", (number,))
            self._many(
                "INSERT INTO said VALUES (?, ?, (SELECT id FROM captions WHERE hash = ?))",
                ((number, place, text_hash(text)) for place, text in enumerate(new.captions)),
            )

    def _delete_files(self, names: Collection[str]) -> None:
        self._many("DELETE FROM said WHERE file = (SELECT id FROM files WHERE name = ?)", ((name,) for name in names))
        self._many("DELETE FROM files WHERE name = ?", ((name,) for name in names))

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

    def _has(self, kind: Kind, digest: bytes) -> bool:
        return bool(self._query(f"SELECT 1 FROM {kind} WHERE hash = ?", digest))

    def _set(self, key: str, value: Any) -> None:
        self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def _many(self, statement: str, values: Any) -> None:
        self._database.executemany(statement, values)

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
    busy = f"another process is writing to {path}: wait until it has finished"
    with explain_full_disk(path), exclusive_lock(path / LOCK, busy):
        database = path / PARTIAL
        if not replace or not database_files(path):
            if not database_files(path):  # there is nothing that readers could go on with: they see it grow
                _create(path, database, about)
                os.replace(database, path / "index-1.db")
                write_command(path, about)
            database = current_database(path)
        elif not _continues(path, database, about):
            _create(path, database, about)
        writer = IndexWriter(path, database)
        try:
            yield writer
        finally:
            writer.close()


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


def _continues(path: Path, database: Path, about: About) -> bool:
    """Whether an unfinished database is intact, and of the same model and data."""
    if not database.exists():
        return False
    with suppress(ValueError, OSError), closing(IndexWriter(path, database)) as writer:
        writer.verify()
        own = writer.about
        return (own.fingerprint, own.data, own.split) == (about.fingerprint, about.data, about.split)
    return False


def _create(path: Path, database: Path, about: About) -> None:
    for leftover in path.glob(f"{PARTIAL}*"):
        leftover.unlink()
    named = {kind: RowFile(_new_name(path, kind, ".f16")) for kind in KINDS}
    for rows in named.values():
        (path / rows.name).touch()
    database.touch()
    with database_errors(path):
        created = connect(database)
        try:
            with transaction(created):
                created.execute(f"PRAGMA application_id = {APPLICATION}")
                created.execute(f"PRAGMA user_version = {FORMAT}")
                for statement in SCHEMA.split(";"):
                    created.execute(statement)
                created.execute("INSERT INTO meta VALUES ('about', ?)", (json.dumps(asdict(about)),))
                for kind, rows in named.items():
                    created.execute("INSERT INTO meta VALUES (?, ?)", (kind, json.dumps(asdict(rows))))
        finally:
            created.close()


def _new_name(directory: Path, stem: str, suffix: str) -> str:
    used = [re.match(rf"{re.escape(stem)}-(\d+)", file.name) for file in directory.iterdir()]
    return f"{stem}-{max((int(match[1]) for match in used if match), default=0) + 1}{suffix}"


def _flush_names(directory: Path) -> None:
    """Write the names of a directory to disk, so that a power cut does not undo a rename."""
    if os.name == "nt":  # directories cannot be opened there
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
