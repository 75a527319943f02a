from __future__ import annotations

import pytest
import torch
from loss_twins import assert_equal, info_nce, make_pairs, make_tokens, twin_token, value_and_grads

from hnclip.losses import token, token_loss

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 3]])


def evaluate(leaves, masks, autocast=False, **options):
    return value_and_grads(lambda p, w, s: token_loss(p, w, *masks, s, **options), leaves, autocast)


@pytest.mark.parametrize("ids", [None, IDS], ids=["none", "two columns"])
@pytest.mark.parametrize(("p", "q"), [(6, 7), (3, 9), (4, 3)])
def test_equals_the_triple_loop(p, q, ids):
    leaves, masks = make_tokens(5, p, q, 4)
    expected = value_and_grads(lambda pa, wo, s: twin_token(pa, wo, s, *masks, ids=ids), leaves)
    assert_equal(evaluate(leaves, masks, ids=ids), expected)


@pytest.mark.parametrize("ids", [None, IDS], ids=["none", "two columns"])
@pytest.mark.parametrize("budget", [1, 300, 700])
@pytest.mark.parametrize("shard", [{}, {"offset": 1, "rows": 3}], ids=["whole", "shard"])
def test_chunks_change_nothing(monkeypatch, budget, shard, ids):
    leaves, masks = make_tokens(5, 6, 7, 4)
    whole = evaluate(leaves, masks, ids=ids, **shard)
    sizes = spy_on_chunks(monkeypatch, budget)
    assert_equal(evaluate(leaves, masks, ids=ids, **shard), whole)
    assert len(sizes) > 1
    one_query = 5 * 6 * 5
    assert max(sizes) <= max(budget, one_query)


def spy_on_chunks(monkeypatch, budget):
    sizes = []
    product = token.product

    def counted(left, right):
        sizes.append(len(left) * len(right))
        return product(left, right)

    monkeypatch.setattr(token, "product", counted)
    monkeypatch.setattr(token, "CHUNK_ELEMENTS", budget)
    return sizes


def test_the_whole_batch_shares_one_product_between_directions(monkeypatch):
    leaves, masks = make_tokens(4, 6, 7, 4)
    sizes = spy_on_chunks(monkeypatch, 10**6)
    evaluate(leaves, masks)
    assert len(sizes) == 1


def test_no_similarity_is_kept_for_the_backward_pass():
    n, p, q, d = 8, 6, 7, 3
    leaves, masks = make_tokens(n, p, q, d)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        token_loss(leaves[0], leaves[1], *masks, leaves[2])
    used_words = q - 2
    assert max(saved) <= n * n * p < n * p * n * used_words


def test_padding_is_never_read():
    leaves, masks = make_tokens(5, 6, 7, 4)
    expected = evaluate(leaves, masks)
    garbage = [torch.full((5, 3, 4), value, dtype=torch.float64) for value in (1e30, float("nan"))]
    tokens = [torch.where(mask[:, :, None], leaf.detach(), float("nan")) for leaf, mask in zip(leaves, masks)]
    padded = [torch.cat([t, g], 1).requires_grad_() for t, g in zip(tokens, garbage)]
    padded_masks = [torch.cat([mask, torch.zeros(5, 3, dtype=torch.bool)], 1) for mask in masks]
    got = evaluate([*padded, leaves[2]], padded_masks)
    assert_equal([got[0], got[1][:, :6], got[2][:, :7], got[3]], expected)
    assert (got[1][:, 6:] == 0).all()
    assert (got[2][:, 7:] == 0).all()


def test_start_and_end_do_not_count():
    leaves, masks = make_tokens(5, 6, 7, 4)
    expected = evaluate(leaves, masks)
    moved = leaves[1].detach().clone()
    moved[:, 0] = 5.0  # the start token
    moved[:, -1] = -5.0  # the end of the longest
    got = evaluate([leaves[0], moved.requires_grad_(), leaves[2]], masks)
    assert_equal(got, expected)
    counted = masks[1].clone()
    counted[:, 0] = True
    assert abs(evaluate(leaves, [masks[0], counted])[0] - expected[0]) > 1e-4


def test_one_token_each_is_infonce():
    image, text, scale = make_pairs(5, 4)
    masks = [torch.ones(5, 1, dtype=torch.bool)] * 2
    got = value_and_grads(lambda i, t, s: token_loss(i[:, None], t[:, None], *masks, s), [image, text, scale])
    assert_equal(got, value_and_grads(info_nce, [image, text, scale]))


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


def test_same_pairs_exchange_no_gradient():
    leaves, masks = make_tokens(4, 6, 7, 4)
    _, by_patches, by_words, _ = evaluate(leaves, masks, ids=torch.tensor([7, 7, 1, 2]), rows=1)
    assert (by_patches[1] == 0).all()
    assert (by_words[1] == 0).all()
    assert (by_patches[2:] != 0).any()


BROKEN = {
    "patches ndim": ("patches", {"patches": torch.zeros(3, 4)}),
    "words ndim": ("words", {"words": torch.zeros(3, 2, 2, 4)}),
    "pairs differ": ("patches and words", {"words": torch.zeros(4, 2, 4), "word_mask": torch.ones(4, 2) > 0}),
    "width differs": ("patches and words", {"words": torch.zeros(3, 2, 5)}),
    "integer words": ("words", {"words": torch.zeros(3, 2, 4, dtype=torch.long)}),
    "NaN patch": ("patches", {"patches": torch.full((3, 2, 4), float("nan"))}),
    "infinite word": ("words", {"words": torch.full((3, 2, 4), float("inf"))}),
    "patch_mask dtype": ("patch_mask", {"patch_mask": torch.ones(3, 2)}),
    "word_mask shape": ("word_mask", {"word_mask": torch.ones(3, 5) > 0}),
    "empty caption": ("word_mask", {"word_mask": torch.tensor([[1, 1], [0, 0], [1, 0]]) > 0}),
    "no patch": ("patch_mask", {"patch_mask": torch.zeros(3, 2) > 0}),
    "scale": ("scale", {"scale": -1.0}),
    "ids": ("ids", {"ids": torch.zeros(3)}),
    "rows": ("rows", {"rows": 4}),
    "offset": ("offset", {"offset": 3, "rows": 1}),
    "rows missing": ("rows", {"offset": 1}),
}


@pytest.mark.parametrize(("message", "change"), BROKEN.values(), ids=BROKEN)
def test_errors_name_the_argument(message, change):
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "patches": torch.randn(3, 2, 4, generator=generator),
        "words": torch.randn(3, 2, 4, generator=generator),
        "patch_mask": torch.ones(3, 2, dtype=torch.bool),
        "word_mask": torch.ones(3, 2, dtype=torch.bool),
        "scale": 5.0,
    }
    token_loss(**arguments)
    with pytest.raises(ValueError, match=rf"^{message} must .*got"):
        token_loss(**{**arguments, **change})


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_pairs(n):
    tokens, mask = torch.zeros(n, 2, 4), torch.ones(n, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^patches must .*no negatives"):
        token_loss(tokens, tokens, mask, mask, 5.0)


def test_values_are_not_looked_at_when_told():
    leaves, masks = make_tokens(3, 2, 4, 4)
    nan = torch.full_like(leaves[0], float("nan"))
    assert token_loss(nan, leaves[1], *masks, leaves[2], check_values=False).isnan()
    masks[1][0] = False
    assert token_loss(*leaves[:2], *masks, leaves[2], check_values=False).isnan()
