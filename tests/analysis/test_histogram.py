"""Histograms against the values they count."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hnclip.analysis.histogram import BINS, Histogram, count_values, sampling_error


def histogram(values: list[float], **options: float) -> Histogram:
    tensor = torch.tensor(values, dtype=torch.float64)
    return Histogram(count_values(tensor).numpy(), sum(values) / max(1, len(values)), **options)


@settings(max_examples=60)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_are_values_of_that_rank(values: list[float], share: float) -> None:
    """The smallest value that at least this share of all does not exceed, to a bin."""
    rank = max(1, math.ceil(share * len(values) - 1e-9))
    assert histogram(values).quantile(share) == pytest.approx(sorted(values)[rank - 1], abs=1.01e-4)


@settings(max_examples=60)
@given(st.lists(st.integers(-100_000, 100_000), min_size=1, max_size=30), st.integers(-10_000, 9_999))
def test_shares_above_an_edge_are_exact(tenths: list[int], edge: int) -> None:
    """Values in tenths of a bin, off the edges, whose own place a last digit decides."""
    tenths = [value + (value % 10 == 0) for value in tenths]
    above = sum(value > 10 * edge for value in tenths) / len(tenths)
    assert histogram([value / 100_000 for value in tenths]).share_above(edge / 10_000) == above


def test_no_edge_is_missed_by_its_last_digit() -> None:
    """With a value in every bin, every edge: 0.8 may lie a digit off the edge that stands for it."""
    found = Histogram(np.ones(BINS, dtype=np.int64), 0.0)
    for edge in range(0, BINS, 7):
        assert found.share_above(edge / 10_000 - 1) == (BINS - edge) / BINS


def test_an_edge_belongs_to_the_bin_above_it_in_fp32() -> None:
    """0.8 is a little more than 0.8 in fp32; the number before it is less."""
    at = torch.tensor(0.8)
    below = torch.nextafter(at, torch.tensor(0.0))
    found = Histogram(count_values(torch.stack([at, at, below])).numpy(), 0.8)
    assert found.share_above(0.8) == 2 / 3


def test_between_edges_a_bin_is_cut_in_proportion() -> None:
    found = Histogram(np.array([4, 8]), 0.0, low=0.0, high=2.0)
    assert found.share_above(1.25) == pytest.approx(0.5)
    assert found.share_above(0.5) == pytest.approx(10 / 12)
    assert (found.share_above(-3), found.share_above(2), found.share_above(9)) == (1, 0, 0)
    assert found.quantile(2 / 3) == pytest.approx(1.5)


@settings(max_examples=30)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30))
def test_the_deviation_is_that_of_the_values(values: list[float]) -> None:
    found = histogram(values)
    assert found.deviation == pytest.approx(np.std(values), abs=1e-4)
    assert Histogram(found.counts, mean=0.77).deviation == found.deviation  # the mean may be that of more values


def test_the_ends_are_the_least_and_the_greatest_value() -> None:
    found = histogram([-0.25, 0.5, 0.5])
    assert found.quantile(0) == pytest.approx(-0.25, abs=1e-4)
    assert found.quantile(1) == pytest.approx(0.5, abs=1.01e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_counts_equal_a_loop(dtype: torch.dtype) -> None:
    values = (torch.rand(3, 41, generator=torch.Generator().manual_seed(0)) * 2.2 - 1.1).to(dtype)
    expected = [0] * 50
    for value in values.flatten().tolist():
        expected[min(max(math.floor((value + 1) * 25), 0), 49)] += 1
    assert count_values(values, bins=50).tolist() == expected


def test_values_outside_are_counted_at_the_ends_and_minus_infinity_nowhere() -> None:
    counts = count_values(torch.tensor([-torch.inf, -1.0000001, -1.0, 1.0, 1.0000001, -torch.inf]))
    assert (counts[0], counts[-1], counts.sum(), len(counts)) == (2, 2, 4, BINS)


def test_no_values_are_no_counts() -> None:
    assert count_values(torch.empty(0, 3)).sum() == 0


def test_merging_keeps_everything_but_the_bins() -> None:
    found = histogram([-0.2, 0.1, 0.11, 0.9], error=0.01)
    few = found.merged(20)
    assert few.counts.nonzero()[0].tolist() == [8, 11, 19]
    assert few.counts.sum() == found.total == few.total == 4
    assert (few.mean, few.error, few.low, few.high) == (found.mean, 0.01, -1, 1)
    for bins in (0, 3, -2):
        with pytest.raises(ValueError, match="merged"):
            found.merged(bins)


def test_it_is_ready_for_json() -> None:
    found = json.loads(json.dumps(histogram([0.5, 0.7], error=0.02).to_dict(quantiles=(0.5, 1)), allow_nan=False))
    assert (found["count"], found["mean"], found["error"]) == (2, 0.6, 0.02)
    assert found["quantiles"] == {"0.5": pytest.approx(0.5, abs=1e-4), "1": pytest.approx(0.7, abs=1.01e-4)}
    assert (len(found["counts"]), sum(found["counts"])) == (200, 2)
    empty = Histogram(np.zeros(7, dtype=np.int64), 0.0).to_dict()
    assert (empty["quantiles"], empty["counts"]) == ({}, [0] * 7)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_is_between_nothing_and_all(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        histogram([0.5]).quantile(share)


def test_an_empty_one_says_so() -> None:
    empty = Histogram(np.zeros(4, dtype=np.int64), 0.0)
    for ask in (empty.quantile, empty.share_above, lambda share: empty.deviation):
        with pytest.raises(ValueError, match="empty"):
            ask(0.5)


def test_the_error_of_a_sample_holds_for_all_shares_at_once() -> None:
    """How often the largest difference to a uniform distribution is beyond the bound: at most 5 %, not far below."""
    generator = np.random.default_rng(0)
    drawn = np.sort(generator.random((2000, 400)), axis=1)
    steps = np.arange(401) / 400
    largest = np.maximum(np.abs(drawn - steps[1:]), np.abs(drawn - steps[:-1])).max(1)  # [2000]
    assert 0.03 < (largest > sampling_error(400)).mean() < 0.055
    assert sampling_error(1600) == pytest.approx(sampling_error(400) / 2)
