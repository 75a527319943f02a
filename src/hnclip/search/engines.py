"""Engines find the nearest vectors of an index: an engine only proposes rows, the stored vectors decide.

`VectorSearch` scores proposed rows with the stored vectors, drops deleted ones, adds rows that the engine does not know
yet, and sorts. So scores are the same whichever engine found a row, an engine that is behind loses nothing, and what an
approximate engine can get wrong is which rows it proposes: its recall.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np

from hnclip.search.database import EngineName, Kind, RowFile, rebuild_command
from hnclip.search.reader import IndexReader
from hnclip.search.vectors import map_rows, score_rows
from hnclip.search.writer import IndexWriter
from hnclip.util.console import progress
from hnclip.util.optional import import_extra

log = logging.getLogger(__name__)

ENGINES: tuple[str, ...] = get_args(EngineName)
FEW = 1_000  # rows; fewer are scored as fast as any engine answers
LEAST = 64  # rows that are proposed at least, and 4 times as many as are wanted: an engine's order is approximate
GROWTH = 16  # times as many in the next attempt, if most of the proposed rows were deleted
IN_VIEW = 1024  # rows that a graph search keeps in view; with fewer, rows far from all others are missed
TOKEN = "HNCLIP_MILVUS_TOKEN"
MOST_OF_MILVUS = 16_384  # rows that Milvus returns at once
_BLOCK = 2**27  # bytes of float32 that are handed to an engine at once
_SCANNED = 2048  # rows that torch converts to float32 at once: they stay in the processor's cache


class Engine(Protocol):
    """Proposes rows. `covered` is how many rows it knows, from the first on."""

    covered: int

    def propose(self, query: np.ndarray, count: int) -> np.ndarray:
        """About `count` rows near a query [D], in any order; -1 where it finds no more."""
        ...


class VectorSearch:
    """The images or captions of an index, ready to be searched. Threads may share it."""

    def __init__(self, reader: IndexReader, kind: Kind, engine: Engine | None = None) -> None:
        """
        Args:
            engine: an approximate engine; without one the search is exact.
        """
        self.vectors, self.deleted = reader.vectors[kind], reader.deleted[kind]  # [N, D], [deleted]
        self.engine = engine
        self._scan = cache(lambda first: exact_scan(self.vectors[first:]))

    def nearest(self, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest rows [≤ k] to a query [D], and their cosines: best first, equal ones by row."""
        query = np.ascontiguousarray(query, np.float32)
        rows = self._proposed(query, k)
        scores = score_rows(self.vectors, query, rows)  # [n]
        best = np.argsort(-scores, kind="stable")[:k]
        return rows[best], scores[best]

    def _proposed(self, query: np.ndarray, k: int) -> np.ndarray:
        """Rows in order, the k nearest among them."""
        total = len(self.vectors)
        if self.engine is not None:
            covered = min(self.engine.covered, total)
            known = self._ask(self.engine, query, k, 0, covered)
            if len(known) >= min(k, covered - int((self.deleted < covered).sum())):
                return np.concatenate([known, self._ask(None, query, k, covered, total)])
        return self._ask(None, query, k, 0, total)

    def _ask(self, engine: Engine | None, query: np.ndarray, k: int, first: int, stop: int) -> np.ndarray:
        """Rows from `first` to `stop` that an engine, or the exact scan, proposes: in order, without deleted ones."""
        living = stop - first - int(((self.deleted >= first) & (self.deleted < stop)).sum())
        if stop - first <= FEW:
            return np.setdiff1d(np.arange(first, stop), self.deleted)
        engine, count = engine or self._scan(first), max(4 * k, LEAST)
        while True:
            rows = engine.propose(query, min(count, stop - first)) + first
            rows = np.setdiff1d(rows[(rows >= first) & (rows < stop)], self.deleted)
            if len(rows) >= min(k, living) or count >= stop - first:
                return rows
            count *= GROWTH


def exact_scan(vectors: np.ndarray) -> Engine:
    """A scan of all rows [N, D]: by faiss if it is installed, otherwise by torch, which is slower."""
    try:
        return FaissScan(vectors)
    except ImportError:
        return TorchScan(vectors)


class FaissScan:
    """faiss's flat index of float16 vectors, which it copies into memory."""

    def __init__(self, vectors: np.ndarray) -> None:
        import faiss

        self.covered, width = vectors.shape
        kind = faiss.ScalarQuantizer.QT_fp16
        self._index = faiss.IndexScalarQuantizer(width, kind, faiss.METRIC_INNER_PRODUCT)
        self._index.add_sa_codes(vectors.view(np.uint8))

    def propose(self, query: np.ndarray, count: int) -> np.ndarray:
        return self._index.search(query[None], count)[1][0]


