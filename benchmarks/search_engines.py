"""Recall and speed of the search engines beside exact search in float32.

One set of vectors, made up as benchmarks/synthetic_index.py says, is indexed in both storages, and every engine
searches it. The peer keeps all vectors in memory as float32, multiplies them with the queries and takes the largest.
Half of the queries are near pictures, half are as far from all of them as descriptions are.

`recall` is the share of the peer's k nearest rows that an engine finds. Latency is that of one query at a time, k = 20;
queries per second are also given for 32 at a time. `vectors` are the bytes of the index that the engine reads, `engine`
those of its own files. Engines are measured one after the other, in one process, with as many threads as torch and
Faiss take by themselves.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from synthetic_index import picture_queries, synthetic_index, synthetic_vectors, text_queries

from hnclip.measure import Report, Timing, machine
from hnclip.search.engines.gallery import Gallery, Nearest
from hnclip.search.engines.open import make_engine, open_candidates
from hnclip.search.index.layout import ENGINES, Storage
from hnclip.search.index.reader import Index
from hnclip.search.index.vectors import row_files
from hnclip.search.index.writer import IndexWriter

log = logging.getLogger("hnclip.bench")

Name = Literal["exact-bf16", "exact-int8", "faiss-ivf", "faiss-hnsw", "milvus"]
Search = Callable[[np.ndarray, int], list[Nearest]]
DEPTHS = (1, 10, 100)
SHOWN = 20  # results of a query whose time is taken
TOGETHER = 32
COLUMNS = {
    "rows": "rows",
    "engine": "engine",
    **{f"picture_recall_{k}": f"pictures R@{k}" for k in DEPTHS},
    **{f"text_recall_{k}": f"texts R@{k}" for k in DEPTHS},
    "median": "median ms",
    "p95": "p95 ms",
    "per_second": "queries/s",
    "together_per_second": f"{TOGETHER} at a time",
    "vectors_megabytes": "vectors MB",
    "engine_megabytes": "engine MB",
    "made": "made s",
    "opened": "opened s",
}


@dataclass(frozen=True)
class Options:
    """Engines beside each other."""

    rows: tuple[int, ...] = (100_000,)
    """Sizes of the index; 1,000,000 of width 512 need about 6 GB of disk and of memory."""
    width: int = 512
    queries: int = 200
    engines: tuple[Name, ...] = ("exact-bf16", "exact-int8", "faiss-ivf", "faiss-hnsw", "milvus")
    """milvus is the embedded milvus-lite, unless --uri names a server."""
    uri: str | None = None
    """Of a server of Milvus."""
    place: Path | None = None
    """Directory for the files; a temporary one when left out."""

    def __post_init__(self) -> None:
        if self.queries < 2:
            raise ValueError(f"queries must be at least 2, half of them pictures and half texts; got {self.queries}")


def run(options: Options) -> Report:
    rows = []
    for count in options.rows:
        with tempfile.TemporaryDirectory(dir=options.place) as directory:
            rows += measure(count, options, Path(directory))
    return Report("search_engines", COLUMNS, rows, machine())


def measure(count: int, options: Options, directory: Path) -> list[dict[str, Any]]:
    """All engines at one size."""
    log.info(f"{count:,} vectors: exact search in float32")
    everything = np.empty((count, options.width), np.float32)
    at = 0
    for block in synthetic_vectors(count, options.width):
        everything[at : at + len(block)] = block
        at += len(block)
    chosen = everything[np.random.default_rng(4).integers(count, size=options.queries)]
    half = options.queries // 2
    pictures, texts = picture_queries(chosen[:half]), text_queries(chosen[half:], count)
    queries = np.concatenate([pictures, texts])
    peer = float32_search(everything)
    right = [near.rows for near in peer(queries, DEPTHS[-1])]
    megabytes = everything.nbytes / 1e6
    rows = [{**_measured(peer, queries, right), "engine": "float32 in memory (peer)", "vectors_megabytes": megabytes}]
    del everything, peer
    for name in options.engines:
        storage: Storage = "int8" if name == "exact-int8" else "bf16"
        path = directory / storage
        if not path.exists():
            log.info(f"{count:,} vectors: the index, {storage}")
            synthetic_index(path, count, options.width, storage=storage)
        engine = "exact" if name.startswith("exact") else name
        log.info(f"{count:,} vectors: {name}")
        with _engine(path, engine, options.uri) as (search, costs):
            rows.append({**_measured(search, queries, right), **costs, "engine": name})
    return [{"rows": count, **row} for row in rows]


def float32_search(vectors: np.ndarray) -> Search:
    """The peer."""
    stored = torch.from_numpy(vectors)

    def search(queries: np.ndarray, k: int) -> list[Nearest]:
        found = (torch.from_numpy(queries) @ stored.T).topk(min(k, len(stored)))  # [Q, k]
        return [Nearest(rows.numpy(), scores.numpy()) for scores, rows in zip(found.values, found.indices)]

    def some_at_a_time(queries: np.ndarray, k: int) -> list[Nearest]:
        parts = (queries[start : start + TOGETHER] for start in range(0, len(queries), TOGETHER))
        return [near for part in parts for near in search(part, k)]

    return some_at_a_time


@contextmanager
def _engine(path: Path, engine: str, uri: str | None) -> Iterator[tuple[Search, dict[str, Any]]]:
    """An engine at work, and what it takes to have it."""
    start = time.perf_counter()
    writer = IndexWriter(path, 1)
    try:
        make_engine(writer, engine, uri)
    finally:
        writer.close()
    made = time.perf_counter() - start
    start = time.perf_counter()
    with Index(path) as index:
        candidates = open_candidates(index, "images", engine)
        try:
            gallery = Gallery(index, "images", candidates)
            opened = time.perf_counter() - start
            files = row_files(index.directory, "images", index.about.width, index.about.storage).files()
            costs = {
                "vectors_megabytes": sum(file.stat().st_size for file, _ in files) / 1e6,
                "engine_megabytes": _size(index.directory / ENGINES, engine) / 1e6,
                "made": made if engine != "exact" else None,
                "opened": opened,
            }
            yield gallery.nearest, costs
        finally:
            if candidates is not None:
                candidates.close()


def _measured(search: Search, queries: np.ndarray, right: list[np.ndarray]) -> dict[str, Any]:
    """Recall and times of one way to search. The first half of the queries are pictures."""
    found = [near.rows for near in search(queries, DEPTHS[-1])]
    half = len(queries) // 2
    shares = {
        f"{what}_recall_{k}": float(np.mean([len(set(a[:k]) & set(b[:k])) / len(b[:k]) for a, b in some]))
        for what, some in (("picture", list(zip(found, right))[:half]), ("text", list(zip(found, right))[half:]))
        for k in DEPTHS
    }
    alone = _timing(search, [query[None] for query in queries])
    together = _timing(search, [queries[start : start + TOGETHER] for start in range(0, len(queries), TOGETHER)])
    return {
        **shares,
        "alone": alone,
        "median": 1000 * alone.median,
        "p95": 1000 * float(np.quantile(alone.seconds, 0.95)),
        "per_second": len(queries) / sum(alone.seconds),
        "together_per_second": len(queries) / sum(together.seconds),
    }


def _timing(search: Search, parts: list[np.ndarray]) -> Timing:
    search(parts[0], SHOWN)
    seconds = []
    for part in parts:
        start = time.perf_counter()
        search(part, SHOWN)
        seconds.append(time.perf_counter() - start)
    return Timing(tuple(seconds))


def _size(directory: Path, engine: str) -> int:
    """Of the files of an engine, in bytes."""
    files = (file for file in directory.rglob("*") if file.is_file() and engine in str(file.relative_to(directory)))
    return sum(file.stat().st_size for file in files)
