"""Late interaction against a triple loop and for any tiles; FineLIP's hinge is compared in tests/objectives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hnclip.losses import token_loss
from hnclip.losses.tiled import TILE_BYTES
from live_memory import LiveMemory
from loss_twins import (
    assert_equal,
    info_nce,
    make_pairs,
    make_tokens,
    negatives_of,
    value_and_grads,
)


def evaluate(leaves, masks, autocast=False, **options):
    return value_and_grads(lambda p, w, s: token_loss(p, w, *masks, s, **options), leaves, autocast)


def eager_token(patches, words, scale, patch_mask, word_mask, ids=None, offset=0, rows=None):
    """The definition with all similarities at once, for any queries."""
    n = len(patches)
    similarity = torch.einsum("ipd,jqd->ijpq", patches, words)
    best_word = similarity.masked_fill(~word_mask[None, :, None, :], -torch.inf).max(3).values  # [N, N, P]
    best_patch = similarity.masked_fill(~patch_mask[:, None, :, None], -torch.inf).max(2).values  # [N, N, Q]
    image_to_text = (best_word * patch_mask[:, None]).sum(2) / patch_mask.sum(1)[:, None]
    text_to_image = ((best_patch * word_mask).sum(2) / word_mask.sum(1)).T
    allowed = torch.tensor([[j == i or j in negatives_of(i, n, ids) for j in range(n)] for i in range(n)])
    queries = slice(offset, n if rows is None else offset + rows)
    target = torch.arange(n)[queries]
    logits = [(scale * s).masked_fill(~allowed, -torch.inf)[queries] for s in (image_to_text, text_to_image)]
    return sum(F.cross_entropy(matrix, target) for matrix in logits) / 2


@settings(max_examples=40)
@given(data=st.data())
def test_equals_the_definition_for_any_masks_duplicates_shards_and_tiles(data):
    """tests/objectives compares the term with a loop over pairs and tokens."""
    n, p, q = (data.draw(st.integers(low, high)) for low, high in ((2, 6), (2, 20), (3, 20)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    leaves, _ = make_tokens(n, p, q, 3, seed=data.draw(st.integers(0, 99)))
    masks = [torch.rand(n, leaf.shape[1], generator=generator) < data.draw(st.floats(0.1, 1)) for leaf in leaves[:2]]
    for mask in masks:
        mask[:, 0] |= ~mask.any(1)
    offset = data.draw(st.integers(0, n - 1))
    ids = data.draw(st.sampled_from([None, torch.stack([torch.arange(n) // 2, torch.arange(n) % 3], 1)]))
    shard = {"offset": offset, "rows": data.draw(st.integers(1, n - offset)), "ids": ids}
    expected = value_and_grads(lambda p, w, s: eager_token(p, w, s, *masks, **shard), leaves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TILE_BYTES, "cpu", 8 * p * q * data.draw(st.sampled_from([1, 3, 8, 50])))
        assert_equal(evaluate(leaves, masks, **shard), expected)


def test_similarities_of_all_pairs_never_exist_together(monkeypatch):
    n, p, q = 24, 18, 16
    leaves, masks = make_tokens(n, p, q, 3)
    monkeypatch.setitem(TILE_BYTES, "cpu", 8 * p * q * 9)
    with LiveMemory() as memory:
        torch.autograd.grad(token_loss(*leaves[:2], *masks, leaves[2]), leaves)
    assert memory.largest <= p * q * 9
    assert memory.peak < n * n * p * q * 8 / 2


def test_masked_tokens_are_not_read():
    leaves, masks = make_tokens(5, 6, 7, 4)
    expected = evaluate(leaves, masks)
    other = [torch.where(mask[:, :, None], leaf.detach(), float("nan")) for leaf, mask in zip(leaves, masks)]
    got = evaluate([*(t.requires_grad_() for t in other), leaves[2]], masks)
    assert_equal(got, expected)


def test_one_token_each_is_infonce():
    leaves = make_pairs(5, 4)
    masks = [torch.ones(5, 1, dtype=torch.bool)] * 2
    got = value_and_grads(lambda i, t, s: token_loss(i[:, None], t[:, None], *masks, s), leaves)
    assert_equal(got, value_and_grads(info_nce, leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_computes_in_full_precision(dtype, autocast):
    leaves, masks = make_tokens(5, 6, 7, 4)
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    expected = evaluate([leaf.detach().float().requires_grad_() for leaf in leaves], masks)
    got = evaluate(leaves, masks, autocast=autocast)
    assert got[0].dtype == torch.float32
    assert_equal([got[0]], [expected[0]], 0)
    assert_equal(got[1:], [grad.to(dtype) for grad in expected[1:]], 0 if dtype == torch.float32 else 1e-2)
