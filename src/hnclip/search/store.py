"""An index on disk as its readers see it. Nothing here imports torch.

`photos.hnc` is a directory:

    index-1.db          SQLite: images, thumbnails, files, captions, problems, and what the other files hold
    images-1.f16, .ids  vectors of images, a row each, and the ids of the rows; likewise captions-1
    images-1-*.faiss    approximate engines (`hnclip.search.engines`)
    text-1/             the text tower and its tokenizer, for queries without torch (`hnclip.search.query_encoder`)
    command.txt         the command that updates the index

The database is the only commit point. Bytes of other files are flushed before the transaction that names them, so a
killed writer leaves bytes that are not referenced. Of several databases the one with the highest number counts: an
index is replaced by renaming a finished one to the next number.

An image is its content, identified by its hash; a file is a name that has an image and captions. Row numbers and ids
are never given to something else, so a reader may go on with the rows that it mapped: what was deleted since is not
found in the database any more and is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, Literal, get_args

import numpy as np

from hnclip.core import ImageSource, InvalidImage, Problem
from hnclip.data.image_sources import FileImage, TarImage
from hnclip.search.vectors import checksum, map_rows, read_ids

FORMAT = 2  # raised by hand; PRAGMA user_version of the database
APPLICATION = 0x686E6378  # PRAGMA application_id: "hncx"
COMMAND = "command.txt"
PATIENCE = 60.0  # seconds to wait for the transaction of another process
CHECKED = 2**26  # bytes of a file whose checksum is compared whenever it is opened; updates compare those of all files
CHUNK = 500  # values in one query; old versions of SQLite allow 999
ATTEMPTS, PAUSE = 4, 0.05  # further ones to open an index that may be changing, and seconds before each

Kind = Literal["images", "captions"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EngineName = Literal["exact", "faiss-ivf", "faiss-hnsw", "milvus"]

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE images (
    id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, row INTEGER NOT NULL, width INTEGER NOT NULL,
    height INTEGER NOT NULL
);
CREATE TABLE thumbnails (image INTEGER PRIMARY KEY, jpeg BLOB NOT NULL);
CREATE TABLE files (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, image INTEGER NOT NULL, place TEXT NOT NULL,
    stamp TEXT NOT NULL, captions BLOB NOT NULL
);
CREATE INDEX files_of_image ON files (image);
CREATE TABLE captions (id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, row INTEGER NOT NULL, text TEXT NOT NULL);
CREATE TABLE said (file INTEGER NOT NULL, number INTEGER NOT NULL, caption INTEGER NOT NULL,
    PRIMARY KEY (file, number)) WITHOUT ROWID;
CREATE INDEX said_of_caption ON said (caption);
CREATE TABLE deleted (kind TEXT NOT NULL, row INTEGER NOT NULL, PRIMARY KEY (kind, row)) WITHOUT ROWID;
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
        data: what was indexed; of files and folders the absolute path.
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

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class RowFile:
    """The file of vectors of a kind: committed rows, their checksum, and the id of the next one."""

    name: str
    rows: int = 0
    crc: int = 0
    ids_crc: int = 0
    next_id: int = 1

    @property
    def ids_name(self) -> str:
        return f"{self.name.removesuffix('.f16')}.ids"


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

    id: int
    text: str
    files: tuple[IndexedImage, ...]


def content_hash(content: bytes) -> bytes:
    """Identifies the bytes of an image or the text of a caption."""
    return blake2b(content, digest_size=32).digest()


def text_hash(text: str) -> bytes:
    return content_hash(text.encode("utf-8", "surrogatepass"))


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


class Store:
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
                self.deleted = {kind: self._deleted(kind) for kind in KINDS}
                self._database.execute("COMMIT")
            check_rows(self.path, self.about, self.files, limit=CHECKED)
            self.vectors, self.ids = dict[Kind, np.ndarray](), dict[Kind, np.ndarray]()
            for kind, rows in self.files.items():
                self.vectors[kind] = map_rows(self.path / rows.name, rows.rows, self.about.width)  # [N, D]
                self.ids[kind] = read_ids(self.path / rows.ids_name, rows.rows)  # [N]
        except BaseException:
            self._database.close()
            raise
        self.root = None if self.about.root is None else Path(self.about.root)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Store:
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
        if not 0 <= number < 2**63:  # SQLite knows no others
            return None
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
        return {caption: IndexedCaption(caption, texts[caption], tuple(some)) for caption, some in owners.items()}

    def all_files(self) -> Iterator[IndexedImage]:
        """Every file, in the order of ids."""
        first = -1
        while ids := self._query("SELECT id FROM files WHERE id > ? ORDER BY id LIMIT ?", (first, CHUNK)):
            yield from self._files("files.id", [number for (number,) in ids])
            first = ids[-1][0]

    def problems(self) -> list[Problem]:
        """What could not be indexed."""
        rows = self._query("SELECT kind, name, detail FROM problems ORDER BY name")
        return [Problem(kind, name, detail) for kind, name, detail in rows]

    def problem_count(self) -> int:
        return self._query("SELECT count(*) FROM problems")[0][0]

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

    def _deleted(self, kind: Kind) -> np.ndarray:
        rows = self._database.execute("SELECT row FROM deleted WHERE kind = ? ORDER BY row", (kind,)).fetchall()
        return np.array([row for (row,) in rows], np.int64)

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


def current_database(path: Path) -> Path:
    """The database of an index; ValueError if there is none."""
    numbered = database_files(path)
    if numbered:
        return numbered[max(numbered)]
    make = f"create it with hnclip index FOLDER --model MODEL --out {shlex.quote(str(path))}"
    if not path.is_dir():
        raise ValueError(f"{path} does not exist: {make}")
    if (path / "index.json").is_file():
        raise ValueError(f"{path} is an index of an earlier version: delete it, then {make}")
    if (path / COMMAND).is_file():
        raise ValueError(damaged(path, "it has no database"))
    raise ValueError(f"{path} is not an index of hnclip: {make}")


def database_files(path: Path) -> dict[int, Path]:
    """Databases by number."""
    names = [(re.fullmatch(r"index-(\d+)\.db", file.name), file) for file in path.glob("index-*.db")]
    return {int(match[1]): file for match, file in names if match}


def is_index(path: Path) -> bool:
    """Whether a directory is an index, by the header of its database."""
    for file in database_files(path).values():
        with suppress(OSError), file.open("rb") as opened:
            return opened.read(72)[68:] == APPLICATION.to_bytes(4, "big")
    return False


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
    application, version = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if application != APPLICATION:
        raise ValueError(damaged(path, "its database has no header of an index"))
    if version != FORMAT:
        raise ValueError(
            f"{path} has format {version}, this version of hnclip reads {FORMAT}: use the version that made it, or "
            f"make it anew with\n  {rebuild_command(path)}"
        )
    try:
        meta = {key: json.loads(value) for key, value in database.execute("SELECT key, value FROM meta")}
        about = About(**{field.name: meta["about"][field.name] for field in fields(About)})
        return about, {kind: RowFile(**meta.pop(kind)) for kind in KINDS}, meta
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(damaged(path, f"its database does not say what it holds ({error!r})")) from error


def check_size(path: Path, name: str, needed: int) -> None:
    """ValueError if a file of the index is missing or too short."""
    try:
        size = (path / name).stat().st_size
    except FileNotFoundError:
        raise ValueError(damaged(path, f"{name} is missing")) from None
    if size < needed:
        raise ValueError(damaged(path, f"{name} holds {size:,} of {needed:,} bytes"))


def check_rows(path: Path, about: About, files: Mapping[Kind, RowFile], *, limit: int) -> None:
    """ValueError if files of vectors or ids are missing or too short, or, up to `limit` bytes of a file, do not match
    their checksums."""
    for rows in files.values():
        for name, width, expected in ((rows.name, 2 * about.width, rows.crc), (rows.ids_name, 8, rows.ids_crc)):
            size = rows.rows * width
            check_size(path, name, size)
            if size <= limit and checksum(path / name, size) != expected:
                raise ValueError(damaged(path, f"{name} does not match its checksum"))


def damaged(path: Path, what: str) -> str:
    return f"{path} is damaged: {what}. Rebuild it with\n  {rebuild_command(path)}"


def rebuild_command(path: Path) -> str:
    command = "hnclip index DATA --model MODEL"
    with suppress(OSError, UnicodeDecodeError):
        command = (path / COMMAND).read_text(encoding="utf-8").strip() or command
    return f"{command} --out {shlex.quote(str(path))} --replace"


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
