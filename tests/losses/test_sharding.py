"""Shards of a batch average to the whole batch, in one process and in two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hnclip.losses import GLOBAL_LOSSES, debiased_loss, hard_negative_loss, sigmoid_loss, token_loss
from hnclip.losses.tiled import loss_from_tiles
from hnclip.losses.tokens import late_interaction_loss
from loss_twins import assert_equal, make_pairs, make_tokens, value_and_grads

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 0], [4, 4]])
FROZEN = make_pairs(6, 3, seed=4)[1].detach()
TOKENS, MASKS = make_tokens(6, 5, 6, 4)


def tokens(patches, words, scale, **shard):
    return token_loss(patches, words, *MASKS, scale, **shard)


def late_interaction(patches, words, scale, **shard):
    return late_interaction_loss(patches, words, *MASKS, **shard)


CASES = {
    **{name: (loss, {}) for name, loss in GLOBAL_LOSSES.items()},
    "tiles": (loss_from_tiles, {"size": 60, "margin_text": FROZEN, "center": "mean", "margin": 0.1}),
    "sigmoid with margin": (sigmoid_loss, {"gamma": 0.5}),
    "debiased off the floor": (debiased_loss, {"tau_plus": 1e-6}),
    "tokens": (tokens, {}),
    "late interaction": (late_interaction, {}),
}


@pytest.mark.parametrize(("ids", "sizes"), [(None, [3, 3]), (IDS, [1, 4, 1])], ids=["no ids", "ids"])
@pytest.mark.parametrize("case", CASES)
def test_weighted_shards_are_the_whole_batch(case, ids, sizes):
    """As processes do it: each shard weighted by its share of the queries; equal shards are a plain mean."""
    loss, options = CASES[case]
    leaves = TOKENS if case in ("tokens", "late interaction") else make_pairs(6, 5)

    def whole(*x, **shard):
        return loss(*x, ids=ids, **options, **shard)

    def shards(*x):
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        return sum(rows / 6 * whole(*x, offset=start, rows=rows) for start, rows in zip(starts, sizes))

    assert_equal(value_and_grads(shards, leaves), value_and_grads(whole, leaves))
    assert whole(*leaves, offset=0, rows=3) != whole(*leaves, offset=3, rows=3)


class Gather(torch.autograd.Function):
    """The tensors of all processes in order; the gradients of all processes are summed in the backward pass."""

    @staticmethod
    def forward(ctx, local):
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


TWO = {"hn": (hard_negative_loss, make_pairs(6, 5)), "tokens": (tokens, TOKENS)}


def one_process(rank, world, folder):
    """Hold a shard, gather the rest, and save the gradients that data parallelism would compute."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    results = {}
    for name, (loss, (*vectors, scale)) in TWO.items():
        rows = 6 // world
        local = [v.detach()[rank * rows : (rank + 1) * rows].requires_grad_() for v in vectors]
        value = loss(*(Gather.apply(part) for part in local), scale, ids=IDS, offset=rank * rows, rows=rows)
        grads = torch.autograd.grad(value, [*local, scale])
        value = value.detach()
        for shared in (value, grads[-1]):
            dist.all_reduce(shared)
        results[name] = [value / world, *(grad / world for grad in grads)]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_reproduce_one(tmp_path):
    mp.spawn(one_process, (2, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, (loss, leaves) in TWO.items():
        value, *by_vectors, by_scale = value_and_grads(lambda *x, loss=loss: loss(*x, ids=IDS), leaves)
        for rank in ranks:
            assert_equal([rank[name][0], rank[name][-1]], [value, by_scale])
        joined = [torch.cat(parts) for parts in zip(*(rank[name][1:-1] for rank in ranks))]
        assert_equal(joined, by_vectors)
