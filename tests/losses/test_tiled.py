"""Tiles against the eager loss, which test_hard_negative.py compares with the definition; memory of tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hnclip.losses import GLOBAL_LOSSES, hard_negative_loss
from hnclip.losses.tiled import TILE_BYTES, loss_from_tiles
from live_memory import LiveMemory
from loss_twins import assert_equal, make_pairs, value_and_grads

OPTIONS = {
    "paper": {},
    "infonce": {"gamma": 0.0},
    "centred": {"gamma": 0.8, "center": 0.2, "margin": 0.1},
    "mean": {"center": "mean"},
    "frozen mean": {"margin_text": make_pairs(40, 9, seed=5)[1].detach(), "center": "mean", "margin": 0.2},
}
IDS = {
    "none": None,
    "one column": torch.arange(40) % 5,
    "two columns": torch.stack([torch.arange(40) // 2, torch.arange(40) * 7 % 13], 1),
}


def cut(options: dict, ids: Tensor | None, n: int) -> dict:
    """The options for the first n pairs."""
    options = {**options, "ids": None if ids is None else ids[:n]}
    if "margin_text" in options:
        options["margin_text"] = options["margin_text"][:n]
    return options


def close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Equal up to `tolerance` of the largest element (of 0.1 where terms of that size cancel), and in dtype."""
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=0.1)


@settings(max_examples=60)
@given(
    n=st.integers(2, 40),
    d=st.integers(1, 7),
    elements=st.integers(1, 900),
    shard=st.tuples(st.integers(0, 39), st.integers(1, 40)) | st.none(),
    options=st.sampled_from(sorted(OPTIONS)),
    ids=st.sampled_from(sorted(IDS)),
    scale=st.floats(0.5, 60),
    seed=st.integers(0, 99),
)
def test_equals_the_eager_loss(n, d, elements, shard, options, ids, scale, seed):
    leaves = make_pairs(n, d, seed=seed, scale=scale)
    given = cut(OPTIONS[options], IDS[ids], n)
    if shard:
        offset = shard[0] % n
        given |= {"offset": offset, "rows": 1 + shard[1] % (n - offset)}
    got = value_and_grads(lambda *x: loss_from_tiles(*x, **given, size=8 * elements), leaves)
    close(got, value_and_grads(lambda *x: hard_negative_loss(*x, **given), leaves), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_half_precision_inputs_and_autocast_compute_in_float32(options, dtype):
    leaves = make_pairs(33, 6, scale=20.0, dtype=dtype)
    given = cut(OPTIONS[options], IDS["one column"], 33)
    double = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = value_and_grads(lambda *x: hard_negative_loss(*x, **given), double)

    def loss(*x):
        return loss_from_tiles(*x, **given, size=400)

    got = value_and_grads(loss, leaves)
    close(got[:1], [expected[0].float()], 1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    close(got[1:], [grad.to(dtype) for grad in expected[1:]], tolerance)
    with torch.autocast("cpu", torch.bfloat16):  # around the backward pass too
        value = loss(*leaves)
        assert_equal([value.detach(), *torch.autograd.grad(value, leaves)], got, 0)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)], ids=str)
@pytest.mark.parametrize("shard", [{}, {"offset": 2, "rows": 5}])
def test_frozen_inputs_get_no_gradient_and_cost_no_product(wanted, shard):
    given = make_pairs(12, 4)
    expected = value_and_grads(lambda *x: hard_negative_loss(*x, **shard), given)[1:]
    leaves = [leaf.detach().requires_grad_(bool(want)) for leaf, want in zip(given, wanted)]
    with LiveMemory() as memory:
        loss_from_tiles(*leaves, **shard, size=200).backward()
    for leaf, want, grad in zip(leaves, wanted, expected):
        assert (leaf.grad is not None) == want
        if want:
            close([leaf.grad], [grad], 1e-10)
    tiles = memory.calls["aten.mm.out"]  # forward and backward; one more product for each side that wants a gradient
    assert memory.calls["aten.addmm_.default"] == tiles // 2 * (wanted[0] + wanted[1])


@pytest.mark.parametrize("ids", [[5, 5, 5], [5, 5, 6]], ids=str)
def test_pairs_without_any_negative_stay_finite(ids):
    leaves = make_pairs(3, 4, scale=100.0, dtype=torch.float32)
    got = value_and_grads(lambda *x: loss_from_tiles(*x, ids=torch.tensor(ids), size=8), leaves)
    assert all(torch.isfinite(result).all() for result in got)
    assert len(set(ids)) == 2 or all((result == 0).all() for result in got)


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_far_beyond_the_range_of_exp(sign):
    image, text, scale = make_pairs(6, 4, scale=1e4, dtype=torch.float32)
    leaves = [image, (sign * text).detach().requires_grad_(), scale]
    double = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got = value_and_grads(lambda *x: loss_from_tiles(*x, size=36), leaves)
    expected = value_and_grads(hard_negative_loss, double)
    close(got, [e.float() for e in expected], 1e-2 if sign > 0 else 1e-4)


@pytest.mark.parametrize(("n", "rows"), [(1030, None), (2100, 520)])
@pytest.mark.parametrize("name", ["hn", "infonce", "fixed_margin"])
def test_large_batches_hold_no_logits(name, n, rows):
    leaves = make_pairs(n, 4, dtype=torch.float32)
    with LiveMemory() as memory:
        GLOBAL_LOSSES[name](*leaves, rows=rows).backward()
    assert memory.largest * 4 <= TILE_BYTES["cpu"] < (rows or n) * n * 4
