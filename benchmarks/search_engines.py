"""Recall and time per query of the search engines against faiss's flat float16 index and exact search in float32.

The vectors are made up (benchmarks/synthetic_index.py). Half of the queries are near images, half are as far from all
of them as descriptions are. For each query all ways run one after the other, in rotating order, so none finds its data
in the CPU's caches. `×` is the median ratio to `faiss.IndexScalarQuantizer(QT_fp16)` for the same query. Recall is the
share of the nearest rows of exact search in float32.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from synthetic_index import image_queries, synthetic_index, synthetic_vectors, text_queries

from hnclip.measure import Report, Timing, machine, threads
from hnclip.search.database import EngineName
from hnclip.search.engines import VectorSearch, open_engine, update_engine
from hnclip.search.reader import IndexReader
from hnclip.search.writer import open_writer

log = logging.getLogger("hnclip.bench")

Search = Callable[[np.ndarray], np.ndarray]
"""The nearest rows [K] to a query [D]."""

K = 20
DEPTHS = (1, 10)
FLOAT32, FLOAT16 = "float32 in memory (peer)", "faiss flat fp16 (peer)"
COLUMNS = {
    "way": "engine",
    **{f"{what}_recall_{k}": f"{what} R@{k}" for what in ("image", "text") for k in DEPTHS},
    "median": "median ms",
    "p95": "p95 ms",
    "ratio": "× faiss flat fp16",
    "built": "build s",
    "megabytes": "engine MB",
}


@dataclass(frozen=True)
class Options:
    """Recall and speed of the search engines."""

    rows: int = 100_000
    """Of the index; 1,000,000 of width 512 need about 8 GB of memory and 3 GB of disk."""
    width: int = 512
    queries: int = 200
    engines: tuple[EngineName, ...] = ("exact", "faiss-ivf", "faiss-hnsw")
    """milvus requires --uri."""
    uri: str | None = None
    """Of a server of Milvus, or a file of milvus-lite."""
    threads: int = 1
    """Of faiss and torch."""

    def __post_init__(self) -> None:
        if self.queries < 2:
            raise ValueError(f"queries must be at least 2, half of them images and half texts; got {self.queries}")
        if "milvus" in self.engines and self.uri is None:
            raise ValueError("milvus requires --uri")


def run(options: Options) -> Report:
    import faiss

    faiss.omp_set_num_threads(options.threads)
    vectors = np.concatenate([*synthetic_vectors(options.rows, options.width)])  # [N, D]
    chosen = vectors[np.random.default_rng(4).integers(len(vectors), size=options.queries)]  # [Q, D]
    half = options.queries // 2
    queries = np.concatenate([image_queries(chosen[:half]), text_queries(chosen[half:], len(vectors))])  # [Q, D]
    ways: dict[str, Search] = {FLOAT32: float32_search(vectors), FLOAT16: float16_search(vectors)}
    costs: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as place, ExitStack() as opened, threads(options.threads):
        log.info(f"writing an index of {options.rows:,} rows")
        index = Path(place) / "made-up.hnc"
        synthetic_index(index, options.rows, options.width)
        for name in options.engines:
            log.info(f"opening {name}")
            ways[name], costs[name] = engine_search(index, name, options.uri, opened)
        log.info(f"{options.queries} queries")
        found, taken = ask(ways, queries)
        about = {**machine(), "rows": options.rows, "width": options.width}
    rows = [
        {
            "way": name,
            **recalls(found[name], found[FLOAT32]),
            "median": 1000 * taken[name].median,
            "p95": 1000 * float(np.quantile(taken[name].seconds, 0.95)),
            "ratio": taken[name].ratios(taken[FLOAT16]),
            "seconds": taken[name],
            **costs.get(name, {}),
        }
        for name in ways
    ]
    return Report("search_engines", COLUMNS, rows, about)


def float32_search(vectors: np.ndarray) -> Search:
    stored = torch.from_numpy(vectors)  # [N, D]
    return lambda query: torch.mv(stored, torch.from_numpy(query)).topk(min(K, len(stored))).indices.numpy()


def float16_search(vectors: np.ndarray) -> Search:
    import faiss

    index = faiss.IndexScalarQuantizer(vectors.shape[1], faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
    index.add(vectors)
    return lambda query: index.search(query[None], min(K, len(vectors)))[1][0]


def engine_search(index: Path, name: EngineName, uri: str | None, opened: ExitStack) -> tuple[Search, dict[str, float]]:
    """Build an engine of an index and open it. Its file stays mapped when that of the next engine replaces it."""
    with IndexReader(index) as reader:
        about = reader.about
    with open_writer(index, about) as writer:
        writer.set_about(replace(about, engine=name, uri=uri if name == "milvus" else None))
        start = time.perf_counter()
        update_engine(writer, "images", name, uri)
        built = time.perf_counter() - start
    reader = opened.enter_context(IndexReader(index))
    engine = open_engine(reader, "images", name)
    if engine is None and name != "exact":
        raise ValueError(f"{name} is not built for so few rows: raise --rows")
    if close := getattr(engine, "close", None):
        opened.callback(close)
    vector_search = VectorSearch(reader, "images", engine)
    size = sum(file.stat().st_size for file in index.glob("images-*.faiss"))
    return lambda query: vector_search.nearest(query, K)[0], {"built": built, "megabytes": size / 1e6} if engine else {}


def ask(ways: dict[str, Search], queries: np.ndarray) -> tuple[dict[str, list[np.ndarray]], dict[str, Timing]]:
    """The rows that each way finds for each query [Q, D], and the seconds that it takes."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in ways}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for name in names:
        ways[name](queries[-1])  # the first call allocates
    for turn, query in enumerate(queries):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            rows = ways[name](query)
            taken[name].append(time.perf_counter() - start)
            found[name].append(rows)
    return found, {name: Timing(tuple(seconds)) for name, seconds in taken.items()}


def recalls(found: list[np.ndarray], right: list[np.ndarray]) -> dict[str, float]:
    """Recall at each depth; the first half of the queries are images."""
    half = len(found) // 2
    parts = {"image": slice(half), "text": slice(half, None)}
    return {
        f"{what}_recall_{k}": float(np.mean([np.isin(b[:k], a[:k]).mean() for a, b in zip(found[part], right[part])]))
        for what, part in parts.items()
        for k in DEPTHS
    }
