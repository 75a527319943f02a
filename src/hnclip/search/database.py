"""The format of an index on disk: database, files of vectors, and the errors of damaged ones. Nothing here
imports torch.

`photos.hnc` is a directory:

    index-1.db        SQLite: images, thumbnails, files, captions, problems, and what the other files hold
    images-1.f16      vectors of images, a row each; captions-1.f16 is the same for captions
    images-1-*.faiss  approximate engines (`hnclip.search.engines`)
    text-1/           the text tower and its tokenizer, for queries without torch (`hnclip.search.query_encoder`)
    command.txt       the command that updates the index

The database is the only commit point. Bytes of other files are flushed before the transaction that names them, so a
killed writer leaves bytes that are not referenced. The published database with the highest number counts. A database is
published by its format number, which is 0 before: an index is replaced by setting the format number of a new database.

An image is its content, identified by its hash; a file is a name that has an image and captions. Each new image or
caption gets the next id and the next row, so ids rise with rows. An id is never given to something else, so a reader
may go on with the rows that it mapped: what was deleted since is not found in the database any more and is skipped.
"""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from hnclip.search.vectors import checksum

FORMAT = 3  # raised by hand; PRAGMA user_version of a published database
APPLICATION = 0x686E6378  # PRAGMA application_id: "hncx"
COMMAND = "command.txt"
PATIENCE = 60.0  # seconds to wait for the transaction of another process

