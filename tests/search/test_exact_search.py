"""Exact search through codes, beside a twin that scores every row."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hnclip.search.engines import exact
from hnclip.search.engines.exact import exact_nearest, ranked, score_rows
from hnclip.search.index.vectors import StoredVectors, append, row_files

Storage = Literal["bf16", "int8"]


def stored(rows: np.ndarray, storage: Storage = "bf16") -> StoredVectors:
    """Rows [N, D] as an index keeps them, written in two parts."""
    with TemporaryDirectory() as directory:
        files = row_files(Path(directory), "images", rows.shape[1], storage)
        half = len(rows) // 2
        slack = max(append(files, 0, rows[:half]), append(files, half, rows[half:]))
        return StoredVectors(files, len(rows), rows.shape[1], slack)  # what is mapped outlives its name


def twin(
    vectors: StoredVectors, query: Tensor, k: int, first: int = 0, dead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All scores in one go, sorted."""
    scores = (torch.from_numpy(vectors.rows(slice(0, None))) * query).sum(dim=1)  # [N]
    kept = torch.ones(len(vectors), dtype=torch.bool)
    kept[:first] = False
    if dead is not None:
        kept[dead] = False
    rows = kept.nonzero().squeeze(1)
    order = scores[rows].sort(descending=True, stable=True).indices[:k]
    return scores[rows[order]], rows[order]


def check(vectors: StoredVectors, queries: Tensor, k: int, first: int = 0, dead: Tensor | None = None) -> None:
    found = exact_nearest(vectors, queries, k, first=first, dead=dead)
    assert len(found) == len(queries)
    for query, (scores, rows) in zip(queries, found):
        expected_scores, expected_rows = twin(vectors, query, k, first, dead)
        assert rows.tolist() == expected_rows.tolist()
        assert scores.numpy().tobytes() == expected_scores.numpy().tobytes()  # to the last bit


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True).clip(1e-30)).astype(np.float32)


