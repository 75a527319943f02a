from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_twins import assert_equal, info_nce, make_pairs, make_tokens, negatives_of, twin_token, value_and_grads
from torch.utils._python_dispatch import TorchDispatchMode

from hnclip.losses import token, token_loss, token_scores

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 3]])


def evaluate(leaves, masks, autocast=False, **options):
    return value_and_grads(lambda p, w, s: token_loss(p, w, *masks, s, **options), leaves, autocast)


@pytest.fixture(params=["packed", "padded"])
def layout(request, monkeypatch):
    """Only the tokens that count, as on a processor; or copies in place of the others, as on an accelerator."""
    monkeypatch.setattr(token, "host_knows_lengths", lambda *_: request.param == "packed")
    return request.param


def eager_token(patches, words, scale, patch_mask, word_mask, ids=None, offset=0, rows=None):
    """All similarities at once, for any queries."""
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


@pytest.mark.parametrize("ids", [None, IDS], ids=["none", "two columns"])
@pytest.mark.parametrize(("p", "q"), [(6, 7), (3, 9), (4, 3)])
def test_equals_the_triple_loop(layout, p, q, ids):
    leaves, masks = make_tokens(5, p, q, 4)
    expected = value_and_grads(lambda pa, wo, s: twin_token(pa, wo, s, *masks, ids=ids), leaves)
    assert_equal(evaluate(leaves, masks, ids=ids), expected)


@pytest.mark.parametrize("ids", [None, IDS], ids=["none", "two columns"])
@pytest.mark.parametrize("tile", [(1, 1, 1), (4, 9, 5), (9, 4, 14)])
@pytest.mark.parametrize("shard", [{}, {"offset": 1, "rows": 3}], ids=["whole", "shard"])
def test_tiles_change_nothing(monkeypatch, layout, tile, shard, ids):
    leaves, masks = make_tokens(5, 6, 7, 4)
    expected = value_and_grads(lambda p, w, s: eager_token(p, w, s, *masks, ids=ids, **shard), leaves)
    assert_equal(evaluate(leaves, masks, ids=ids, **shard), expected)
    sizes = spy_on_products(monkeypatch, tile)
    assert_equal(evaluate(leaves, masks, ids=ids, **shard), expected)
    assert len(sizes) > 1
    words, patches, _ = tile
    assert max(size[0] for size in sizes) <= max(words, 7)
    assert max(size[1] for size in sizes) <= max(patches, 6)


def use_tiles(monkeypatch, words, patches, vectors):
    for name, value in (("WORDS", words), ("PATCHES", patches), ("VECTORS", vectors)):
        monkeypatch.setattr(token_scores, name, {"cpu": value})


def spy_on_products(monkeypatch, tile):
    sizes = []
    product = token_scores.product

    def counted(left, right):
        sizes.append((len(left), len(right)))
        return product(left, right)

    monkeypatch.setattr(token_scores, "product", counted)
    use_tiles(monkeypatch, *tile)
    return sizes


@pytest.mark.parametrize("shard", [None, (0, 2), (1, 3), (4, 1)])
def test_every_similarity_that_counts_is_computed_once_and_no_other(monkeypatch, shard):
    leaves, masks = make_tokens(5, 6, 7, 4)
    sizes = spy_on_products(monkeypatch, (5, 9, 4))
    offset, rows = shard or (0, None)
    evaluate(leaves, masks, offset=offset, rows=rows)
    patches, words = (mask.sum(1) for mask in masks)
    local = slice(offset, None if rows is None else offset + rows)
    others = patches.sum() - patches[local].sum()
    needed = patches[local].sum() * words.sum() + others * words[local].sum()
    assert sum(a * b for a, b in sizes) == needed


