"""The benchmark of engines, on few vectors, and the index that benchmarks make up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hnclip.bench import DIRECTORY, open_benchmark
from hnclip.search.engines.gallery import Gallery, Nearest
from hnclip.search.index.changes import Change
from hnclip.search.index.layout import Storage
from hnclip.search.index.opening import open_writer
from hnclip.search.index.reader import Index


@pytest.fixture(scope="module")
def bench() -> Any:
    return open_benchmark("search_engines")


@pytest.fixture(scope="module")
def synthetic(bench: Any) -> Any:
    assert str(DIRECTORY) in sys.path
    return sys.modules["synthetic_index"]


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_a_synthetic_index_is_a_whole_one(synthetic: Any, storage: Storage, tmp_path: Path) -> None:
    path = tmp_path / "made-up.hnc"
    synthetic.synthetic_index(path, 203, 40, storage=storage)
    with open_writer(path, None) as writer:  # type: ignore[arg-type]
        writer.commit(Change(gone=["000000007.jpg"]))  # it can be gone on with
    vectors = np.concatenate(list(synthetic.synthetic_vectors(203, 40)))
    with Index(path) as index:
        assert (index.count(), len(index.vectors("images")), index.about.storage) == (202, 203, storage)
        assert np.abs(index.vectors("images").rows(slice(0, None)) - vectors).max() < 0.01
        (item,) = index.items([5])[5]
        assert (item.name, item.shape) == ("000000005.jpg", (64, 48))
        assert index.thumbnail(5) == index.thumbnail(200)
        assert index.thumbnail(5).startswith(b"\xff\xd8")
        (near,) = Gallery(index, "images").nearest(vectors[7:8], 10)
        assert 7 not in near.rows
        assert {*range(8)} - {7} <= set(near.rows)  # its near-twins


def test_synthetic_vectors_are_families_around_a_direction(synthetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "BLOCK", 800)
    vectors = np.concatenate(list(synthetic.synthetic_vectors(2000, 256)))
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.array_equal(vectors, np.concatenate(list(synthetic.synthetic_vectors(2000, 256))))
    twins = (vectors[::8] * vectors[1::8]).sum(1)
    assert (twins > 0.95).all()
    strangers = vectors[:800:8] @ vectors[800::8].T
    assert 0.3 < np.median(strangers) < 0.6
    near = (synthetic.picture_queries(vectors[:50]) * vectors[:50]).sum(1)
    texts = synthetic.text_queries(vectors[:50], 2000)
    described = texts @ vectors.T
    assert near.min() > 0.9
    assert described.max() < 0.6
    assert (described.argmax(1) // 8 == np.arange(50) // 8).mean() > 0.9  # the family that is described


def test_recall_and_times(bench: Any) -> None:
    """Of a search that finds every second row, and the first of them in time."""
    right = [np.arange(100) for _ in range(4)]
    queries = np.zeros((4, 2), np.float32)

    def search(some: np.ndarray, k: int) -> list[Nearest]:
        return [Nearest(2 * np.arange(k), np.zeros(k)) for _ in some]

    row = bench._measured(search, queries, right)
    assert [row[f"picture_recall_{k}"] for k in (1, 10, 100)] == [1, 0.5, 0.5]
    assert len(row["alone"].seconds) == 4
    assert row["per_second"] == pytest.approx(4 / sum(row["alone"].seconds))
    assert row["median"] <= row["p95"]


def test_both_kinds_of_queries_are_asked(bench: Any) -> None:
    bench.Options(queries=2)
    with pytest.raises(ValueError, match="queries must be at least 2, half of them pictures and half texts; got 1"):
        bench.Options(queries=1)


def test_every_engine_is_measured(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 100)
    caplog.set_level("INFO", logger="hnclip")
    options = bench.Options(rows=(400,), width=32, queries=10, place=tmp_path)
    rows = {row["engine"]: row for row in bench.run(options).to_dict()["rows"]}
    assert list(rows) == ["float32 in memory (peer)", *options.engines]
    assert rows["float32 in memory (peer)"]["text_recall_100"] == 1
    assert all(row["picture_recall_10"] > 0.9 for row in rows.values())
    assert rows["exact-bf16"]["vectors_megabytes"] == pytest.approx(400 * (32 + 2 + 64) / 1e6)
    assert rows["exact-int8"]["vectors_megabytes"] == pytest.approx(400 * (32 + 2) / 1e6)
    assert rows["exact-int8"]["engine_megabytes"] == 0
    for engine in ("faiss-ivf", "faiss-hnsw", "milvus"):
        assert rows[engine]["engine_megabytes"] > 400 * 32 / 1e6
        assert rows[engine]["made"] > 0
    assert rows["exact-bf16"]["made"] is None
    assert "400 vectors: milvus" in caplog.messages
    assert list(tmp_path.iterdir()) == []
