"""The catalogue of an index: which rows are which pictures and captions, and since when.

An item is a picture under a name: a file, or a record of a data set. It points to a row, which files of the same
content share. Items are born with a version and die with one, and whoever reads version v sees those with
born ≤ v < died: to give an item another picture or other captions is to end it and to bear another.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from hashlib import blake2b
from pathlib import Path

from hnclip.search.index.layout import About, damaged
from hnclip.util.files import transaction

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


def texts_hash(texts: Sequence[str]) -> bytes:
    """Names several captions in their order."""
    return content_hash(b"".join(map(text_hash, texts)))


def database_uri(file: Path, mode: str) -> str:
    escaped = file.absolute().as_posix().replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return f"file:{escaped}?mode={mode}"


def create_catalogue(file: Path, about: str) -> sqlite3.Connection:
    database = _connect(database_uri(file, "rwc"))
    with transaction(database):
        for statement in SCHEMA.split(";"):
            database.execute(statement)
        database.execute("INSERT INTO about VALUES (?)", (about,))
        database.execute("INSERT INTO state VALUES (0, 0, 0, 0.0, 0.0)")
    return database


def open_catalogue(file: Path, path: Path) -> sqlite3.Connection:
    """The catalogue in a file; `path` is the index, for messages."""
    if not file.is_file():
        raise ValueError(damaged(path, f"{file.parent.name}/{file.name} is missing"))
    with explained(path):
        # A reader, too, may find a transaction that a killed writer did not finish, and has to undo it before it can
        # read: hence rw. Where nothing may be written SQLite opens the file for reading, of its own accord.
        return _connect(database_uri(file, "rw"))


def read_state(database: sqlite3.Connection, path: Path) -> tuple[About, State]:
    """What the index is about, and how far it is."""
    about = database.execute("SELECT text FROM about").fetchone()
    state = database.execute("SELECT * FROM state").fetchone()
    if about is None or state is None:
        raise ValueError(damaged(path, "its catalogue is empty"))
    return About.from_json(about[0], path), State(*state)


def write_state(database: sqlite3.Connection, state: State) -> None:
    columns = ", ".join(f"{column.name} = ?" for column in fields(State))
    database.execute(f"UPDATE state SET {columns}", astuple(state))


def thumbnails_end(database: sqlite3.Connection, rows: int) -> int:
    """Bytes of thumbnails that the first rows have: they lie in the order of rows."""
    question = "SELECT thumbnail_at + thumbnail_size FROM pictures WHERE row < ? ORDER BY row DESC LIMIT 1"
    found = database.execute(question, (rows,)).fetchone()
    return found[0] if found else 0


@contextmanager
def one_moment(database: sqlite3.Connection) -> Iterator[None]:
    """Several questions, answered from one state."""
    database.execute("BEGIN")
    try:
        yield
    finally:
        if database.in_transaction:
            database.execute("COMMIT")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """SQLite's errors, with the index that they are about and what can be done."""
    try:
        yield
    except sqlite3.OperationalError as error:  # locked, full, no right: that says nothing about the content
        if "no such" in str(error):  # a table or column, of a file that was cut to nothing
            raise ValueError(damaged(path, f"its catalogue is not whole ({error})")) from error
        raise OSError(f"the catalogue of {path} cannot be used: {error}") from error
    except sqlite3.DatabaseError as error:
        raise ValueError(damaged(path, f"its catalogue cannot be read ({error})")) from error


def _connect(uri: str) -> sqlite3.Connection:
    # Threads of a server share a connection; the reader lets one of them in at a time.
    return sqlite3.connect(uri, uri=True, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
