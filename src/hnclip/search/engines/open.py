"""Which engine searches an index, by name, and how an index gets one."""

from __future__ import annotations

import logging
from typing import get_args

from hnclip.search.engines import Candidates
from hnclip.search.engines.made import FEW, Version, again
from hnclip.search.index.layout import KINDS, EngineName, Kind
from hnclip.search.index.reader import Index
from hnclip.search.index.vectors import StoredVectors, row_files
from hnclip.search.index.writer import IndexWriter

log = logging.getLogger(__name__)

ENGINE_NAMES: tuple[str, ...] = get_args(EngineName)


def open_candidates(index: Index, kind: Kind, engine: str) -> Candidates | None:
    """What proposes rows of this kind. None where the search is exact: of few rows, and of an index whose own engine is
    not made yet.

    Raises:
        ValueError: another engine was asked for than the index has, its package is missing, or its files are damaged;
            the message says what to do.
        OSError: a server does not answer.
    """
    _check(engine)
    if engine == "exact" or not has_enough(index, kind):
        return None
    candidates = _open(index, kind, engine)
    if candidates is None and engine != index.about.engine:
        raise ValueError(f"{index.path} has no {engine} yet: {again(index, engine)}")
    return candidates


def has_enough(index: Index, kind: Kind) -> bool:
    """Whether an engine is made of the rows of this kind: fewer are scanned."""
    return len(index.vectors(kind)) >= FEW


def make_engine(writer: IndexWriter, engine: str, uri: str | None = None) -> None:
    """Let an engine know all rows of an index; what other engines have stays where it is.

    Args:
        uri: of Milvus.

    Raises:
        ValueError: its package is missing, or the URI is none.
        OSError: a file cannot be written, or a server does not answer. The index is whole, and what the engine does not
            know is scanned.
    """
    _check(engine)
    if engine == "exact":
        return
    for kind in KINDS:
        count: int = getattr(writer.state, kind)
        if count >= FEW:
            files = row_files(writer.directory, kind, writer.about.width, writer.about.storage)
            _make(writer, kind, StoredVectors(files, count, writer.about.width, 0.0), engine, uri)
        elif count:
            log.info(f"{count:,} {kind} are few enough to be scanned: {engine} is not made of less than {FEW:,}")


def _open(version: Version, kind: Kind, engine: str) -> Candidates | None:
    if engine == "milvus":
        from hnclip.search.engines.milvus_engine import open_milvus

        return open_milvus(version, kind)
    from hnclip.search.engines.faiss_engine import open_faiss

    return open_faiss(version, kind, engine)


def _make(version: Version, kind: Kind, vectors: StoredVectors, engine: str, uri: str | None) -> None:
    if engine == "milvus":
        from hnclip.search.engines.milvus_engine import make_milvus

        make_milvus(version, kind, vectors, uri)
    else:
        from hnclip.search.engines.faiss_engine import make_faiss

        make_faiss(version, kind, vectors, engine)


def _check(engine: str) -> None:
    if engine not in ENGINE_NAMES:
        raise ValueError(f"engine must be one of {', '.join(ENGINE_NAMES)}; got {engine!r}")
