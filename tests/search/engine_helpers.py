"""Indexes of given vectors, for tests of engines."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hnclip.search.engines import Candidates
from hnclip.search.engines.gallery import Gallery, Nearest
from hnclip.search.engines.open import open_candidates
from hnclip.search.index.catalogue import content_hash
from hnclip.search.index.changes import Change, NewItem, NewPicture
from hnclip.search.index.layout import About, Storage
from hnclip.search.index.opening import open_writer
from hnclip.search.index.reader import Index
from hnclip.search.index.writer import IndexWriter

WIDTH = 32


def about(engine: str = "exact", storage: Storage = "bf16", uri: str | None = None) -> About:
    return About(
        model="none",
        source="none",
        fingerprint="none",
        opening={},
        width=WIDTH,
        storage=storage,
        patches=0,
        data="made up",
        root=None,
        engine=engine,
        uri=uri,
    )


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def clusters(count: int, seed: int = 0) -> np.ndarray:
    """Vectors [N, D] around a common direction, in clusters of families of near-twins; some rows are equal."""
    generator = np.random.default_rng(seed)
    mean, centres = generator.standard_normal(WIDTH), generator.standard_normal((20, WIDTH))
    families = generator.standard_normal((count // 6 + 1, WIDTH))
    family = generator.integers(len(families), size=count)
    rows = 0.7 * mean + centres[family % 20] + 0.7 * families[family] + 0.03 * generator.standard_normal((count, WIDTH))
    rows[1::10] = rows[:-1:10]
    return unit(rows)


def asked(rows: np.ndarray, count: int, seed: int = 1) -> np.ndarray:
    """Queries [Q, D] near some rows."""
    generator = np.random.default_rng(seed)
    chosen = rows[generator.integers(len(rows), size=count)]
    return unit(chosen + 0.5 * generator.standard_normal(chosen.shape) / WIDTH**0.5)


@contextmanager
def writing(path: Path, engine: str = "exact", storage: Storage = "bf16") -> Iterator[IndexWriter]:
    with open_writer(path, about(engine, storage)) as writer:
        yield writer


def add(writer: IndexWriter, rows: np.ndarray, captions: Sequence[np.ndarray] = ()) -> None:
    """Pictures behind those that are there, named by their rows."""
    names = [_name(writer, writer.state.images + number) for number in range(len(rows))]
    texts = {f"{writer.state.captions + number}": vector for number, vector in enumerate(captions)}
    contents = [content_hash(name.encode()) for name in names]
    pictures = [NewPicture(content, row, (4, 3), b"small") for content, row in zip(contents, rows)]
    items = [NewItem(name, content, "{}", "") for name, content in zip(names, contents)]
    if texts:
        items[0] = NewItem(names[0], contents[0], "{}", "", tuple(texts))
    writer.commit(Change(pictures=pictures, captions=texts, items=items))


def remove(writer: IndexWriter, rows: Sequence[int]) -> None:
    writer.commit(Change(gone=[_name(writer, row) for row in rows]))


def _name(writer: IndexWriter, row: int) -> str:
    return f"{writer.generation}.{row}"  # a new generation numbers the rows anew


@contextmanager
def gallery(path: Path, engine: str, kind: str = "images") -> Iterator[Gallery]:
    with Index(path) as index:
        candidates: Candidates | None = open_candidates(index, kind, engine)  # type: ignore[arg-type]
        try:
            yield Gallery(index, kind, candidates)  # type: ignore[arg-type]
        finally:
            if candidates is not None:
                candidates.close()


def truth(stored: np.ndarray, query: np.ndarray, k: int, dead: Sequence[int] = ()) -> np.ndarray:
    """The k nearest rows by all scores, literally."""
    scores = stored.astype(np.float64) @ query.astype(np.float64)
    scores[list(dead)] = -np.inf
    return np.argsort(-scores, kind="stable")[: min(k, len(stored) - len(dead))]


def recall(
    found: Sequence[Nearest], stored: np.ndarray, queries: np.ndarray, k: int, dead: Sequence[int] = ()
) -> float:
    """The share of the true k nearest that was found; equal rows stand for each other."""
    shares = []
    for near, query in zip(found, queries):
        expected = truth(stored, query, k, dead)
        worst = (stored[expected[-1]].astype(np.float64) @ query) - 1e-6
        shares.append(sum(stored[row].astype(np.float64) @ query >= worst for row in near.rows) / len(expected))
    return float(np.mean(shares))


@contextmanager
def milvus_server(place: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of Milvus in a process of its own, and its URI."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "milvus-lite"), "server", "--data-dir", str(place / "data")]
    with (place / "log").open("w") as log:
        server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        while _closed(port) and time.monotonic() < until:
            assert server.poll() is None, (place / "log").read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.kill()
        server.wait()


def _closed(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0
