from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from live_memory import LiveMemory
from loss_twins import make_pairs

from hnclip.losses import hard_negative_loss, tiled_hard_negative_loss
from hnclip.losses.cost import rank_cost
from hnclip.losses.tiles import TILE_BYTES


def peak(loss, pairs, width, world, dtype):
    rows = pairs // world
    leaves = make_pairs(pairs, width, dtype=dtype)
    with LiveMemory() as memory:
        value = loss(*leaves, offset=pairs - rows, rows=rows, check_values=False)
        torch.autograd.grad(value, leaves)
    return memory.peak


@pytest.mark.parametrize(("pairs", "width", "world"), [(256, 8, 1), (256, 16, 4), (192, 300, 1), (512, 100, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_formulas_are_what_torch_allocates(pairs, width, world, dtype, monkeypatch):
    monkeypatch.setitem(TILE_BYTES, "cpu", 2**12)
    cost = rank_cost(pairs, width, world, item_bytes=dtype.itemsize)
    assert peak(tiled_hard_negative_loss, pairs, width, world, dtype) == pytest.approx(cost.tiled, rel=0.05)
    # Alone, log-softmax copies its transposed argument inside, which the watch over tensors does not see.
    unseen = pairs * pairs * dtype.itemsize if world == 1 and 7 * pairs > 3 * width else 0
    assert peak(hard_negative_loss, pairs, width, world, dtype) + unseen == pytest.approx(cost.eager, rel=0.05)
    assert cost.tiled < cost.eager


def test_a_batch_of_one_tile_is_the_eager_loss():
    cost = rank_cost(1024, 64)
    assert cost.tiled == cost.eager
    assert rank_cost(1025, 64).tiled < rank_cost(1025, 64).eager / 2


def test_tiled_memory_is_linear_in_the_batch():
    small, large = rank_cost(2**16, 768), rank_cost(2**17, 768)
    assert large.tiled < 2 * small.tiled
    assert large.eager == 4 * small.eager


def test_bytes_on_the_wire():
    cost = rank_cost(1000, 10, 4)
    own = 2 * 250 * 10 * 4
    assert cost.features == cost.gradients == 4 * own
    assert cost.gather_sent == 3 * own  # to each of the three others
    assert cost.reduce_scatter_sent == 3 * own  # to each of the three others, their part
    assert cost.all_reduce_sent == 6 * own  # that, and the sums to everybody
    alone = rank_cost(1000, 10)
    assert alone.gather_sent == alone.reduce_scatter_sent == alone.all_reduce_sent == 0


def test_all_bytes_follow_the_size_of_a_number():
    single, double = rank_cost(4096, 32, 2), rank_cost(4096, 32, 2, item_bytes=8)
    assert [b / a for a, b in zip(astuple(single), astuple(double))] == pytest.approx([2] * 7, rel=0.6)
    assert double.features == 2 * single.features


@pytest.mark.parametrize(("pairs", "world"), [(10, 3), (1, 1), (8, 0)])
def test_uneven_shards_are_refused(pairs, world):
    with pytest.raises(ValueError, match="multiple of world"):
        rank_cost(pairs, 4, world)
