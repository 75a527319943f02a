"""Which engine searches an index, by name."""

from __future__ import annotations

from hnclip.search.engines import Candidates
from hnclip.search.index.layout import Kind
from hnclip.search.index.reader import Index


def open_candidates(index: Index, kind: Kind, engine: str) -> Candidates | None:
    """What proposes rows of this kind; None where the search is exact."""
    if engine == "exact":
        return None
    raise ValueError(f"engine must be one of exact, faiss-ivf, faiss-hnsw, milvus; got {engine!r}")
