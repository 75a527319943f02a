"""The catalogue of an index: which rows are which pictures and captions, and since when.

An item is a picture under a name: a file, or a record of a data set. It points to a row, which files of the same
content share. Items are born with a version and die with one, and whoever reads version v sees those with
born ≤ v < died: to give an item another picture or other captions is to end it and to bear another.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from hnclip.search.index.layout import damaged

PATIENCE = 60.0  # seconds to wait for the transaction of another process
ASKED = 500  # values in one question; old versions of SQLite allow 999

SCHEMA = """
CREATE TABLE about (text TEXT NOT NULL);
CREATE TABLE state (
    version INTEGER NOT NULL, images INTEGER NOT NULL, captions INTEGER NOT NULL,
    images_slack REAL NOT NULL, captions_slack REAL NOT NULL
);
CREATE TABLE pictures (
    row INTEGER PRIMARY KEY, content BLOB NOT NULL UNIQUE, width INTEGER NOT NULL, height INTEGER NOT NULL,
    thumbnail_at INTEGER NOT NULL, thumbnail_size INTEGER NOT NULL
);
CREATE TABLE captions (row INTEGER PRIMARY KEY, content BLOB NOT NULL UNIQUE, text TEXT NOT NULL);
CREATE TABLE items (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, row INTEGER NOT NULL, place TEXT NOT NULL,
    stamp TEXT NOT NULL, born INTEGER NOT NULL, died INTEGER
);
CREATE UNIQUE INDEX living_names ON items (name) WHERE died IS NULL;
CREATE INDEX items_of_row ON items (row);
CREATE TABLE said (item INTEGER NOT NULL, number INTEGER NOT NULL, row INTEGER NOT NULL, PRIMARY KEY (item, number))
    WITHOUT ROWID;
CREATE INDEX said_of_row ON said (row);
CREATE TABLE dead (kind TEXT NOT NULL, row INTEGER NOT NULL, PRIMARY KEY (kind, row)) WITHOUT ROWID;
CREATE TABLE problems (name TEXT PRIMARY KEY, kind TEXT NOT NULL, detail TEXT NOT NULL, stamp TEXT NOT NULL)
    WITHOUT ROWID
"""


@dataclass(frozen=True)
class State:
    """How far a version of the index is: rows of either kind, dead ones included, and the slack of their codes."""

    version: int = 0
    images: int = 0
    captions: int = 0
    images_slack: float = 0.0
    captions_slack: float = 0.0


def content_hash(content: bytes) -> bytes:
    """Names the bytes of a picture, or the letters of a caption."""
    return blake2b(content, digest_size=32).digest()


def text_hash(text: str) -> bytes:
    return content_hash(text.encode("utf-8", "surrogatepass"))


def create_catalogue(file: Path, about: str) -> sqlite3.Connection:
    database = _connect(f"file:{_escaped(file)}")
    with writing(database):
        for statement in SCHEMA.split(";"):
            database.execute(statement)
        database.execute("INSERT INTO about VALUES (?)", (about,))
        database.execute("INSERT INTO state VALUES (0, 0, 0, 0.0, 0.0)")
    return database


def open_catalogue(file: Path, path: Path, *, write: bool) -> tuple[sqlite3.Connection, str, State]:
    """The catalogue in a file, what the index is about, and its state; `path` is the index, for messages."""
    if not file.is_file():
        raise ValueError(damaged(path, f"{file.parent.name}/{file.name} is missing"))
    with explained(path):
        database = _connect(f"file:{_escaped(file)}?mode={'rw' if write else 'ro'}")
        try:
            database.execute("BEGIN")  # both of one moment
            about = database.execute("SELECT text FROM about").fetchone()
            state = database.execute("SELECT * FROM state").fetchone()
            database.execute("COMMIT")
        except BaseException:
            database.close()
            raise
    if about is None or state is None:
        database.close()
        raise ValueError(damaged(path, "its catalogue is empty"))
    return database, about[0], State(*state)


@contextmanager
def writing(database: sqlite3.Connection) -> Iterator[None]:
    """A transaction that no other writer shares; an error undoes it."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # some errors have ended it already
            database.execute("ROLLBACK")
        raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """SQLite's errors, with the index that they are about and what can be done."""
    try:
        yield
    except sqlite3.OperationalError as error:  # locked, full, no right: that says nothing about the content
        raise OSError(f"the catalogue of {path} cannot be used: {error}") from error
    except sqlite3.DatabaseError as error:
        raise ValueError(damaged(path, f"its catalogue cannot be read ({error})")) from error


def _connect(uri: str) -> sqlite3.Connection:
    # Threads of a server share a connection; the reader lets one of them in at a time.
    return sqlite3.connect(uri, uri=True, timeout=PATIENCE, isolation_level=None, check_same_thread=False)


def _escaped(file: Path) -> str:
    return file.absolute().as_posix().replace("%", "%25").replace("?", "%3f").replace("#", "%23")