class Watch(TorchDispatchMode):
    """The operations that run, and the elements of the largest tensor that they make."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(function.overloadpacket.__name__)
        made = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.largest = max([self.largest, *(t.untyped_storage().nbytes() // t.element_size() for t in made)])
        return result


def test_similarities_never_exist_together_and_are_not_computed_again(monkeypatch, layout):
    n, p, q, d = 24, 18, 16, 3
    leaves, masks = make_tokens(n, p, q, d)
    use_tiles(monkeypatch, 40, 50, 60)
    with Watch() as forward:
        loss = token_loss(*leaves[:2], *masks, leaves[2], check_values=False)
    with Watch() as backward:
        torch.autograd.grad(loss, leaves)
    positions = n * n * max(p, q)
    assert max(forward.largest, backward.largest) <= positions < n * n * p * q / 10
    assert "mm" in forward.names
    assert not {"mm", "bmm", "addmm"} & set(backward.names)


def test_a_tile_is_small_whatever_the_batch():
    assert token_scores.WORDS["cpu"] * token_scores.PATCHES["cpu"] * 4 <= 2**22
    assert token_scores.VECTORS["cpu"] * 768 * 4 <= 2**23
    assert token_scores.ON_ACCELERATOR**2 * 4 <= 2**26


def test_positions_are_all_that_is_kept_for_the_backward_pass(layout):
    n, p, q, d = 8, 6, 7, 3
    leaves, masks = make_tokens(n, p, q, d)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        token_loss(leaves[0], leaves[1], *masks, leaves[2])
    pointers = {leaf.data_ptr() for leaf in leaves}
    large = [t for t in saved if t.data_ptr() not in pointers and t.numel() > n * n]
    assert [t.dtype for t in large] == [torch.int16] * 2
    assert sum(t.numel() for t in large) <= n * n * (p + q)


@pytest.mark.parametrize("shard", [{}, {"offset": 1, "rows": 3}], ids=["whole", "shard"])
def test_an_accelerator_is_never_waited_for(monkeypatch, shard):
    """Tensors without values: whatever needs one on the host, or makes a shape of one, is an error."""
    monkeypatch.setattr(token_scores, "product", lambda left, right: left @ right.T)  # there is no autocast for them
    leaves = [torch.empty(shape, device="meta", requires_grad=True) for shape in ((5, 50, 4), (5, 40, 4), ())]
    masks = [torch.empty(5, t, dtype=torch.bool, device="meta") for t in (50, 40)]
    options = {"ids": IDS.to("meta"), **shard}
    loss = token_loss(*leaves[:2], *masks, leaves[2], check_values=False, **options)
    grads = torch.autograd.grad(loss, leaves)
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]
    with pytest.raises(RuntimeError, match="meta"):
        token_loss(*leaves[:2], *masks, leaves[2], check_values=True, **options)


@pytest.mark.parametrize(
    ("device", "check_values", "known"),
    [("cpu", False, True), ("cpu", True, True), ("cuda", False, False), ("cuda", True, True), ("mps", False, False)],
)
def test_lengths_are_looked_at_where_nobody_has_to_wait(device, check_values, known):
    assert token.host_knows_lengths(torch.device(device), check_values) is known


def test_the_first_of_equal_matches_gets_the_gradient(layout):
    _, masks = make_tokens(4, 50, 40, 3)
    masks[1][:] = torch.rand(4, 40, generator=torch.Generator().manual_seed(1)) < 0.9
    # Products of small integers are exact, so matches that are equal on paper are equal here.
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randint(-2, 3, (4, t, 3), generator=generator).double().requires_grad_() for t in (50, 40)]
    leaves.append(torch.tensor(0.5, dtype=torch.float64, requires_grad=True))
    first = value_and_grads(lambda p, w, s: eager_token(p, w, s, *masks), leaves)
    assert_equal(evaluate(leaves, masks), first)
    backwards = [leaf.detach().flip(1).requires_grad_() for leaf in leaves[:2]]
    last = evaluate([*backwards, leaves[2]], [mask.flip(1) for mask in masks])
    assert_equal(last[:1], first[:1])
    assert (last[1].flip(1) - first[1]).abs().max() > 1e-3


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_costs_no_gradient(monkeypatch, layout, frozen):
    leaves, masks = make_tokens(5, 6, 7, 4)
    expected = evaluate(leaves, masks)
    shapes, gradient = [], token_scores.gradient
    monkeypatch.setattr(token_scores, "gradient", lambda own, *x: shapes.append(len(own.table)) or gradient(own, *x))
    leaves[frozen] = leaves[frozen].detach()
    loss = token_loss(*leaves[:2], *masks, leaves[2])
    loss.backward()
    assert leaves[frozen].grad is None
    assert shapes == [5 * (7, 6)[frozen]]
    assert_equal([loss, leaves[1 - frozen].grad, leaves[2].grad], [expected[0], expected[2 - frozen], expected[3]])


def test_without_gradient(layout):
    leaves, masks = make_tokens(5, 6, 7, 4)
    with torch.no_grad():
        loss = token_loss(*leaves[:2], *masks, leaves[2])
    assert not loss.requires_grad
    assert_equal([loss], [evaluate(leaves, masks)[0]])


def test_gradients_against_differences(layout):
    leaves, masks = make_tokens(3, 4, 5, 3)

    def weighted(patches, words, scale):
        return -2.5 * token_loss(patches, words, *masks, scale, offset=1, rows=2)

    assert torch.autograd.gradcheck(weighted, leaves)


def test_views_and_other_strides(layout):
    leaves, masks = make_tokens(5, 6, 7, 4)
    expected = evaluate(leaves, masks)
    wide = torch.zeros(5, 8, 6, dtype=torch.float64)
    wide[:, 1:7, :4] = leaves[0].detach()
    turned = leaves[1].detach().transpose(0, 1).contiguous()
    wide.requires_grad_()
    turned.requires_grad_()
    options = [wide, turned, leaves[2]]
    got = value_and_grads(lambda p, w, s: token_loss(p[:, 1:7, :4], w.transpose(0, 1), *masks, s), options)
    assert_equal([got[0], got[1][:, 1:7, :4], got[2].transpose(0, 1), got[3]], expected)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_masks_shards_and_tiles(data):
    n, p, q = (data.draw(st.integers(low, high)) for low, high in ((2, 6), (2, 40), (3, 40)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    leaves, _ = make_tokens(n, p, q, 3, seed=data.draw(st.integers(0, 99)))
    masks = [torch.rand(n, leaf.shape[1], generator=generator) < data.draw(st.floats(0.1, 1)) for leaf in leaves[:2]]
    for mask in masks:
        mask[:, 0] |= ~mask.any(1)
    offset = data.draw(st.integers(0, n - 1))
    shard = {"offset": offset, "rows": data.draw(st.integers(1, n - offset))}
    expected = value_and_grads(lambda p, w, s: eager_token(p, w, s, *masks, **shard), leaves)
    with pytest.MonkeyPatch.context() as patch:
        use_tiles(patch, *(data.draw(st.sampled_from([1, 7, 50, 500])) for _ in range(3)))
        packed = data.draw(st.booleans())
        patch.setattr(token, "host_knows_lengths", lambda *_: packed)
        assert_equal(evaluate(leaves, masks, **shard), expected)


def test_padding_is_never_read(layout):
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


def test_start_and_end_do_not_count(layout):
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
def test_computes_in_full_precision(layout, dtype, autocast):
    leaves, masks = make_tokens(5, 6, 7, 4)
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    expected = evaluate([leaf.detach().float().requires_grad_() for leaf in leaves], masks)
    got = evaluate(leaves, masks, autocast=autocast)
    assert got[0].dtype == torch.float32
    assert_equal([got[0]], [expected[0]], 0)
    assert_equal(got[1:], [grad.to(dtype) for grad in expected[1:]], 0 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 2, (torch.float32, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_dtypes_of_both_sides(layout, dtypes):
    leaves, masks = make_tokens(6, 40, 50, 32)
    given = [leaf.detach().to(dtype).requires_grad_() for leaf, dtype in zip(leaves, dtypes)]
    expected = value_and_grads(
        lambda p, w, s: eager_token(p.double(), w.double(), s, *masks), [*given, leaves[2].detach().requires_grad_()]
    )
    got = evaluate([*given, leaves[2]], masks)
    assert got[0].dtype == torch.promote_types(*dtypes)
    assert [grad.dtype for grad in got[1:3]] == list(dtypes)
    for a, b in zip(got, expected):
        tolerance = 1e-2 if b.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance * float(b.abs().max()))


def test_same_pairs_exchange_no_gradient(layout):
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
    "one infinite element": ("words", {"words": torch.tensor([0, 0, torch.inf, 0]).expand(3, 2, 4)}),
    "one negative infinite element": ("words", {"words": torch.tensor([0, 0, -torch.inf, 0]).expand(3, 2, 4)}),
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


def test_values_are_not_looked_at_when_told(layout):
    leaves, masks = make_tokens(3, 2, 4, 4)
    nan = torch.full_like(leaves[0], float("nan"))
    assert token_loss(nan, leaves[1], *masks, leaves[2], check_values=False).isnan()
    masks[1][0] = False
    assert token_loss(*leaves[:2], *masks, leaves[2], check_values=False).isnan()
