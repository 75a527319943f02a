from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from loss_twins import assert_equal, make_pairs, make_tokens, value_and_grads

from hnclip.losses import GLOBAL_LOSSES, debiased_loss, hard_negative_loss, siglip_loss, token_loss

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 0], [4, 4]])
CASES = {
    **{name: (loss, {}) for name, loss in GLOBAL_LOSSES.items()},
    "hn centred": (hard_negative_loss, {"center": "mean", "margin": 0.1}),
    "hn frozen": (
        hard_negative_loss,
        {"margin_text": make_pairs(6, 3, seed=4)[1].detach(), "center": "mean"},
    ),
    "siglip boosted": (siglip_loss, {"gamma": 0.5}),
    "debiased off the floor": (debiased_loss, {"tau_plus": 1e-6}),
}


def mean_over_shards(loss, size, n=6):
    """The mean of `loss` over equal shards of n pairs."""
    return lambda *x: torch.stack([loss(*x, offset=o, rows=size) for o in range(0, n, size)]).mean()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("ids", [None, IDS], ids=["no ids", "ids"])
@pytest.mark.parametrize("case", CASES)
def test_mean_over_shards_is_the_whole_batch(case, ids, size):
    loss, options = CASES[case]
    leaves = make_pairs(6, 5)

    def whole(*x, **shard):
        return loss(*x, ids=ids, **options, **shard)

    assert_equal(value_and_grads(mean_over_shards(whole, size), leaves), value_and_grads(whole, leaves))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("ids", [None, IDS], ids=["no ids", "ids"])
def test_mean_over_token_shards_is_the_whole_batch(ids, size):
    leaves, masks = make_tokens(6, 5, 6, 4)

    def whole(patches, words, scale, **shard):
        return token_loss(patches, words, *masks, scale, ids=ids, **shard)

    assert_equal(value_and_grads(mean_over_shards(whole, size), leaves), value_and_grads(whole, leaves))


def test_shards_differ_from_each_other():
    leaves = make_pairs(6, 5)
    for loss in GLOBAL_LOSSES.values():
        assert loss(*leaves, offset=0, rows=3) != loss(*leaves, offset=3, rows=3)


class Gather(torch.autograd.Function):
    """The tensors of all processes in order; the gradients of all processes are summed on the way back."""

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


def one_process(rank, world, folder):
    """Hold a shard, gather the rest, and write what data parallelism would make of the gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    token_leaves, masks = make_tokens(6, 5, 6, 4)
    results = {}
    for name, leaves, loss in (
        ("hn", make_pairs(6, 5), lambda i, t, s, **k: hard_negative_loss(i, t, s, ids=IDS, **k)),
        ("token", token_leaves, lambda p, w, s, **k: token_loss(p, w, *masks, s, ids=IDS, **k)),
    ):
        rows = 6 // world
        *vectors, scale = leaves
        local = [v.detach()[rank * rows : (rank + 1) * rows].requires_grad_() for v in vectors]
        gathered = [Gather.apply(part) for part in local]
        value = loss(*gathered, scale, offset=rank * rows, rows=rows)
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
    token_leaves, masks = make_tokens(6, 5, 6, 4)
    expected = {
        "hn": value_and_grads(lambda *x: hard_negative_loss(*x, ids=IDS), make_pairs(6, 5)),
        "token": value_and_grads(lambda p, w, s: token_loss(p, w, *masks, s, ids=IDS), token_leaves),
    }
    for name, (value, *by_vectors, by_scale) in expected.items():
        for rank in ranks:
            assert_equal([rank[name][0], rank[name][-1]], [value, by_scale])
        joined = [torch.cat(parts) for parts in zip(*(rank[name][1:-1] for rank in ranks))]
        assert_equal(joined, by_vectors)
