"""The order of pairs: a function of seed and epoch, complete, and divided among any number of processes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hnclip.data.sampler import choose_captions, cluster_order, cut_batches, epoch_order, nearest_captions, share
from hnclip.training.step import chunk_slices


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 2**32 - 1), st.integers(0, 99))
def test_every_record_is_in_one_batch_of_every_epoch(length, size, seed, epoch):
    sizes = [rows.stop - rows.start for rows in chunk_slices(length, size)]
    batches = cut_batches(epoch_order(length, seed, epoch), sizes)
    assert [len(batch) for batch in batches] == sizes
    assert sorted(row for batch in batches for row in batch) == list(range(length))


@given(counts=st.lists(st.integers(1, 7), min_size=1, max_size=20), seed=st.integers(0, 2**32 - 1))
def test_every_caption_is_used_once_before_any_is_used_again(counts, seed):
    epochs = torch.stack([choose_captions(torch.tensor(counts), seed, epoch) for epoch in range(14)], dim=1)
    for count, chosen in zip(counts, epochs.tolist()):
        for start in range(0, 14 - count + 1, count):
            assert sorted(chosen[start : start + count]) == list(range(count))


@given(length=st.integers(0, 40), world=st.integers(1, 5))
def test_shares_of_all_processes_are_the_batch(length, world):
    shares = [share(range(length), rank, world) for rank in range(world)]
    assert [row for part in shares for row in part] == list(range(length))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_nearest_captions_are_those_of_a_full_sort(chunk):
    vectors = torch.randn(23, 6, generator=torch.Generator().manual_seed(1))
    found = nearest_captions(vectors, 5, chunk=chunk)
    for row in range(23):
        scores = torch.cosine_similarity(vectors[row : row + 1], vectors)
        assert found[row].tolist() == [other for other in scores.argsort(descending=True).tolist() if other != row][:5]
    assert nearest_captions(vectors[:3], 5).shape == (3, 2)


def test_clusters_hold_near_duplicates():
    families, members = 25, 4
    vectors = torch.randn(families, 16, generator=torch.Generator().manual_seed(0)).repeat_interleave(members, 0)
    vectors += 0.01 * torch.randn(vectors.shape, generator=torch.Generator().manual_seed(1))
    near = nearest_captions(vectors, 8)
    assert cluster_order(near, 1, 3, 2) == epoch_order(100, 3, 2)
    orders = [cluster_order(near, members, seed, epoch) for seed in (3, 4) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    for order in orders:
        assert sorted(order) == list(range(100))
        assert all(len({row // members for row in order[at : at + members]}) == 1 for at in range(0, 100, members))
    assert sum(a // members == b // members for a, b in pairwise(epoch_order(100, 3, 0))) < 20
    with pytest.raises(ValueError, match="size"):
        cluster_order(near, 0, 0, 0)