class TorchScan:
    """Products of float16 rows with a query, in float32, a block at a time."""

    def __init__(self, vectors: np.ndarray) -> None:
        import torch

        self.covered = len(vectors)
        self._blocks = torch.from_numpy(vectors).split(_SCANNED)

    def propose(self, query: np.ndarray, count: int) -> np.ndarray:
        import torch

        vector = torch.from_numpy(query)  # [D]
        return torch.cat([block.float() @ vector for block in self._blocks]).topk(count).indices.numpy()


class FaissEngine:
    """A file of faiss, mapped into memory: lists of neighbouring rows (IVF) or a graph of them (HNSW), with 8 bits for
    each dimension."""

    def __init__(self, file: Path, rows: int) -> None:
        faiss = import_faiss()
        self.covered = rows
        # Only what is searched is read, and processes share it.
        self._faiss, self._index = faiss, faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)

    def propose(self, query: np.ndarray, count: int) -> np.ndarray:
        faiss = self._faiss
        if lists := getattr(self._index, "nlist", 0):
            how = faiss.SearchParametersIVF(nprobe=min(lists, max(32, lists // 32)))
        else:
            how = faiss.SearchParametersHNSW(efSearch=max(IN_VIEW, count))
        return self._index.search(query[None], count, params=how)[1][0]


class MilvusEngine:
    """A collection of Milvus, whose primary key is the row."""

    def __init__(self, uri: str, collection: str, rows: int) -> None:
        self.covered, self._uri, self._collection = rows, uri, collection
        self._client = connect_milvus(uri)
        with milvus_errors(uri):
            self._client.load_collection(collection)

    def propose(self, query: np.ndarray, count: int) -> np.ndarray:
        count = min(count, MOST_OF_MILVUS)
        search = {"metric_type": "IP", "params": {"ef": max(IN_VIEW, count)}}
        with milvus_errors(self._uri):
            (hits,) = self._client.search(self._collection, data=query[None], limit=count, search_params=search)
        return np.array([hit["row"] for hit in hits], np.int64)

    def close(self) -> None:
        self._client.close()


def open_engine(reader: IndexReader, kind: Kind, name: str) -> Engine | None:
    """The engine of this name, or None if the search is exact: also for few rows, and for an index whose own engine has
    not been built yet.

    Raises:
        ValueError: the index has no such engine, its file is damaged, or its package is missing.
        OSError: a server does not answer.
    """
    check_engine(name)
    if name == "exact" or reader.files[kind].rows < FEW:
        return None
    found = reader.extras.get(f"engine:{kind}") or {}
    update = rebuild_command(reader.path, replace=False).replace(f" --engine {reader.about.engine}", "")
    build = f"build it with\n  {update} --engine {name}"
    if (found.get("engine"), found.get("vectors")) != (name, reader.files[kind].name):
        if name == reader.about.engine:
            return None
        raise ValueError(f"{reader.path} has no {name} of its {kind}: {build}")
    if name == "milvus":
        return MilvusEngine(found["uri"], found["collection"], found["rows"])
    if not _is_whole(reader.path, found):
        raise ValueError(f"{reader.path / found['file']} is damaged: {build}")
    try:
        return FaissEngine(reader.path / found["file"], found["rows"])
    except RuntimeError as error:
        raise ValueError(f"{reader.path / found['file']} cannot be read ({error}): delete it and {build}") from error


def update_engine(writer: IndexWriter, kind: Kind, name: str, uri: str | None = None) -> None:
    """Build the engine of a kind, or add the rows that are new. Few rows have none: they are scanned.

    Raises:
        ValueError: its package is missing.
        OSError: its file cannot be written, or a server does not answer. The index is complete without it.
    """
    key, rows = f"engine:{kind}", writer.files[kind]
    if name == "exact" or rows.rows < FEW:
        if writer.extras.get(key):
            writer.set_extra(key, None)
            writer.delete_leftovers()
        return
    found = writer.extras.get(key) or {}
    same = (found.get("engine"), found.get("vectors"), found.get("uri")) == (name, rows.name, uri)
    if not same or not _is_whole(writer.path, found):
        found = {}
    if found.get("rows") == rows.rows:
        return
    vectors = map_rows(writer.path / rows.name, rows.rows, writer.about.width)  # [N, D]
    if name == "milvus":
        record = _update_milvus(writer, rows, vectors, str(uri), found.get("rows", 0))
    else:
        record = _update_faiss(writer, rows, vectors, name, found)
    writer.set_extra(key, {"engine": name, "vectors": rows.name, "rows": rows.rows, "uri": uri, **record})
    writer.delete_leftovers()


def _is_whole(path: Path, found: dict[str, Any]) -> bool:
    """Whether the file of an engine, if it has one, has its size: reading behind its end would end the process."""
    return "file" not in found or ((file := path / found["file"]).exists() and file.stat().st_size == found["bytes"])


def check_engine(name: str) -> None:
    if name not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {name!r}")


def _update_faiss(
    writer: IndexWriter, rows: RowFile, vectors: np.ndarray, name: str, found: dict[str, Any]
) -> dict[str, Any]:
    """Add rows to the file of faiss, or rebuild it where more rows are new than it was trained on."""
    faiss = import_faiss()
    index, first, trained = None, 0, len(vectors)
    if found and len(vectors) <= 2 * found["trained"]:
        with suppress(RuntimeError):  # damaged: it is rebuilt
            index = faiss.read_index(str(writer.path / found["file"]))
            first, trained = found["rows"], found["trained"]
    if index is None:
        index = _trained_faiss(faiss, vectors, name)
    for block in _blocks(vectors, first, f"{name} of {rows.name}"):
        index.add(block)
    file = writer.path / writer.new_name(f"{rows.name.removesuffix('.f16')}-{name}", ".faiss")
    try:
        faiss.write_index(index, str(file))
    except RuntimeError as error:
        file.unlink(missing_ok=True)
        raise OSError(f"{file} cannot be written; is the disk full? {error}") from error
    return {"file": file.name, "bytes": file.stat().st_size, "trained": trained}


def _trained_faiss(faiss: Any, vectors: np.ndarray, name: str) -> Any:
    count, width = vectors.shape
    lists = max(1, min(65_536, int(4 * math.sqrt(count)), count // 39))
    parameters = f"IVF{lists},SQ8" if name == "faiss-ivf" else "HNSW32_SQ8"
    log.info(f"building {name} of {count:,} rows ({parameters})")
    index = faiss.index_factory(width, parameters, faiss.METRIC_INNER_PRODUCT)
    if name == "faiss-ivf":
        index.cp.min_points_per_centroid = 1  # otherwise faiss warns where there are many lists
    else:
        index.hnsw.efConstruction = 200
    size = min(count, 500_000, 64 * lists)
    index.train(vectors[np.arange(size) * count // size].astype(np.float32))  # [size, D], evenly spread
    return index


def import_faiss() -> Any:
    return import_extra("faiss", "these engines", "search")


def _update_milvus(writer: IndexWriter, rows: RowFile, vectors: np.ndarray, uri: str, start: int) -> dict[str, Any]:
    """Write the rows from `start` on to a collection of this index, which is created first. A row that is written again
    is replaced, so an interrupted update loses nothing."""
    # The place is part of the name: a copy of an index elsewhere has a collection of its own.
    place = blake2b(str(writer.path.resolve()).encode(), digest_size=8).hexdigest()
    collection = f"hnclip_{place}_{rows.name.removesuffix('.f16').replace('-', '_')}"
    with closing(connect_milvus(uri)) as client, milvus_errors(uri):
        if not client.has_collection(collection):
            start = 0
            _create_collection(client, collection, vectors.shape[1])
        for block in _blocks(vectors, start, f"milvus of {rows.name}", size=2**22):
            client.upsert(collection, [{"row": start + n, "vector": vector} for n, vector in enumerate(block)])
            start += len(block)
        client.flush(collection)
    return {"collection": collection}


def _create_collection(client: Any, name: str, width: int) -> None:
    from pymilvus import DataType

    schema = client.create_schema(auto_id=False)
    schema.add_field("row", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=width)
    indexes = client.prepare_index_params()
    indexes.add_index("vector", index_type="HNSW", metric_type="IP", params={"M": 32, "efConstruction": 100})
    client.create_collection(name, schema=schema, index_params=indexes)


def connect_milvus(uri: str) -> Any:
    """A client of Milvus; its token or USER:PASSWORD comes from the environment."""
    milvus = import_extra("pymilvus", "indexes in Milvus", "milvus")
    with milvus_errors(uri):
        return milvus.MilvusClient(uri=uri, token=os.environ.get(TOKEN, ""), timeout=10)


@contextmanager
def milvus_errors(uri: str) -> Iterator[None]:
    """Errors of the client as OSError, with what can be done."""
    from pymilvus.exceptions import MilvusException

    try:
        yield
    except MilvusException as error:
        raise OSError(
            f"Milvus at {uri} failed: {error}\nIf it asks for a token, set ${TOKEN}; --engine exact searches without it"
        ) from error


def _blocks(vectors: np.ndarray, first: int, title: str, *, size: int = _BLOCK) -> Iterator[np.ndarray]:
    """Rows from `first` on in float32, [n, D] at a time."""
    count, width = vectors.shape
    step = max(1, size // (4 * width))
    with progress(title, count, first) as bar:
        for start in range(first, count, step):
            block = vectors[start : start + step].astype(np.float32)
            yield block
            bar.advance(len(block))
