"""Negatives of batches against a loop over them, and their shares by hardness."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.analysis.geometry import caption_geometry
from hnclip.analysis.hardness import (
    PAPER_EDGES,
    Buckets,
    batch_similarity,
    bucket_shares,
    buckets,
    hardest_in_batch,
    hardest_of_all,
    negative_similarities,
    quantile_edges,
)
from hnclip.analysis.histogram import Histogram, count_values
from hnclip.data.sampler import cut_batches, epoch_order
from hnclip.losses.hard_negative import check_pairs, negative_margins


def captions(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return F.normalize(torch.randn(count, 5, generator=generator) + 1.5, dim=1)


def of_values(values: list[float]) -> Histogram:
    return Histogram(count_values(torch.tensor(values)).numpy(), sum(values) / len(values))


TEXT = captions(13)
IDS = torch.tensor([[0, 1, 2, 3, 3, 5, 6, 7, 8, 9, 10, 11, 12], [0, 0, 2, 3, 4, 5, 5, 7, 8, 9, 10, 11, 12]]).T
BATCHES = [[0, 1, 2, 7], [12, 3, 4, 5, 6], [8], [9, 10, 11]]


def negatives() -> list[list[float]]:
    """For each pair that has any, its similarities with its negatives."""
    found = []
    for batch in BATCHES:
        for i in batch:
            row = [float(TEXT[i].double() @ TEXT[j].double()) for j in batch if (IDS[i] != IDS[j]).all()]
            found += [row] if row else []
    return found


@pytest.mark.parametrize("chunk", [1, 2, 1024])
def test_negatives_equal_a_loop(chunk: int) -> None:
    values = [value for row in negatives() for value in row]
    found = negative_similarities(TEXT, BATCHES, IDS, chunk=chunk)
    assert found.total == len(values) == 4 * 3 - 2 + 5 * 4 - 4 + 6
    assert found.mean == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert found.error == 0
    for share in (0.1, 0.5, 0.9):
        assert found.quantile(share) == pytest.approx(np.quantile(values, share, method="inverted_cdf"), abs=1.1e-4)
    hardest = hardest_in_batch(TEXT, BATCHES, IDS, chunk=chunk)
    assert hardest == pytest.approx(np.mean([max(row) for row in negatives()]), abs=1e-6)


def test_negatives_are_those_that_carry_a_margin() -> None:
    """Of the loss itself, with γ = 1 and ids in one batch."""
    pairs = check_pairs(TEXT, TEXT, 1.0, offset=0, rows=None, ids=IDS)
    margins = negative_margins(pairs, 1.0)
    assert margins is not None
    found = negative_similarities(TEXT, [range(13)], IDS)
    assert np.array_equal(found.counts, count_values(margins[pairs.negatives(TEXT.device)]).numpy())


def test_one_batch_of_all_has_the_geometry_of_all() -> None:
    text = captions(60)
    geometry = caption_geometry(text, torch.arange(60))
    ids = torch.arange(60)
    found = negative_similarities(text, [epoch_order(60, 0, 0)], ids)
    assert np.array_equal(found.counts, 2 * geometry.pairwise.counts)
    assert hardest_in_batch(text, [epoch_order(60, 0, 0)], ids) == pytest.approx(geometry.hardest.mean, abs=1e-6)
    small = cut_batches(epoch_order(60, 0, 0), [6] * 10)
    assert negative_similarities(text, small, ids).total == 10 * 6 * 5
    assert hardest_in_batch(text, small, ids) < geometry.hardest.mean


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_autocast(dtype: torch.dtype) -> None:
    text = TEXT.to(dtype)
    expected = negative_similarities(text.float(), BATCHES, IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = negative_similarities(text, BATCHES, IDS)
    assert np.array_equal(found.counts, expected.counts)
    assert batch_similarity(text, [1, 2]).dtype == torch.float32


def test_batches_without_negatives_are_an_error() -> None:
    for measure in (negative_similarities, hardest_in_batch):
        for batches in ([], [[0], [5]], [[0, 1], [3, 4]]):
            with pytest.raises(ValueError, match="no negatives"):
                measure(TEXT, batches, IDS)
        with pytest.raises(ValueError, match="ids"):
            measure(TEXT, BATCHES, IDS[:4])
        with pytest.raises(ValueError, match="text must be finite"):
            measure(TEXT / 0 * 0, BATCHES, IDS)


def test_shares_at_the_paper_s_edges_are_exact() -> None:
    """A value at an edge belongs above it."""
    found = of_values([0.1, 0.79999, 0.8, 0.80001, 0.85, 0.89999, 0.90001, 0.95])
    assert bucket_shares(found, PAPER_EDGES) == (2 / 8, 4 / 8, 2 / 8)
    assert bucket_shares(found, [0.5]) == (1 / 8, 7 / 8)


def test_shares_add_up_to_one() -> None:
    found = negative_similarities(TEXT, BATCHES, IDS)
    for edges in ((0.8, 0.9), (-0.31337, 0.2, 0.77777, 0.9), (-2, 3)):
        shares = bucket_shares(found, edges)
        assert len(shares) == len(edges) + 1
        assert sum(shares) == pytest.approx(1, abs=1e-12)
        assert min(shares) >= 0


@pytest.mark.parametrize("edges", [(), (0.9, 0.8), (0.8, 0.8)])
def test_edges_rise(edges: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="edges"):
        bucket_shares(of_values([0.5]), edges)


def test_buckets_have_names() -> None:
    found = buckets(of_values([0.1, 0.85, 0.95, 0.99]))
    assert found == Buckets((0.8, 0.9), (0.25, 0.25, 0.5))
    assert found.labels == ("below 0.8", "0.8 to 0.9", "0.9 and above")
    assert buckets(of_values([0.1]), [0.12345]).labels == ("below 0.1235", "0.1235 and above")
    said = json.loads(json.dumps(found.to_dict()))
    assert said == {"edges": [0.8, 0.9], "shares": [0.25, 0.25, 0.5], "labels": list(found.labels)}


def test_quantile_edges_cut_off_these_shares() -> None:
    """Wherever the cosines live."""
    values = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 0.1 - 0.5
    found = Histogram(count_values(values).numpy(), 0.0)
    edges = quantile_edges(found)
    assert edges == pytest.approx((-0.45, -0.41, -0.401), abs=2e-3)
    assert bucket_shares(found, edges) == pytest.approx((0.5, 0.4, 0.09, 0.01), abs=2e-3)
    assert all(round(edge * 10_000) == pytest.approx(edge * 10_000, abs=1e-6) for edge in edges)
    assert quantile_edges(found, (0.9, 0.5)) == edges[:2]


def test_equal_captions_have_one_edge() -> None:
    found = of_values([1.0] * 9)
    edges = quantile_edges(found)
    assert len(edges) in (1, 2)  # of the last bin, which holds them all
    assert sum(bucket_shares(found, edges)) == 1


def test_the_matrix_of_a_batch_is_that_of_the_loss() -> None:
    rows = [4, 0, 12]
    chosen = TEXT[rows]
    pairs = check_pairs(chosen, chosen, 1.0, offset=0, rows=None, ids=None)
    found = batch_similarity(TEXT, rows)
    torch.testing.assert_close(found, negative_margins(pairs, 1.0))
    assert found.diagonal().tolist() == [0, 0, 0]
    assert float(found[0, 2]) == pytest.approx(float(TEXT[4] @ TEXT[12]), abs=1e-6)


def test_the_hardest_of_all_is_that_of_one_batch() -> None:
    literal = [
        max(float(TEXT[i].double() @ TEXT[j].double()) for j in range(13) if (IDS[i] != IDS[j]).all())
        for i in range(13)
    ]
    assert hardest_of_all(TEXT, IDS, chunk=3) == pytest.approx(sum(literal) / 13, abs=1e-6)
    assert hardest_of_all(TEXT, IDS) == pytest.approx(hardest_in_batch(TEXT, [range(13)], IDS), abs=1e-6)


def test_the_hardest_of_all_may_be_of_some_pairs() -> None:
    found = hardest_of_all(TEXT, IDS, most=4, seed=1)
    assert found == hardest_of_all(TEXT, IDS, most=4, seed=1)
    rows = torch.randperm(13, generator=torch.Generator().manual_seed(1))[:4].tolist()
    literal = [max(float(TEXT[i] @ TEXT[j]) for j in range(13) if (IDS[i] != IDS[j]).all()) for i in rows]
    assert found == pytest.approx(sum(literal) / 4, abs=1e-6)


def test_pairs_that_are_all_the_same_have_no_hardest() -> None:
    with pytest.raises(ValueError, match="no negatives"):
        hardest_of_all(TEXT, torch.zeros(13, 1, dtype=torch.int64))