def near_twins(generator: np.random.Generator, count: int, width: int, spread: float) -> np.ndarray:
    """Families whose members differ by so much, some of them by nothing."""
    families = generator.standard_normal((max(1, count // 20), width))
    rows = unit(families)[generator.integers(len(families), size=count)]
    moved = rows + spread * generator.standard_normal((count, width)) / width**0.5
    moved[generator.random(count) < 0.3] = rows[0]  # equal rows
    return unit(moved)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 400),
    width=st.sampled_from([1, 3, 8, 31, 32, 33, 64, 96, 100]),
    k=st.integers(1, 450),
    queries=st.integers(1, 9),
    spread=st.sampled_from([0.0, 1e-4, 1e-2, 1.0]),
    storage=st.sampled_from(["bf16", "int8"]),
    sign=st.sampled_from([1, -1]),
    gone=st.sampled_from([0.0, 0.2, 0.97, 1.0]),
    kernel=st.booleans(),
    data=st.data(),
)
def test_every_search_is_that_of_all_scores(
    seed: int,
    count: int,
    width: int,
    k: int,
    queries: int,
    spread: float,
    storage: Storage,
    sign: int,
    gone: float,
    kernel: bool,
    data: st.DataObject,
) -> None:
    """Near-twins, ties, rows of next to nothing, dead rows, a later beginning, widths for the kernel and others."""
    generator = np.random.default_rng(seed)
    rows = near_twins(generator, count, width, spread)
    rows[generator.random(count) < 0.05] *= 1e-12
    vectors = stored(rows, storage)
    near = rows[generator.integers(count, size=queries)] + 0.1 * generator.standard_normal((queries, width))
    asked = torch.from_numpy(sign * unit(near))  # with sign -1 what is nearest is below 0
    dead = torch.from_numpy(np.flatnonzero(generator.random(count) < gone))
    first = data.draw(st.integers(0, count))
    with pytest.MonkeyPatch.context() as patch:
        if not kernel:
            patch.delattr(torch, "_weight_int8pack_mm")
        patch.setattr(exact, "_BLOCK", 37)
        check(vectors, asked, k)
        check(vectors, asked, k, first, dead)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_rows_that_the_codes_cannot_tell_apart(storage: Storage) -> None:
    """Scores all below 0, where rounding a result downwards makes it larger; the query itself is not rounded."""
    generator = np.random.default_rng(0)
    query = torch.from_numpy(unit(generator.standard_normal(64))).bfloat16().float().numpy()
    side = unit(generator.standard_normal((3000, 64)))
    side -= (side @ query)[:, None] * query
    cosines = -0.9 - 2e-3 * generator.random((3000, 1))  # closer together than the codes can tell
    rows = cosines * query + np.sqrt(1 - cosines**2) * unit(side)
    vectors = stored(unit(rows), storage)
    asked = torch.from_numpy(query[None])
    for k in (1, 5, 40):
        check(vectors, asked, k)
    scores, _ = twin(vectors, asked[0], 3000)
    assert scores[0] < -0.89
    by_codes = exact._scan(vectors, asked, 0)[0].sort(descending=True).indices[:5]
    assert by_codes.tolist() != exact_nearest(vectors, asked, 5)[0][1].tolist()  # codes alone would be wrong


def within_bound(vectors: StoredVectors, queries: Tensor) -> float:
    """The largest share of the bound that a row is off by."""
    shares = []
    for query, look in zip(queries, exact._scan(vectors, queries, 0).double()):
        score = score_rows(vectors, query, torch.arange(len(vectors))).double()  # [N]
        off = exact._off(vectors, query)
        low, high = (score + sign * off for sign in (-1, 1))
        lowest, highest = low - exact._ROUNDING * low.abs(), high + exact._ROUNDING * high.abs()
        middle = (lowest + highest) / 2
        shares.append(((look - middle).abs() / (highest - middle)).max().item())
    return max(shares)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_the_bound_holds_for_rows_made_against_it(
    storage: Storage, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers half-way between two codes, all rounded the way that the query points; queries half-way between two
    numbers of bf16, long or short ones, and such whose products cancel out."""
    if not kernel:
        monkeypatch.delattr(torch, "_weight_int8pack_mm")
    generator = np.random.default_rng(0)
    width, count = 96, 300
    codes = generator.integers(-126, 126, (count, width)) + 0.499
    codes[:, 0] = 127
    half = unit(codes)
    one_large = np.zeros((count, width))
    one_large[:, 0], one_large[:, 1:] = 1, 0.499 / 127  # all the rest is rounded to nothing
    one_side = generator.standard_normal((count, width // 2))
    both_sides = np.concatenate([one_side, -one_side], 1)
    rows = np.concatenate([half, unit(one_large), unit(both_sides), unit(generator.standard_normal((count, width)))])
    vectors = stored(rows, storage)
    rest = unit(vectors.rows(slice(0, None)) - rows)[:3]
    between = unit(generator.standard_normal((4, width)))
    exponent = np.floor(np.log2(np.abs(between)))
    between = np.sign(between) * 2**exponent * (1 + np.arange(width) % 7 / 128 + 0.999 / 256)
    away = unit(one_large[:1] * -1)
    ones = np.ones((1, width))
    alike = np.tile(np.float32(2.0) ** generator.integers(-6, 1, (5, width // 2)) * 1.0078125, 2)  # of bf16
    queries = np.concatenate([rest, between, -between, away, -away, ones, 1e3 * ones, 1e-3 * ones, 0 * ones, alike])
    asked = torch.from_numpy(queries.astype(np.float32))
    assert 0 < within_bound(vectors, asked) <= 1
    check(vectors, asked, 7)
    if storage == "bf16":  # the bound is no larger than it must be: half of it is used up by such rows
        assert within_bound(vectors, asked) > 0.5


def test_other_rows_and_queries_change_nothing() -> None:
    generator = np.random.default_rng(1)
    vectors = stored(near_twins(generator, 500, 64, 1e-3))
    queries = torch.from_numpy(unit(generator.standard_normal((11, 64))))
    together = exact_nearest(vectors, queries, 13)
    for query, (scores, rows) in zip(queries, together):
        ((alone, same),) = exact_nearest(vectors, query[None], 13)
        assert torch.equal(alone, scores)
        assert torch.equal(same, rows)
        one_by_one = torch.cat([score_rows(vectors, query, row[None]) for row in rows])
        assert one_by_one.numpy().tobytes() == scores.numpy().tobytes()


def test_ranked_puts_the_first_of_equal_rows_first() -> None:
    rows = unit(np.ones((6, 32)))
    vectors = stored(rows)
    _, found = ranked(vectors, torch.from_numpy(rows[0]), torch.tensor([5, 1, 4]), 2)
    assert found.tolist() == [1, 4]
    scores, found = ranked(vectors, torch.from_numpy(rows[0]), torch.zeros(0, dtype=torch.int64), 2)
    assert len(scores) == len(found) == 0


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError])
def test_a_kernel_that_this_processor_does_not_have(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def kernel(*arguments: Any) -> Tensor:
        called.append(arguments)
        raise error("not compiled for this processor")

    monkeypatch.setattr(torch, "_weight_int8pack_mm", kernel)
    generator = np.random.default_rng(2)
    vectors = stored(near_twins(generator, 300, 32, 1e-4))
    check(vectors, torch.from_numpy(unit(generator.standard_normal((5, 32)))), 9)
    assert len(called) == 2  # four queries, and the fifth


def test_few_rows_are_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the codes would be for nothing."""
    generator = np.random.default_rng(3)
    vectors = stored(unit(generator.standard_normal((5000, 64))))
    scored = []
    honest = exact.score_rows
    monkeypatch.setattr(
        exact, "score_rows", lambda some, query, rows: scored.append(len(rows)) or honest(some, query, rows)
    )
    exact_nearest(vectors, torch.from_numpy(unit(generator.standard_normal((1, 64)))), 10)
    assert 64 <= sum(scored) < 500
