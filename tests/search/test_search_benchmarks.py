"""The benchmarks of search run at a tiny size and give finite numbers; none of these tests depends on how large they
are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hnclip.bench import open_benchmark, run_benchmark
from hnclip.search.reader import IndexReader


def bench(name: str, arguments: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of a benchmark, all of whose columns `keys` are finite."""
    rows = json.loads(run_benchmark(name, [*arguments.split(), "--json"]))["rows"]
    for row in rows:
        for key in keys:
            found = row[key]["median"] if isinstance(row[key], dict) else row[key]
            assert found is not None, f"{key} of {row}"
            assert math.isfinite(found)
    return rows


def test_search_engines() -> None:
    rows = bench("search_engines", "--rows 1500 --width 16 --queries 12", ("median", "p95", "ratio"))
    assert [row["way"].split()[0] for row in rows] == ["float32", "faiss", "exact", "faiss-ivf", "faiss-hnsw"]
    for row in rows:
        recalls = [value for key, value in row.items() if "recall" in key]
        assert len(recalls) == 4
        assert min(recalls) > 0.8
    assert [row["ratio"]["median"] for row in rows[:2]] == [pytest.approx(rows[0]["ratio"]["median"]), 1]
    assert {row["way"] for row in rows if row.get("megabytes")} == {"faiss-ivf", "faiss-hnsw"}


@pytest.mark.parametrize("arguments", ["--rows 50 --engines faiss-ivf", "--engines milvus", "--queries 1"])
def test_search_engines_refuses_what_it_cannot_measure(arguments: str) -> None:
    with pytest.raises((ValueError, SystemExit)):
        run_benchmark("search_engines", arguments.split())


def test_recall_is_the_share_of_the_nearest_rows() -> None:
    right = [np.arange(20), np.arange(20)]
    found = [np.arange(20), np.arange(5, 25)]  # the text query finds the second half of the best 10
    recalls = open_benchmark("search_engines").recalls(found, right)
    assert [recalls[f"image_recall_{k}"] for k in (1, 10)] == [1, 1]
    assert [recalls[f"text_recall_{k}"] for k in (1, 10)] == [0, 0.5]


def test_synthetic_index(tmp_path: Path) -> None:
    module = open_benchmark("search_engines")
    module.synthetic_index(tmp_path / "x.hnc", 20_000, 8, captions=("one", "two", "three"))
    with IndexReader(tmp_path / "x.hnc") as reader:
        assert (reader.count("images"), reader.count("captions")) == (20_000, 3)
        vectors = np.concatenate([*module.synthetic_vectors(20_000, 8)])
        assert np.array_equal(reader.vectors["images"], vectors.astype(np.float16))
        assert [file.captions for file in reader.files_of([1, 2, 3])[2]] == [("two",)]


def test_indexing() -> None:
    arguments = "--images 6 --layers 1 --width 64 --batch 4 --turns 1 --threads 1"
    encoder, index, again = bench("indexing", arguments, ("images",))
    assert index["share"]["median"] == pytest.approx(encoder["seconds"]["median"] / index["seconds"]["median"])
    assert again["share"] is None


def test_serving() -> None:
    rows = bench("serving", "--rows 40 --clients 3 --seconds 3 --images 2 --k 3", ("answers", "p50", "p99", "first"))
    assert [(row["kind"], row["failed"]) for row in rows] == [("text", 0), ("image", 0)]
    assert all(row["answers"] > 0 for row in rows)


def test_cold_search() -> None:
    _, onnx, torch = bench("cold_search", "--images 6 --turns 1", ("seconds", "share"))
    assert (onnx["imported"], torch["imported"]) == ("neither", "torch, transformers")
    assert onnx["same_hits"]
    assert onnx["difference"] < 1e-4
