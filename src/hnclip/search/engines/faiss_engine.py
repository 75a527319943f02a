"""Faiss as an engine: lists of neighbouring rows (IVF) or a graph of them (HNSW), in a file that is mapped into memory.

Rows are kept in 8 bits a number: the engine only proposes, and the gallery scores with the stored vectors.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hnclip.search.engines import IN_VIEW, Candidates
from hnclip.search.engines.made import Made, Version, again, made_file, read_made, row_blocks, write_made
from hnclip.search.index.layout import ENGINES, Kind
from hnclip.search.index.vectors import StoredVectors
from hnclip.util.files import replace_file

log = logging.getLogger(__name__)

NEEDED = ("file", "bytes")
LISTS_AT_MOST = 65_536
LEARNED_FROM = 500_000  # rows at most, which lists and ranges of numbers are learned from
ROWS_PER_LIST = 64  # of these, at most
LOOKED_AT = 32  # one list in so many is searched, but no fewer lists than that
LINKS = 32  # of a row in the graph; twice as many in its lowest layer
EFFORT = 200  # rows that are kept in view to find a new one's place in the graph


class FaissCandidates(Candidates):
    """A file of Faiss, opened. Threads may share it."""

    def __init__(self, faiss: Any, file: Path, covered: int) -> None:
        self.covered = covered
        self._faiss = faiss
        self._index = faiss.read_index(str(file), _mapped(faiss))
        if self._index.ntotal != covered:
            raise RuntimeError(f"it holds {self._index.ntotal} rows, not {covered}")

    def propose(self, queries: np.ndarray, count: int) -> np.ndarray:
        """[Q, D] to [Q, count]"""
        faiss = self._faiss
        if lists := getattr(self._index, "nlist", 0):
            how = faiss.SearchParametersIVF(nprobe=min(lists, max(LOOKED_AT, lists // LOOKED_AT)))
        else:
            how = faiss.SearchParametersHNSW(efSearch=max(IN_VIEW, count))
        _, rows = self._index.search(np.ascontiguousarray(queries, np.float32), count, params=how)
        return rows


def open_faiss(version: Version, kind: Kind, engine: str) -> FaissCandidates | None:
    """What Faiss has made of the rows of this kind; None if it has made nothing.

    Raises:
        ValueError: Faiss is not installed, or its file is damaged.
    """
    faiss = import_faiss()
    made = None
    while (found := read_made(version, kind, engine, NEEDED)) != made:  # the writer may put another file in its place
        made = found
        if made is not None:
            with contextlib.suppress(FileNotFoundError):
                return _open(faiss, version, made)
    if made is None:
        return None
    raise ValueError(_unusable(version, made, "is missing", there=False))


def make_faiss(version: Version, kind: Kind, vectors: StoredVectors, engine: str) -> None:
    """Let Faiss know all rows of this kind: add those that are new to what it has, or begin anew where it has nothing
    that can be used, or more rows have come than it was made of.

    Raises:
        ValueError: Faiss is not installed.
        OSError: its file cannot be written.
    """
    faiss = import_faiss()
    count, width = vectors.shape
    index, made = _old(faiss, version, kind, engine)
    if made is None or not made.rows <= count <= 2 * made.trained:
        log.info(f"making {engine} of {count:,} {kind}")
        index, parameters = _learned(faiss, vectors, engine)
        made = Made(engine, kind, version.generation, width, 0, count, {"parameters": parameters})
    elif made.rows == count:
        return
    for _, block in row_blocks(vectors, made.rows, f"{engine} of {kind}"):
        index.add(block)
    file = made_file(version, kind, engine).with_suffix(f".{secrets.token_hex(4)}")
    with replace_file(file) as partial:
        try:
            faiss.write_index(index, str(partial))
        except RuntimeError as error:
            raise OSError(f"{file} cannot be written, is the disk full? {error}") from error
        size = partial.stat().st_size
    details = {**made.details, "file": file.name, "bytes": size, "faiss": faiss.__version__}
    write_made(version, replace(made, rows=count, details=details))
    for other in file.parent.glob(f"*{kind}.{engine}.*"):  # older ones, and what was never finished
        if other.name not in (file.name, made_file(version, kind, engine).name):
            with contextlib.suppress(OSError):  # some systems keep files that are still open; the next time then
                other.unlink()


def import_faiss() -> Any:
    """Faiss, which only those who search millions need.

    Raises:
        ValueError: it is not installed; the message says how to.
    """
    try:
        import faiss
    except ImportError as error:
        raise ValueError(f"this engine needs Faiss ({error}): pip install 'hnclip[faiss]'") from error
    return faiss


def _open(faiss: Any, version: Version, made: Made) -> FaissCandidates:
    file = made_file(version, made.kind, made.engine).with_name(made.details["file"])
    if file.stat().st_size != made.details["bytes"]:  # what is mapped but not there ends the process
        raise ValueError(_unusable(version, made, "is cut short"))
    try:
        return FaissCandidates(faiss, file, made.rows)
    except RuntimeError as error:
        raise ValueError(_unusable(version, made, f"cannot be read ({error})")) from error


def _old(faiss: Any, version: Version, kind: Kind, engine: str) -> tuple[Any, Made | None]:
    """What Faiss has made before, in memory, if it can be used."""
    made = read_made(version, kind, engine, NEEDED)
    if made is not None:
        with contextlib.suppress(OSError, RuntimeError):
            file = made_file(version, kind, engine).with_name(made.details["file"])
            if file.stat().st_size == made.details["bytes"]:
                index = faiss.read_index(str(file))
                if index.ntotal == made.rows:
                    return index, made
    return None, None


def _learned(faiss: Any, vectors: StoredVectors, engine: str) -> tuple[Any, str]:
    """An index without rows that has seen some of them, and how Faiss calls it."""
    count, width = vectors.shape
    lists = max(1, min(LISTS_AT_MOST, int(4 * math.sqrt(count)), count // 39))
    ivf = engine == "faiss-ivf"
    parameters = f"IVF{lists},SQ8" if ivf else f"HNSW{LINKS}_SQ8"
    index = faiss.index_factory(width, parameters, faiss.METRIC_INNER_PRODUCT)
    if ivf:
        index.cp.min_points_per_centroid = 1  # or it warns where so many lists leave fewer rows to learn from
    else:
        index.hnsw.efConstruction = EFFORT
    size = min(count, LEARNED_FROM, ROWS_PER_LIST * lists)
    index.train(vectors.rows(np.arange(size) * count // size))  # [size, D], from everywhere
    return index, parameters


def _mapped(faiss: Any) -> int:
    """How to open a file so that only what is looked at is read, and processes share it."""
    return getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)


def _unusable(version: Version, made: Made, what: str, *, there: bool = True) -> str:
    file = f"{version.directory.name}/{ENGINES}/{made.details['file']}"
    return f"{file} of {version.path} {what}: {'remove it, and ' * there}{again(version, made.engine)}"
