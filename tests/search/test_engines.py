"""Engines propose rows and the stored vectors decide: one contract for all of them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import WIDTH, about, image_hash

from hnclip.search import engines
from hnclip.search.database import Kind
from hnclip.search.engines import FaissScan, TorchScan, VectorSearch, open_engine, update_engine
from hnclip.search.reader import IndexReader
from hnclip.search.writer import Change, IndexWriter, NewFile, NewImage, open_writer

COUNT = 1500
DELETED = range(0, COUNT, 7)


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def clusters(count: int, seed: int = 0, width: int = WIDTH) -> np.ndarray:
    """Vectors [N, D] around a common direction, in clusters of families of near-duplicates; some rows are equal."""
    generator = np.random.default_rng(seed)
    mean, centres = generator.standard_normal(width), generator.standard_normal((20, width))
    families = generator.standard_normal((count // 6 + 1, width))
    family = generator.integers(len(families), size=count)
    rows = 0.7 * mean + centres[family % 20] + 0.7 * families[family] + 0.03 * generator.standard_normal((count, width))
    rows[1::10] = rows[:-1:10]
    return unit(rows)


def queries_near(rows: np.ndarray, count: int, seed: int = 1) -> np.ndarray:
    """[Q, D]"""
    generator = np.random.default_rng(seed)
    chosen = rows[generator.integers(len(rows), size=count)]
    return unit(chosen + 0.5 * generator.standard_normal(chosen.shape) / rows.shape[1] ** 0.5)


def add(writer: IndexWriter, rows: np.ndarray, captions: np.ndarray | None = None) -> None:
    """Images behind those that there are, named by their ids, and captions of the first one."""
    first = writer.files["images"].next_id
    texts = {f"caption {number}": vector for number, vector in enumerate(captions if captions is not None else [])}
    writer.commit(
        Change(
            images=[NewImage(image_hash(first + n), row, (1, 1), b"") for n, row in enumerate(rows)],
            captions=texts,
            files=[
                NewFile(str(first + n), image_hash(first + n), "{}", "", tuple(texts) if n == 0 else ())
                for n in range(len(rows))
            ],
        )
    )


def delete(writer: IndexWriter, ids: Sequence[int]) -> None:
    writer.commit(Change(deleted=[str(number) for number in ids]))
    writer.delete_unused()


@contextmanager
def vector_search(path: Path, engine: str, kind: Kind = "images") -> Iterator[VectorSearch]:
    with IndexReader(path) as reader:
        found = open_engine(reader, kind, engine)
        yield VectorSearch(reader, kind, found)
        if close := getattr(found, "close", None):
            close()


def true_scores(some: VectorSearch, query: np.ndarray) -> np.ndarray:
    """[N], of all rows, literally; −∞ for deleted ones."""
    scores = some.vectors.astype(np.float64) @ query.astype(np.float64)
    scores[some.deleted] = -np.inf
    return scores


def recall(some: VectorSearch, queries: np.ndarray, k: int) -> float:
    """The share of the k nearest rows that is found; equal rows stand for each other."""
    shares = []
    for query in queries:
        scores, (rows, _) = true_scores(some, query), some.nearest(query, k)
        shares.append(np.mean(scores[rows] >= np.sort(scores)[-k] - 1e-6))
    return float(np.mean(shares))


@contextmanager
def milvus_server(directory: Path) -> Iterator[str]:
    """milvus-lite as a server in a process of its own; its URI."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "milvus-lite"), "server", "--data-dir", str(directory)]
    with subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + 120
            while _is_closed(port):
                assert server.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def _is_closed(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture(
    scope="module", params=["exact", "faiss-ivf", "faiss-hnsw", pytest.param("milvus", marks=pytest.mark.slow)]
)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def uri(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | None]:
    if engine == "milvus":
        with milvus_server(tmp_path_factory.mktemp("milvus")) as found:
            yield found
    else:
        yield None


@pytest.fixture(scope="module")
def path(engine: str, uri: str | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with its engine and deleted rows, only for reading."""
    place = tmp_path_factory.mktemp("index") / "x.hnc"
    with open_writer(place, about(engine=engine, uri=uri)) as writer:
        add(writer, clusters(COUNT))
        update_engine(writer, "images", engine, uri)
        delete(writer, [row + 1 for row in DELETED])
    return place


@pytest.mark.parametrize("k", [1, 10, 300, 10 * COUNT])
def test_hits_are_those_of_the_stored_vectors(engine: str, path: Path, k: int) -> None:
    with vector_search(path, engine) as some, vector_search(path, "exact") as exact:
        assert (some.engine is None) == (engine == "exact")
        queries = queries_near(some.vectors, 20)
        for query in queries:
            rows, scores = some.nearest(query, k)
            assert len(rows) == len(set(rows.tolist())) == min(k, COUNT - len(DELETED))
            assert not set(rows.tolist()) & set(DELETED)
            assert list(zip(-scores, rows)) == sorted(zip(-scores, rows))  # best first, equal ones by row
            of_row = dict(zip(*exact.nearest(query, COUNT)))
            assert all(score == of_row[row] for row, score in zip(rows, scores))  # to the last bit
        assert recall(some, queries, min(k, COUNT - len(DELETED))) >= (1 if engine == "exact" else 0.97)


def test_an_engine_follows_its_index(
    engine: str, uri: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New rows are found before and after the engine has them, deleted ones never; compaction gives all new numbers."""
    monkeypatch.setattr(engines, "FEW", 100)
    place, rows, captions = tmp_path / "x.hnc", clusters(600, seed=7), clusters(120, seed=8)

    def check(covered: int, deleted: Sequence[int] = ()) -> None:
        with vector_search(place, engine) as some:
            assert (0 if some.engine is None else some.engine.covered) == (0 if engine == "exact" else covered)
            assert set(some.deleted) == set(deleted)
            kept = np.setdiff1d(np.arange(len(some.vectors)), some.deleted)[::9]
            assert recall(some, some.vectors[kept].astype(np.float32), 3) > 0.97

    with open_writer(place, about(engine=engine, uri=uri)) as writer:

        def update() -> None:
            update_engine(writer, "images", engine, uri)

        add(writer, rows[:60], captions)
        update()
        check(0)  # few are scanned
        add(writer, rows[60:300])
        check(0)  # not built yet
        update()
        check(300)
        add(writer, rows[300:400])
        delete(writer, gone := [*range(5, 45), 310])
        check(300, [number - 1 for number in gone])
        update()
        update()  # nothing left to do
        check(400, [number - 1 for number in gone])
        delete(writer, more := list(range(100, 200)))
        assert writer.compact(least=1)
        check(0)
        update()
        add(writer, rows[400:])
        check(400 - len(gone) - len(more))
        update_engine(writer, "captions", engine, uri)
        with vector_search(place, engine, "captions") as some:
            assert recall(some, captions[::10], 1) == 1
        update_engine(writer, "images", "exact")
        with IndexReader(place) as reader:
            assert open_engine(reader, "images", engine) is None  # the index's own engine is not built any more
        assert not list(place.glob("images*.faiss"))


class Told:
    """Proposes what it is told to."""

    def __init__(self, rows: Sequence[int], covered: int) -> None:
        self.rows, self.covered, self.asked = np.array(rows, np.int64), covered, list[int]()

    def propose(self, query: np.ndarray, count: int) -> np.ndarray:
        self.asked.append(count)
        return np.pad(self.rows[:count], (0, max(0, count - len(self.rows))), constant_values=-1)


class Vectors:
    """A reader, as far as a vector_search needs one."""

    def __init__(self, rows: np.ndarray, deleted: Sequence[int]) -> None:
        self.vectors = {"images": rows.astype(np.float16)}
        self.deleted = {"images": np.array(sorted(deleted), np.int64)}


def make_vector_search(rows: np.ndarray, deleted: Sequence[int], engine: Any = None) -> VectorSearch:
    return VectorSearch(Vectors(rows, deleted), "images", engine)  # type: ignore[arg-type]


def test_more_rows_are_asked_for_where_deleted_ones_are_nearest_and_then_all_are_scanned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "FEW", 0)
    rows = clusters(400)
    for told, asked in ((range(300, 400), [64]), (range(400), [64, 400]), (range(300), [64, 400])):
        engine = Told(told, covered=400)
        some = make_vector_search(rows, range(300), engine)
        assert recall(some, rows[310:311], 1) == 1
        assert engine.asked == asked
    recent = Told(range(300), covered=300)  # all that it knows is deleted
    assert recall(make_vector_search(rows, range(300), recent), rows[310:320], 6) == 1


@settings(max_examples=60)
@given(
    seed=st.integers(0, 99),
    count=st.integers(1, 300),
    width=st.sampled_from([1, 3, 24, 33, 128]),
    k=st.integers(1, 350),
    sign=st.sampled_from([1, -1]),
    deleted=st.sampled_from([0.0, 0.3, 0.97, 1.0]),
    scan=st.sampled_from([FaissScan, TorchScan]),
    few=st.sampled_from([0, 100]),
)
def test_the_exact_search_is_that_of_all_scores(
    seed: int, count: int, width: int, k: int, sign: int, deleted: float, scan: Any, few: int
) -> None:
    generator = np.random.default_rng(seed)
    rows = clusters(count, seed, width)
    gone = np.flatnonzero(generator.random(count) < deleted).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "FEW", few)
        patch.setattr(engines, "_SCANNED", 37)
        patch.setattr(engines, "exact_scan", scan)
        some, query = make_vector_search(rows, gone), sign * queries_near(rows, 1, seed)[0]
        found, scores = some.nearest(query, k)
    expected = np.sort(true_scores(some, query))[::-1][: min(k, count - len(gone))]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert not set(found.tolist()) & set(gone)


