"""`hnclip bench reranking`: orders against literal loops, a small setting, and what is said about many rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hnclip.bench import open_benchmark
from hnclip.search.explain import WEIGHT

MODULE = open_benchmark("reranking")


def test_orders_are_the_literal_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    cosines = torch.rand(3, generator=generator)
    words, patches = torch.randn(5, 7, generator=generator), torch.randn(3, 4, 7, generator=generator)
    found = MODULE.orders(cosines, words, patches, (0.5, 2.0))
    by_words = ["cosine + 0.5·words", "cosine + 2·words", "words"]
    assert list(found) == ["cosine", *by_words, *(name.replace("words", "patches") for name in by_words)]
    for number, image in enumerate(patches):
        of_words = sum(max(float(word @ patch) for patch in image) for word in words) / 5
        of_patches = sum(max(float(word @ patch) for word in words) for patch in image) / 4
        assert float(found["words"][number]) == pytest.approx(of_words, abs=1e-5)
        assert float(found["patches"][number]) == pytest.approx(of_patches, abs=1e-5)
        expected = float(cosines[number]) + 2 * of_patches
        assert float(found["cosine + 2·patches"][number]) == pytest.approx(expected, abs=1e-5)


def test_one_setting() -> None:
    options = MODULE.Options(data=("scenes/park",), weights=(0.1,), limit=8, most=5, device="cpu")
    report = json.loads(json.dumps(MODULE.run(options).to_dict(), allow_nan=False))
    rows = {row["order"]: row for row in report["rows"]}
    assert list(rows) == ["cosine", "cosine + 0.1·words", "words", "cosine + 0.1·patches", "patches"]
    for name, row in rows.items():
        assert 0 <= row["test"] <= 100
        if name != "cosine":
            assert row["change"] == pytest.approx(row["test"] - rows["cosine"]["test"])
            assert row["low"] <= row["change"] <= row["high"]
    assert 100 / 8 < rows["cosine"]["test"] < 100
    assert len(report["notes"]) == 1


def test_a_single_image_cannot_be_ordered() -> None:
    options = MODULE.Options(data=("scenes/shelf",), weights=(5.0,), limit=8, most=1, device="cpu")
    assert len({row["test"] for row in MODULE.run(options).rows}) == 1


def test_the_order_is_chosen_on_the_validation_splits() -> None:
    def row(order: str, validation: float, low: float, data: str) -> dict[str, Any]:
        return {"data": data, "order": order, "validation": validation, "low": low}

    rows = [row("cosine", 50, 0, "a"), row("cosine", 40, 0, "b"), row("words", 49, -1, "a"), row("words", 41, 1, "b")]
    assert "no re-ranking" in MODULE.best_order(rows)
    better = MODULE.best_order([*rows, row("both", 51, -1, "a"), row("both", 40, 1, "b")])
    assert ": both;" in better
    assert "1 of 2" in better


def test_the_weight_of_search_is_measured() -> None:
    weights = MODULE.Options().weights
    assert min(weights) < WEIGHT < max(weights)  # so that it can be seen to be too large, or too small
    assert WEIGHT in weights
