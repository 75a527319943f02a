"""Engines propose rows, and the stored vectors decide: all engines pass the same tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import WIDTH, about, image_hash

from hnclip.search import engines
from hnclip.search.engines import FaissScan, TorchScan, VectorSearch, open_engine, update_engine
from hnclip.search.reader import IndexReader
from hnclip.search.writer import Change, IndexWriter, NewFile, NewImage, open_writer


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def clusters(count: int, seed: int = 0, width: int = WIDTH) -> np.ndarray:
    """Vectors [N, D] in clusters, around a common direction; some rows are equal."""
    generator = np.random.default_rng(seed)
    families = generator.standard_normal(width) + generator.standard_normal((count // 6 + 1, width))
    rows = families[generator.integers(len(families), size=count)] + 0.1 * generator.standard_normal((count, width))
    rows[1::10] = rows[:-1:10]
    return unit(rows)


def add(writer: IndexWriter, rows: np.ndarray) -> None:
    """Images behind those that there are, named by their ids."""
    numbered = list(enumerate(rows, writer.files["images"].next_id))
    images = [NewImage(image_hash(number), row, (1, 1), b"") for number, row in numbered]
    writer.commit(Change(images, files=[NewFile(str(number), image_hash(number), "{}", "") for number, _ in numbered]))


def delete(writer: IndexWriter, ids: Sequence[int]) -> None:
    writer.finish([str(number) for number in ids], {})


def true_scores(search: VectorSearch, query: np.ndarray) -> np.ndarray:
    """[N], of all rows, literally; −∞ for deleted ones."""
    scores = search.vectors.astype(np.float64) @ query.astype(np.float64)
    scores[search.deleted] = -np.inf
    return scores


def check_engine(path: Path, engine: str, covered: int) -> None:
    """The hits of an engine that knows so many rows have the scores of an exact search, and nearly all are its hits."""
    with IndexReader(path) as reader:
        found = open_engine(reader, "images", engine)
        search, exact = VectorSearch(reader, "images", found), VectorSearch(reader, "images")
        assert (0 if found is None else found.covered) == (0 if engine == "exact" else covered)
        living = np.setdiff1d(np.arange(len(search.vectors)), search.deleted)
        shares = []
        for query in search.vectors[living[::25]].astype(np.float32):
            for k in (1, 5, 10_000):
                rows, scores = search.nearest(query, k)
                assert len(rows) == len(set(rows.tolist())) == min(k, len(living))
                assert not set(rows.tolist()) & set(search.deleted.tolist())
                assert list(zip(-scores, rows)) == sorted(zip(-scores, rows))  # best first, equal ones by row
                score_of = dict(zip(*exact.nearest(query, 10_000)))
                assert all(score == score_of[row] for row, score in zip(rows, scores))  # to the last bit
                true = true_scores(search, query)
                shares.append(np.mean(true[rows] >= np.sort(true)[-len(rows)] - 1e-6))
        assert np.mean(shares) > 0.97
        if close := getattr(found, "close", None):
            close()


@pytest.mark.parametrize("engine", ["exact", "faiss-ivf", "faiss-hnsw", pytest.param("milvus", marks=pytest.mark.slow)])
def test_an_engine_follows_its_index(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New rows are found before and after the engine has them, deleted ones never; compaction gives all new numbers."""
    monkeypatch.setattr(engines, "FEW", 100)
    place, rows = tmp_path / "x.hnc", clusters(600, seed=7)
    uri = str(tmp_path / "milvus.db") if engine == "milvus" else None  # a file of milvus-lite
    with open_writer(place, about(engine=engine, uri=uri)) as writer:

        def update() -> None:
            update_engine(writer, "images", engine, uri)

        add(writer, rows[:60])
        update()
        check_engine(place, engine, 0)  # few are scanned
        add(writer, rows[60:300])
        check_engine(place, engine, 0)  # not built yet
        update()
        check_engine(place, engine, 300)
        add(writer, rows[300:400])
        delete(writer, [*range(5, 45), 310])
        check_engine(place, engine, 300)
        update()
        check_engine(place, engine, 400)
        delete(writer, range(100, 200))
        assert writer.compact(least=1)
        check_engine(place, engine, 0)
        update()
        add(writer, rows[400:])
        check_engine(place, engine, 400 - 41 - 100)
        update_engine(writer, "images", "exact")
        check_engine(place, engine, 0)  # it is not built any more
        assert not list(place.glob("images*.faiss"))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 99),
    count=st.integers(1, 300),
    width=st.sampled_from([1, 3, 24, 33, 128]),
    k=st.integers(1, 350),
    deleted=st.sampled_from([0.0, 0.3, 0.97, 1.0]),
    scan=st.sampled_from([FaissScan, TorchScan]),
    few=st.sampled_from([0, 100]),
)
def test_exact_search_equals_all_scores(
    seed: int, count: int, width: int, k: int, deleted: float, scan: Any, few: int
) -> None:
    random = np.random.default_rng(seed)
    vectors, gone = clusters(count, seed, width).astype(np.float16), np.flatnonzero(random.random(count) < deleted)
    query = unit(random.standard_normal(width))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("FEW", few), ("_SCANNED", 37), ("exact_scan", scan)):
            patch.setattr(engines, name, value)
        reader: Any = SimpleNamespace(vectors={"images": vectors}, deleted={"images": gone})
        search = VectorSearch(reader, "images")
        found, scores = search.nearest(query, k)
    expected = np.sort(true_scores(search, query))[::-1][: min(k, count - len(gone))]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert not set(found.tolist()) & set(gone.tolist())


def test_a_missing_package_or_server_and_a_damaged_engine_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "FEW", 100)
    path = tmp_path / "x.hnc"
    with open_writer(path, about(engine="faiss-ivf")) as writer:
        add(writer, clusters(120))
        with pytest.raises(OSError, match=r"127\.0\.0\.1:1"):
            update_engine(writer, "images", "milvus", "http://127.0.0.1:1")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "faiss", None)
            with pytest.raises(ValueError, match="pip install"):
                update_engine(writer, "images", "faiss-ivf")
        update_engine(writer, "images", "faiss-ivf")
        (file,) = path.glob("*.faiss")
        for damaged in (bytes(file.stat().st_size), file.read_bytes()[:-1]):
            file.unlink()
            file.write_bytes(damaged)
            with IndexReader(path) as reader, pytest.raises(ValueError, match=r"(?s)\.faiss.*--engine faiss-ivf"):
                open_engine(reader, "images", "faiss-ivf")
        update_engine(writer, "images", "faiss-ivf")
    check_engine(path, "faiss-ivf", 120)
