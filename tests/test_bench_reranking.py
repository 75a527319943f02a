"""`hnclip bench reranking`: literal orders, a small setting from the pictures to the row, and what is said of many."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hnclip.bench import open_benchmark
from hnclip.search.rerank import WEIGHT

MODULE = open_benchmark("reranking")


def test_orders_are_the_literal_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    cosine = torch.rand(3, generator=generator)
    words, patches = torch.randn(5, 7, generator=generator), torch.randn(3, 4, 7, generator=generator)
    found = MODULE.orders(cosine, words, patches, (0.5, 2.0))
    assert list(found) == [
        "cosine",
        *("cosine + 0.5·words", "cosine + 2·words", "words"),
        *("cosine + 0.5·patches", "cosine + 2·patches", "patches"),
    ]
    for number, picture in enumerate(patches):
        by_words = sum(max(float(word @ patch) for patch in picture) for word in words) / 5
        by_patches = sum(max(float(word @ patch) for word in words) for patch in picture) / 4
        assert float(found["words"][number]) == pytest.approx(by_words, abs=1e-5)
        assert float(found["patches"][number]) == pytest.approx(by_patches, abs=1e-5)
        assert float(found["cosine + 2·patches"][number]) == pytest.approx(
            float(cosine[number]) + 2 * by_patches, abs=1e-5
        )


def test_one_setting(caplog) -> None:
    options = MODULE.Options(data=("scenes/park",), weights=(0.1,), limit=8, most=5, device="cpu")
    caplog.set_level("INFO", logger="hnclip")
    report = json.loads(json.dumps(MODULE.run(options).to_dict(), allow_nan=False))
    assert caplog.messages == [f"bundled on 8 {split} records of scenes/park" for split in ("validation", "test")]
    rows = {row["order"]: row for row in report["rows"]}
    assert list(rows) == ["cosine", "cosine + 0.1·words", "words", "cosine + 0.1·patches", "patches"]
    for row in rows.values():
        assert 0 <= row["test"] <= 100
        if row["order"] != "cosine":
            assert row["change"] == pytest.approx(row["test"] - rows["cosine"]["test"])
            assert row["low"] <= row["change"] <= row["high"]
    assert 100 / 8 < rows["cosine"]["test"] < 100
    assert len(report["notes"]) == 1


def test_with_one_picture_there_is_no_other_order() -> None:
    options = MODULE.Options(data=("scenes/shelf",), weights=(5.0,), limit=8, most=1, device="cpu")
    rows = MODULE.run(options).rows
    assert len({row["test"] for row in rows}) == 1


def row(order: str, validation: float, low: float, data: str) -> dict[str, Any]:
    return {"model": "m", "data": data, "order": order, "validation": validation, "low": low}


def test_what_is_said() -> None:
    rows = [row("cosine", 50, 0, "a"), row("cosine", 40, 0, "b"), row("words", 49, -1, "a"), row("words", 41, 1, "b")]
    assert MODULE.notes(rows) == ["m: on the validation splits no re-ranking is better than the order by cosine"]
    rows += [row("both", 51, -1, "a"), row("both", 40, 1, "b")]
    assert MODULE.notes(rows) == [
        "m: both is best on the validation splits; on the test splits it is better beyond chance on 1 of 2"
    ]


def test_what_search_does_is_measured() -> None:
    weights = MODULE.Options().weights
    assert WEIGHT in weights
    assert min(weights) < WEIGHT < max(weights)  # so that it can be seen to be too large, or too small
