"""Milvus as an engine, for more than one machine. A file of milvus-lite and a cluster differ only in the URI.

A collection holds the rows of one kind of one generation of one index, under a name that no other index has; the key of
a vector is its row. To write a row again does no harm, so a killed writer begins again where the last one had all on
disk.
"""

from __future__ import annotations

import json
import logging
import secrets
from pathlib import Path

import numpy as np

from hnclip.search.engines import IN_VIEW, Candidates
from hnclip.search.engines.made import Made, Version, read_made, row_blocks, write_made
from hnclip.search.engines.milvus_server import FILE, Connection, InUse, plain_uri
from hnclip.search.index.layout import ENGINES, Kind
from hnclip.search.index.vectors import StoredVectors
from hnclip.util.files import read_json, replace_file

log = logging.getLogger(__name__)

ENGINE = "milvus"
NEEDED = ("uri", "collection")
OWNER = "milvus.json"  # in the directory of the index, for all its generations
INDEX = {"index_type": "HNSW", "params": {"M": 32, "efConstruction": 100}}
MOST = 16_384  # rows that Milvus finds at once
_MESSAGE = 2**22  # bytes of vectors at once


class MilvusCandidates(Candidates):
    """A collection of Milvus. Threads may share it."""

    def __init__(self, connection: Connection, name: str, covered: int) -> None:
        self.covered = covered
        self._connection, self._name = connection, name

    def propose(self, queries: np.ndarray, count: int) -> np.ndarray:
        """[Q, D] to [Q, count]; nothing if the collection was dropped because the index has a newer generation."""
        rows = np.full((len(queries), count), -1, np.int64)
        asked = min(count, MOST)
        try:
            found = self._connection.search(self._name, queries, asked, max(IN_VIEW, asked))
        except OSError:
            if self._name in self._connection.names():
                raise
            return rows
        for number, some in enumerate(found):
            rows[number, : len(some)] = some
        return rows

    def close(self) -> None:
        self._connection.close()


def open_milvus(version: Version, kind: Kind) -> MilvusCandidates | None:
    """The collection of this kind; None if there is none.

    Raises:
        ValueError: pymilvus or milvus-lite is not installed.
        OSError: Milvus cannot be reached; `InUse` if it is a file that another process has open.
    """
    made = read_made(version, kind, ENGINE, NEEDED)
    if made is None:
        return None
    place = _place(version, made.details["uri"])
    if place.endswith(FILE) and not Path(place).exists():  # or it would be made, with nothing in it
        return None
    connection = Connection(place)
    try:
        if made.details["collection"] in connection.names():
            connection.load(made.details["collection"])
            return MilvusCandidates(connection, made.details["collection"], made.rows)
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None


def make_milvus(version: Version, kind: Kind, vectors: StoredVectors, uri: str | None) -> None:
    """Let Milvus know all rows of this kind. Where another process has its file open it is left as it is: what it does
    not know is scanned.

    Args:
        uri: a file, or a server; None for a file beside the vectors.

    Raises:
        ValueError: pymilvus or milvus-lite is not installed, or the URI is none.
        OSError: Milvus cannot be reached, or does not keep what it was given.
    """
    uri = None if uri is None else plain_uri(uri)
    place = _place(version, uri)
    if place.endswith(FILE):
        Path(place).parent.mkdir(parents=True, exist_ok=True)
    try:
        connection = Connection(place)
    except InUse as error:
        log.info(f"milvus of {kind} is not brought up to date, new rows are scanned until it is: {error}")
        return
    with connection:
        _fill(connection, version, kind, vectors, uri)


def _fill(connection: Connection, version: Version, kind: Kind, vectors: StoredVectors, uri: str | None) -> None:
    count, width = vectors.shape
    mine = f"hnclip_{_owner(version)}_"
    name = f"{mine}{version.generation}_{kind}"
    made, there = read_made(version, kind, ENGINE, NEEDED), connection.names()
    first = 0
    if name not in there:
        log.info(f"making milvus of {count:,} {kind} at {connection.uri}")
        connection.make(name, width, INDEX)
    elif made is not None and (made.details["uri"], made.details["collection"]) == (uri, name):
        first = made.rows
    if first < count:
        for start, block in row_blocks(vectors, first, f"milvus of {kind}", size=_MESSAGE):
            connection.write(name, [{"row": start + n, "vector": vector} for n, vector in enumerate(block)])
        if (kept := connection.keep(name)) < count:
            raise OSError(f"Milvus at {connection.uri} has {kept:,} of {count:,} {kind}: the same command goes on")
        details = {"uri": uri, "collection": name}
        write_made(version, Made(ENGINE, kind, version.generation, width, count, count, details))
    for other in there:
        if other.startswith(mine) and not other.startswith(f"{mine}{version.generation}_"):
            connection.drop(other)


def _owner(version: Version) -> str:
    """What marks the collections of this index, for all its generations; a copy elsewhere gets a mark of its own."""
    file, path = version.path / OWNER, str(version.path.resolve())
    try:
        found = read_json(file)
        if found["path"] == path:
            return str(found["id"])
    except (FileNotFoundError, ValueError, KeyError):
        pass
    mark = secrets.token_hex(8)
    with replace_file(file) as partial:
        partial.write_text(json.dumps({"id": mark, "path": path}), encoding="utf-8")
    return mark


def _place(version: Version, uri: str | None) -> str:
    return str((version.directory / ENGINES / "milvus.db").resolve()) if uri is None else uri
