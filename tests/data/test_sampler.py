"""Order and batches: a function of seed and epoch, complete, and without doubles in a batch."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hnclip.data.sampler import choose_captions, cluster_order, cut_batches, epoch_order, nearest_captions, share
from hnclip.train.grad_cache import chunk_slices


def sizes_for(length: int, size: int) -> list[int]:
    return [rows.stop - rows.start for rows in chunk_slices(length, size)]


def has_double(batch: list[int], ids: torch.Tensor) -> bool:
    """Every pair of rows, every column, one by one."""
    return any(
        ids[a, column] == ids[b, column]
        for place, a in enumerate(batch)
        for b in batch[:place]
        for column in range(ids.shape[1])
    )


def test_order_is_a_permutation_of_its_own_per_seed_and_epoch() -> None:
    orders = [tuple(epoch_order(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 4
    assert tuple(epoch_order(50, 1, 1)) == orders[3]


@given(
    counts=st.lists(st.integers(1, 7), min_size=1, max_size=20),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_caption_comes_up_once_before_any_comes_up_again(counts: list[int], seed: int) -> None:
    number = torch.tensor(counts)
    epochs = torch.stack([choose_captions(number, seed, epoch) for epoch in range(14)], dim=1)
    for count, chosen in zip(counts, epochs.tolist()):
        for start in range(0, 14 - count + 1, count):
            assert sorted(chosen[start : start + count]) == list(range(count))


def test_the_first_caption_is_not_always_the_first() -> None:
    chosen = choose_captions(torch.full((3000,), 3), 5, 0)
    assert all(900 < count < 1100 for count in chosen.bincount().tolist())
    assert not torch.equal(chosen, choose_captions(torch.full((3000,), 3), 6, 0))


def test_without_doubles_the_order_is_cut_as_it_is() -> None:
    order = epoch_order(11, 3, 0)
    ids = torch.stack([torch.arange(11), torch.arange(11)], dim=1)
    dealt = cut_batches(order, ids, [4, 4, 3])
    assert dealt.batches == [order[:4], order[4:8], order[8:]]
    assert dealt.left_out == []


def test_the_same_number_in_two_columns_is_no_double() -> None:
    ids = torch.tensor([[0, 1], [1, 0], [2, 3], [3, 2]])
    assert cut_batches([0, 1, 2, 3], ids, [4]).batches == [[0, 1, 2, 3]]


def test_a_double_waits_for_the_next_batch() -> None:
    ids = torch.tensor([[0, 0], [1, 0], [2, 2], [3, 3]])
    assert cut_batches([0, 1, 2, 3], ids, [2, 2]).batches == [[0, 2], [1, 3]]


def test_a_double_at_the_end_changes_places() -> None:
    """Both copies come last: one of them has to go into the first batch, and a row from there to the end."""
    ids = torch.tensor([[0], [1], [2], [3], [9], [9]])
    dealt = cut_batches([0, 1, 2, 3, 4, 5], ids, [3, 3])
    assert dealt.left_out == []
    assert not any(has_double(batch, ids) for batch in dealt.batches)
    assert sorted(map(len, dealt.batches)) == [3, 3]


@given(st.data())
def test_batches_hold_every_row_once_and_no_double(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 60))
    pictures = data.draw(st.lists(st.integers(0, length), min_size=length, max_size=length))
    captions = data.draw(st.lists(st.integers(0, length), min_size=length, max_size=length))
    size = data.draw(st.integers(2, length))
    ids = torch.tensor([pictures, captions]).T
    sizes = sizes_for(length, size)
    order = epoch_order(length, data.draw(st.integers(0, 99)), 0)
    try:
        dealt = cut_batches(order, ids, sizes)
    except ValueError:  # a batch was left with one row or none: there must be many doubles
        assert len(set(pictures)) < length or len(set(captions)) < length
        return
    rows = [row for batch in dealt.batches for row in batch]
    assert sorted([*rows, *dealt.left_out]) == list(range(length))
    assert all(len(batch) <= size for batch, size in zip(dealt.batches, sizes))
    assert not any(has_double(batch, ids) for batch in dealt.batches)


def test_few_doubles_leave_nobody_out_and_batches_full() -> None:
    """What real data look like: 2,000 pairs, one in twenty captions a copy of another."""
    generator = torch.Generator().manual_seed(0)
    captions = torch.arange(2000)
    copies = torch.randperm(2000, generator=generator)[:100]
    captions[copies] = captions[torch.randint(2000, (100,), generator=generator)]
    ids = torch.stack([torch.arange(2000), captions], dim=1)
    for epoch in range(2):
        dealt = cut_batches(epoch_order(2000, 0, epoch), ids, sizes_for(2000, 128))
        assert dealt.left_out == []
        assert [len(batch) for batch in dealt.batches] == sizes_for(2000, 128)
        assert not any(has_double(batch, ids) for batch in dealt.batches)


def test_copies_beyond_the_number_of_batches_take_turns() -> None:
    ids = torch.tensor([[0], *([7] for _ in range(5)), *([row] for row in range(10, 20))])  # five copies, four batches
    seen = set()
    for epoch in range(12):
        dealt = cut_batches(epoch_order(16, 0, epoch), ids, [4] * 4)
        assert len(dealt.left_out) == 1
        seen |= set(dealt.left_out)
    assert seen == {1, 2, 3, 4, 5}


def test_nothing_but_copies_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"too much alike to fill 3 batches: 9 of 12 pairs repeat"):
        cut_batches(list(range(12)), torch.zeros(12, 1, dtype=torch.int64), [4, 4, 4])
    with pytest.raises(ValueError, match="sizes must add up to the 3 rows"):
        cut_batches([0, 1, 2], torch.arange(3)[:, None], [2])


@given(length=st.integers(0, 40), world=st.integers(1, 5))
def test_the_shares_of_all_processes_are_the_batch(length: int, world: int) -> None:
    batch = list(range(length))
    shares = [share(batch, rank, world) for rank in range(world)]
    assert [row for part in shares for row in part] == batch
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_two_processes_deal_the_batches_of_one() -> None:
    """Real processes, with another hash seed each: nothing of the order may come from the process."""
    script = (
        "import sys, torch; from hnclip.data.sampler import *; rank, world = map(int, sys.argv[1:]);"
        "ids = torch.arange(40)[:, None] % 31; near = nearest_captions(torch.eye(40)[:, :7] + 0.1, 5);"
        "order = cluster_order(near, 4, 9, 2); dealt = cut_batches(order, ids, [8] * 5);"
        "print([share(batch, rank, world) for batch in dealt.batches])"
    )

    def rows(rank: int, world: int) -> list[list[int]]:
        environment = {**os.environ, "PYTHONHASHSEED": str(rank + 1)}
        command = [sys.executable, "-c", script, str(rank), str(world)]
        return eval(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)

    whole, first, second = rows(0, 1), rows(0, 2), rows(1, 2)
    assert whole == [a + b for a, b in zip(first, second)]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_nearest_captions_are_those_of_a_full_sort(chunk: int) -> None:
    vectors = torch.randn(23, 6, generator=torch.Generator().manual_seed(1))
    found = nearest_captions(vectors, 5, chunk=chunk)
    for row in range(23):
        others = [other for other in range(23) if other != row]
        scores = {o: torch.cosine_similarity(vectors[row], vectors[o], dim=0).item() for o in others}
        assert found[row].tolist() == sorted(others, key=lambda other: -scores[other])[:5]
    assert nearest_captions(vectors[:3], 5).shape == (3, 2)


def test_clusters_of_one_are_the_plain_order_and_larger_ones_keep_families_together() -> None:
    families, members = 25, 4
    vectors = torch.randn(families, 16, generator=torch.Generator().manual_seed(0)).repeat_interleave(members, 0)
    vectors += 0.01 * torch.randn(vectors.shape, generator=torch.Generator().manual_seed(1))
    near = nearest_captions(vectors, 8)
    assert cluster_order(near, 1, 3, 2) == epoch_order(100, 3, 2)
    for epoch in range(3):
        order = cluster_order(near, members, 3, epoch)
        assert sorted(order) == list(range(100))
        for start in range(0, 100, members):
            assert len({row // members for row in order[start : start + members]}) == 1
    orders = [tuple(cluster_order(near, members, seed, epoch)) for seed in (3, 4) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    random = epoch_order(100, 3, 0)
    assert sum(a // members == b // members for a, b in pairwise(random)) < 20
    with pytest.raises(ValueError, match="size must be at least 1"):
        cluster_order(near, 0, 0, 0)


def test_no_batch_is_left_alone_where_another_can_give() -> None:
    """Eight copies for three batches: two of these hold nothing else at first, and one row has no negative."""
    ids = torch.tensor([[7]] * 8 + [[1], [2], [3], [4]])
    dealt = cut_batches([8, 9, 10, 11, *range(8)], ids, [4, 4, 4])
    assert len(dealt.left_out) == 5
    assert min(map(len, dealt.batches)) == 2
    assert not any(has_double(batch, ids) for batch in dealt.batches)


def test_neighbours_hold_no_more_memory_than_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a sorted chunk would keep the whole chunk alive until the end: as much as all pairs together."""
    kept: list[int] = []
    join = torch.cat

    def watched(parts: list[torch.Tensor]) -> torch.Tensor:
        kept.extend(part.untyped_storage().nbytes() for part in parts)
        return join(parts)

    monkeypatch.setattr(torch, "cat", watched)
    nearest_captions(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), 3, chunk=20)
    assert kept == [20 * 3 * 8, 20 * 3 * 8, 10 * 3 * 8]