Kind = Literal["images", "captions"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EngineName = Literal["exact", "faiss-ivf", "faiss-hnsw", "milvus"]

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE images (
    id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, width INTEGER NOT NULL, height INTEGER NOT NULL
);
CREATE TABLE thumbnails (image INTEGER PRIMARY KEY, jpeg BLOB NOT NULL);
CREATE TABLE files (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, image INTEGER NOT NULL, place TEXT NOT NULL,
    stamp TEXT NOT NULL, captions BLOB NOT NULL
);
CREATE INDEX files_of_image ON files (image);
CREATE TABLE captions (id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, text TEXT NOT NULL);
CREATE TABLE said (file INTEGER NOT NULL, number INTEGER NOT NULL, caption INTEGER NOT NULL,
    PRIMARY KEY (file, number)) WITHOUT ROWID;
CREATE INDEX said_of_caption ON said (caption);
CREATE TABLE deleted (kind TEXT NOT NULL, id INTEGER NOT NULL, PRIMARY KEY (kind, id)) WITHOUT ROWID;
CREATE TABLE compacted (kind TEXT PRIMARY KEY, ids BLOB NOT NULL);
CREATE TABLE problems (name TEXT PRIMARY KEY, kind TEXT NOT NULL, detail TEXT NOT NULL, stamp TEXT NOT NULL)
    WITHOUT ROWID
"""


@dataclass(frozen=True)
class About:
    """What an index was made with and of; queries must be encoded by the same model.

    Args:
        model: as given to `hnclip index`; `source` is what was recognised, `fingerprint` what it computes by.
        opening: how it was opened (`hnclip.config.Opening`).
        width: D of a vector.
        data: what was indexed; files and folders by their absolute path.
        root: the directory that the places of files are relative to, if there is one.
        engine: that searches unless another is asked for; `uri` of one that is a server.
        split: of the data, or all.
        command: updates the index, without --out.
    """

    model: str
    source: str
    fingerprint: str
    opening: dict[str, Any]
    width: int
    data: str
    root: str | None
    engine: EngineName = "exact"
    uri: str | None = None
    split: str = "all"
    command: str = "hnclip index DATA --model MODEL"


@dataclass(frozen=True)
class RowFile:
    """The file of vectors of a kind: committed rows, their checksum, and the id of the next one."""

    name: str
    rows: int = 0
    crc: int = 0
    next_id: int = 1


def content_hash(content: bytes) -> bytes:
    """Identifies the bytes of an image or the text of a caption."""
    return blake2b(content, digest_size=32).digest()


def text_hash(text: str) -> bytes:
    return content_hash(text.encode("utf-8", "surrogatepass"))


def current_database(path: Path) -> Path:
    """The published database of an index; ValueError if there is none."""
    if file := published_database(path):
        return file
    make = f"create it with hnclip index FOLDER --model MODEL --out {shlex.quote(str(path))}"
    if not path.is_dir():
        raise ValueError(f"{path} does not exist: {make}")
    if (path / COMMAND).is_file():
        raise ValueError(damaged(path, "it has no database"))
    raise ValueError(f"{path} is not an index of hnclip: {make}")


def published_database(path: Path) -> Path | None:
    """The published database with the highest number. A damaged one counts: an error is reported when it is opened."""
    for _, file in sorted(database_files(path).items(), reverse=True):
        try:
            published = read_pragma(file, "user_version") > 0
        except (OSError, sqlite3.DatabaseError):
            published = True
        if published:
            return file
    return None


def database_files(path: Path) -> dict[int, Path]:
    """Databases by number, published or not."""
    names = [(re.fullmatch(r"index-(\d+)\.db", file.name), file) for file in path.glob("index-*.db")]
    return {int(match[1]): file for match, file in names if match}


def is_index(path: Path) -> bool:
    """Whether a directory is an index, by the header of its database."""
    with suppress(OSError, sqlite3.DatabaseError):
        return any(read_pragma(file, "application_id") == APPLICATION for file in database_files(path).values())
    return False


def read_pragma(file: Path, name: str) -> int:
    """A number in the header of a database. Only SQLite may open its files: to close one that it has open in the same
    process would end its locks, and other processes would delete the log of a writer."""
    with closing(connect(file)) as database:
        return database.execute(f"PRAGMA {name}").fetchone()[0]


def connect(file: Path) -> sqlite3.Connection:
    """A connection to a database that exists, for threads that take turns."""
    escaped = file.absolute().as_posix().replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    # A reader may have to recover what a killed writer left, hence rw; a disk that is read-only allows the others.
    for mode in ("mode=rw", "mode=ro", "mode=ro&immutable=1"):
        uri = f"file:{escaped}?{mode}"
        database = sqlite3.connect(uri, uri=True, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        try:
            database.execute("SELECT count(*) FROM sqlite_master")
            return database
        except sqlite3.OperationalError as error:
            database.close()
            if "unable to open" not in str(error) and "readonly" not in str(error):
                raise
    raise OSError(f"{file} cannot be opened")


def read_meta(database: sqlite3.Connection, path: Path) -> tuple[About, dict[Kind, RowFile], dict[str, Any]]:
    """What an index is about, its files of vectors, and what else its directory holds: engines, the text encoder."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, FORMAT):
        raise ValueError(
            f"{path} has format {version}, this version of hnclip reads {FORMAT}: use the version that made it, or "
            f"rebuild it with\n  {rebuild_command(path)}"
        )
    try:
        meta = {key: json.loads(value) for key, value in database.execute("SELECT key, value FROM meta")}
        return About(**meta.pop("about")), {kind: RowFile(**meta.pop(kind)) for kind in KINDS}, meta
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(damaged(path, f"its database does not say what it holds ({error!r})")) from error


def read_ids(database: sqlite3.Connection, kind: Kind, file: RowFile) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all rows [N], which rise, and the rows that were deleted."""
    found = database.execute("SELECT ids FROM compacted WHERE kind = ?", (kind,)).fetchone()
    kept = np.frombuffer(found[0] if found else b"", np.int64)  # rows that were kept; those since have consecutive ids
    ids = np.concatenate([kept, np.arange(file.next_id - file.rows + len(kept), file.next_id)])
    deleted = database.execute("SELECT id FROM deleted WHERE kind = ? ORDER BY id", (kind,)).fetchall()
    return ids, np.searchsorted(ids, [number for (number,) in deleted])


def check_vectors(path: Path, about: About, files: Mapping[Kind, RowFile], *, limit: int) -> None:
    """`check_file` of all files of vectors."""
    for rows in files.values():
        check_file(path, rows.name, rows.rows * 2 * about.width, rows.crc, limit=limit)


def check_file(path: Path, name: str, size: int, crc: int, *, limit: int, replace: bool = True) -> None:
    """ValueError if a file of the index is missing or too short, or does not match its checksum.

    Args:
        limit: bytes; of larger files the checksum is not compared.
        replace: the index has to be rebuilt; otherwise an update repairs it.
    """
    try:
        found = (path / name).stat().st_size
    except FileNotFoundError:
        raise ValueError(damaged(path, f"{name} is missing", replace=replace)) from None
    if found < size:
        raise ValueError(damaged(path, f"{name} holds {found:,} of {size:,} bytes", replace=replace))
    if size <= limit and checksum(path / name, size) != crc:
        raise ValueError(damaged(path, f"{name} does not match its checksum", replace=replace))


def damaged(path: Path, what: str, *, replace: bool = True) -> str:
    return (
        f"{path} is damaged: {what}. {'Rebuild' if replace else 'Repair'} it with\n  {rebuild_command(path, replace)}"
    )


def rebuild_command(path: Path, replace: bool = True) -> str:
    command = "hnclip index DATA --model MODEL"
    with suppress(OSError, UnicodeDecodeError):
        command = (path / COMMAND).read_text(encoding="utf-8").strip() or command
    return f"{command} --out {shlex.quote(str(path))}{' --replace' * replace}"


@contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """SQLite's errors with the index that they are about and what can be done."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "no such" in str(error):  # a table or a column: the file was cut or exchanged
            raise ValueError(damaged(path, f"its database is incomplete ({error})")) from error
        raise OSError(f"the database of {path} cannot be used: {error}") from error  # locked, full, no permission
    except sqlite3.DatabaseError as error:
        raise ValueError(damaged(path, f"its database cannot be read ({error})")) from error