def test_what_cannot_be_searched_with_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "FEW", 100)
    place = tmp_path / "x.hnc"
    with open_writer(place, about(engine="faiss-ivf")) as writer:
        add(writer, clusters(120))
        with pytest.raises(ValueError, match="annoy"):
            update_engine(writer, "images", "annoy")
        with pytest.raises(ValueError, match="--uri"):
            update_engine(writer, "images", "milvus")
        for package, name in (("faiss", "faiss-ivf"), ("pymilvus", "milvus")):
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, package, None)
                with pytest.raises(ValueError, match="pip install"):
                    update_engine(writer, "images", name, "http://127.0.0.1:1")
        update_engine(writer, "images", "faiss-ivf")
        with (
            IndexReader(place) as reader,
            pytest.raises(ValueError, match=r"(?s)has no .*--engine faiss-hnsw"),
        ):
            open_engine(reader, "images", "faiss-hnsw")
        (file,) = place.glob("*.faiss")
        content = file.read_bytes()
        for damaged in (content[:-1], bytes(len(content)), None):
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            with IndexReader(place) as reader, pytest.raises(ValueError, match=r"(?s)\.faiss.*--engine faiss-ivf"):
                open_engine(reader, "images", "faiss-ivf")
        update_engine(writer, "images", "faiss-ivf")
    with vector_search(place, "faiss-ivf") as some:
        assert recall(some, clusters(120)[::5], 3) > 0.97


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    uri = "http://127.0.0.1:1"
    with open_writer(tmp_path / "x.hnc", about(engine="milvus", uri=uri)) as writer:
        add(writer, clusters(COUNT))
        with pytest.raises(OSError, match=r"127\.0\.0\.1:1"):
            update_engine(writer, "images", "milvus", uri)
