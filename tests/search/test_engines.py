"""Engines propose rows, and the stored vectors decide: all engines pass the same tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
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
    """Queries [Q, D] near some rows."""
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


def true_scores(search: VectorSearch, query: np.ndarray) -> np.ndarray:
    """[N], of all rows, literally; −∞ for deleted ones."""
    scores = search.vectors.astype(np.float64) @ query.astype(np.float64)
    scores[search.deleted] = -np.inf
    return scores


def recall(search: VectorSearch, queries: np.ndarray, k: int) -> float:
    """The share of the k nearest rows that is found; equal rows stand for each other."""
    shares = []
    for query in queries:
        scores, (rows, _) = true_scores(search, query), search.nearest(query, k)
        shares.append(np.mean(scores[rows] >= np.sort(scores)[-k] - 1e-6))
    return float(np.mean(shares))


@pytest.fixture(
    scope="module", params=["exact", "faiss-ivf", "faiss-hnsw", pytest.param("milvus", marks=pytest.mark.slow)]
)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def uri(engine: str, tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """A file of milvus-lite."""
    return str(tmp_path_factory.mktemp("milvus") / "milvus.db") if engine == "milvus" else None


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
    with vector_search(path, engine) as search, vector_search(path, "exact") as exact:
        assert (search.engine is None) == (engine == "exact")
        queries = queries_near(search.vectors, 20)
        for query in queries:
            rows, scores = search.nearest(query, k)
            assert len(rows) == len(set(rows.tolist())) == min(k, COUNT - len(DELETED))
            assert not set(rows.tolist()) & set(DELETED)
            assert list(zip(-scores, rows)) == sorted(zip(-scores, rows))  # best first, equal ones by row
            score_of = dict(zip(*exact.nearest(query, COUNT)))
            assert all(score == score_of[row] for row, score in zip(rows, scores))  # to the last bit
        assert recall(search, queries, min(k, COUNT - len(DELETED))) >= (1 if engine == "exact" else 0.97)


def test_an_engine_follows_its_index(
    engine: str, uri: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New rows are found before and after the engine has them, deleted ones never; compaction gives all new numbers."""
    monkeypatch.setattr(engines, "FEW", 100)
    place, rows, captions = tmp_path / "x.hnc", clusters(600, seed=7), clusters(120, seed=8)

    def check(covered: int, deleted: Sequence[int] = ()) -> None:
        with vector_search(place, engine) as search:
            assert (0 if search.engine is None else search.engine.covered) == (0 if engine == "exact" else covered)
            assert set(search.deleted) == set(deleted)
            kept = np.setdiff1d(np.arange(len(search.vectors)), search.deleted)[::9]
            assert recall(search, search.vectors[kept].astype(np.float32), 3) > 0.97

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
        with vector_search(place, engine, "captions") as search:
            assert recall(search, captions[::10], 1) == 1
        update_engine(writer, "images", "exact")
        with IndexReader(place) as reader:
            assert open_engine(reader, "images", engine) is None  # the index's own engine is not built any more
        assert not list(place.glob("images*.faiss"))


class FixedEngine:
    """Proposes the same rows for every query."""

    def __init__(self, rows: Sequence[int], covered: int) -> None:
        self.rows, self.covered, self.counts = np.array(rows, np.int64), covered, list[int]()

    def propose(self, query: np.ndarray, count: int) -> np.ndarray:
        self.counts.append(count)
        return np.pad(self.rows[:count], (0, max(0, count - len(self.rows))), constant_values=-1)


def make_vector_search(rows: np.ndarray, deleted: Sequence[int], engine: Any = None) -> VectorSearch:
    reader: Any = SimpleNamespace(
        vectors={"images": rows.astype(np.float16)}, deleted={"images": np.array(sorted(deleted), np.int64)}
    )
    return VectorSearch(reader, "images", engine)


def test_more_rows_are_proposed_if_deleted_ones_are_nearest_and_then_all_are_scanned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "FEW", 0)
    rows = clusters(400)
    for proposed, counts in ((range(300, 400), [64]), (range(400), [64, 400]), (range(300), [64, 400])):
        engine = FixedEngine(proposed, covered=400)
        assert recall(make_vector_search(rows, range(300), engine), rows[310:311], 1) == 1
        assert engine.counts == counts
    recent = FixedEngine(range(300), covered=300)  # all rows that it has are deleted
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
def test_exact_search_equals_all_scores(
    seed: int, count: int, width: int, k: int, sign: int, deleted: float, scan: Any, few: int
) -> None:
    rows = clusters(count, seed, width)
    gone = np.flatnonzero(np.random.default_rng(seed).random(count) < deleted).tolist()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("FEW", few), ("_SCANNED", 37), ("exact_scan", scan)):
            patch.setattr(engines, name, value)
        search, query = make_vector_search(rows, gone), sign * queries_near(rows, 1, seed)[0]
        found, scores = search.nearest(query, k)
    expected = np.sort(true_scores(search, query))[::-1][: min(k, count - len(gone))]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert not set(found.tolist()) & set(gone)


def test_a_missing_package_and_a_damaged_engine_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "FEW", 100)
    path = tmp_path / "x.hnc"
    with open_writer(path, about(engine="faiss-ivf")) as writer:
        add(writer, clusters(120))
        for package, name in (("faiss", "faiss-ivf"), ("pymilvus", "milvus")):
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, package, None)
                with pytest.raises(ValueError, match="pip install"):
                    update_engine(writer, "images", name, "http://127.0.0.1:1")
        update_engine(writer, "images", "faiss-ivf")
        (file,) = path.glob("*.faiss")
        content = file.read_bytes()
        for damaged in (content[:-1], bytes(len(content)), None):
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            with IndexReader(path) as reader, pytest.raises(ValueError, match=r"(?s)\.faiss.*--engine faiss-ivf"):
                open_engine(reader, "images", "faiss-ivf")
        update_engine(writer, "images", "faiss-ivf")
    with vector_search(path, "faiss-ivf") as search:
        assert recall(search, clusters(120)[::5], 3) > 0.97


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    uri = "http://127.0.0.1:1"
    with open_writer(tmp_path / "x.hnc", about(engine="milvus", uri=uri)) as writer:
        add(writer, clusters(COUNT))
        with pytest.raises(OSError, match=r"127\.0\.0\.1:1"):
            update_engine(writer, "images", "milvus", uri)
