from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from live_memory import LiveMemory
from loss_twins import assert_equal, make_tokens, value_and_grads

from hnclip.losses.late_interaction import late_interaction_scores, triplet_loss
from hnclip.losses.tiles import TILE_BYTES

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 3], [4, 4]])


def twin_scores(images, texts, image_mask, text_mask, slope=0.1):
    """One caption after the other, one picture after the other, as the formulas read."""
    columns = []
    for text, there in zip(texts, text_mask):
        scores = []
        for image, seen in zip(images, image_mask):
            match = F.leaky_relu(text[there] @ image[seen].T, slope)  # [K', K]
            scores.append(match.max(1).values.mean() + match.max(0).values.mean())
        columns.append(torch.stack(scores))
    return torch.stack(columns, 1)  # pictures × captions


def twin_triplet(scores, margin=0.2, ids=None):
    n = len(scores)
    rows = torch.arange(n)[:, None] if ids is None else ids
    total = scores.new_zeros(())
    by_image = [[scores.new_zeros(())] for _ in range(n)]
    by_text = [[scores.new_zeros(())] for _ in range(n)]
    for i in range(n):
        for j in range(n):
            if not (rows[i] == rows[j]).any():
                by_image[i].append(torch.clamp(margin + scores[i, j] - scores[i, i], min=0))
                by_text[j].append(torch.clamp(margin + scores[i, j] - scores[j, j], min=0))
    for hinges in (*by_image, *by_text):
        total = total + sum(hinges)
    return total


def tokens_of(n=6, k=5, t=7, d=4, seed=0):
    (images, texts, _), masks = make_tokens(n, k, t, d, seed)
    return [images, texts], masks


def weighted(scores):
    """A scalar that sees every score differently."""
    return sum((matrix * torch.linspace(-1, 2, matrix.numel()).view_as(matrix)).sum() for matrix in scores)


@pytest.mark.parametrize("slope", [0.1, 0.0, 1.0])
def test_scores_equal_the_double_loop(slope):
    leaves, masks = tokens_of()
    got = late_interaction_scores(*leaves, *masks, slope=slope)
    expected = twin_scores(*leaves, *masks, slope=slope)
    assert_equal(got, [expected, expected.T])
    assert (expected < 0.5).any()  # some matches are below 0, or the slope would not matter
    grads = (value_and_grads(lambda *x: weighted(late_interaction_scores(*x, *masks, slope=slope)), leaves)[1:],)
    twins = value_and_grads(
        lambda *x: weighted((twin_scores(*x, *masks, slope=slope), twin_scores(*x, *masks, slope=slope).T)), leaves
    )[1:]
    assert_equal(*grads, twins)


def test_negative_matches_count_a_tenth():
    """One token each: a score is twice the LeakyReLU of their product."""
    image = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    text = torch.tensor([[[-1.0, 0.0]], [[0.0, 1.0]]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    assert_equal([late_interaction_scores(image, text, mask, mask)[0]], [torch.tensor([[-0.2, 0.0], [0.0, 2.0]])])


@pytest.mark.parametrize(("offset", "rows"), [(0, 1), (1, 3), (4, 2), (0, 6)])
def test_shards_are_rows_of_the_whole(offset, rows):
    leaves, masks = tokens_of()
    whole, transposed = late_interaction_scores(*leaves, *masks)
    own = slice(offset, offset + rows)
    got = late_interaction_scores(*leaves, *masks, offset=offset, rows=rows)
    assert_equal(got, [whole[own], transposed[own]])


@pytest.mark.parametrize("rows", [None, 3])
def test_many_tiles_are_one_tile(rows, monkeypatch):
    leaves, masks = tokens_of()

    def loss(*x):
        return weighted(late_interaction_scores(*x, *masks, rows=rows))

    whole = value_and_grads(loss, leaves)
    for pairs in (1, 4, 10):
        monkeypatch.setitem(TILE_BYTES, "cpu", 8 * 5 * 7 * pairs)
        assert_equal(value_and_grads(loss, leaves), whole)


def test_similarities_of_all_pairs_never_exist_together(monkeypatch):
    monkeypatch.setitem(TILE_BYTES, "cpu", 4 * 40 * 40 * 16)
    images, texts = (torch.randn(24, 40, 8, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    mask = torch.ones(24, 40, dtype=torch.bool)
    with LiveMemory() as memory:
        leaves = images.requires_grad_(), texts.requires_grad_()
        weighted(late_interaction_scores(*leaves, mask, mask)).backward()
    assert memory.largest <= 40 * 40 * 16 < 24 * 24 * 40 * 40
    assert memory.peak < 24 * 24 * 40 * 40 * 4


def test_what_does_not_count_is_never_read():
    leaves, masks = tokens_of()

    def loss(images, texts):
        return weighted(late_interaction_scores(images, texts, *masks))

    expected = value_and_grads(loss, leaves)
    changed = [
        torch.where(mask[:, :, None], leaf, 100.0).detach().requires_grad_() for leaf, mask in zip(leaves, masks)
    ]
    assert_equal(value_and_grads(loss, changed), expected, 0)


def test_half_precision_and_autocast_are_computed_in_float32():
    (images, texts), masks = tokens_of()
    half = late_interaction_scores(images.bfloat16(), texts.bfloat16(), *masks)[0]
    assert half.dtype == torch.float32
    single = [images.bfloat16().float(), texts.bfloat16().float()]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = late_interaction_scores(*single, *masks)[0]
    assert torch.equal(half, late_interaction_scores(*single, *masks)[0])
    assert torch.equal(half, mixed)


@pytest.mark.parametrize("ids", [None, IDS, IDS[:, 0]], ids=["none", "two columns", "one column"])
@pytest.mark.parametrize("margin", [0.2, 0.7])
def test_the_hinge_equals_the_double_loop(ids, margin):
    scores = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).mul_(0.3)
    options = {"margin": margin, "ids": ids}
    rows = ids[:, None] if ids is not None and ids.ndim == 1 else ids
    got = value_and_grads(lambda x: triplet_loss(x, x.T, **options), [scores.requires_grad_()])
    assert_equal(got, value_and_grads(lambda x: twin_triplet(x, **{**options, "ids": rows}), [scores]))
    assert got[0] > 0


def test_from_tokens_to_the_loss_as_one_loop_does_it():
    leaves, masks = tokens_of(seed=3)
    got = value_and_grads(lambda *x: triplet_loss(*late_interaction_scores(*x, *masks), ids=IDS), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin_triplet(twin_scores(*x, *masks), ids=IDS), leaves))


def test_it_is_a_sum():
    """Equal scores everywhere: every ordered pair of different things costs the margin, in both directions."""
    for n in (2, 7):
        equal = torch.ones(n, n)
        assert triplet_loss(equal, equal).item() == pytest.approx(2 * n * (n - 1) * 0.2)
    assert triplet_loss(equal, equal, ids=torch.zeros(7, dtype=torch.long)) == 0


@pytest.mark.parametrize("sizes", [[3, 3], [1, 5], [2, 3, 1]], ids=str)
def test_weighted_shards_are_the_whole(sizes):
    """As processes do it: (W·R / N)·term, averaged over W processes."""
    leaves, masks = tokens_of()

    def whole(*x, **shard):
        scores = late_interaction_scores(*x, *masks, **shard)
        return triplet_loss(*scores, ids=IDS, offset=shard.get("offset", 0))

    def shards(*x):
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        return sum(rows / 6 * whole(*x, offset=start, rows=rows) for start, rows in zip(starts, sizes))

    assert_equal(value_and_grads(shards, leaves), value_and_grads(whole, leaves))


def test_errors():
    tokens, mask = torch.ones(3, 2, 4), torch.ones(3, 2, dtype=torch.bool)
    for match, arguments in {
        "image_tokens must have 3 dimensions": (torch.ones(3, 4), tokens, mask, mask),
        "image_mask must be bool": (tokens, tokens, mask.int(), mask),
        r"text_mask must have shape \(3, 2\)": (tokens, tokens, mask, mask[:2]),
        "must agree in pairs and width": (tokens, torch.ones(3, 2, 5), mask, mask),
    }.items():
        with pytest.raises(ValueError, match=match):
            late_interaction_scores(*arguments)
    for options in ({"slope": -0.1}, {"slope": 1.5}, {"offset": 3, "rows": 1}, {"rows": 4}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must .*got"):
            late_interaction_scores(tokens, tokens, mask, mask, **options)
    scores = torch.ones(2, 3)
    for match, call in {
        "margin": {"margin": -1.0},
        "ids": {"ids": torch.arange(2)},
        "rows": {"offset": 2},
    }.items():
        with pytest.raises(ValueError, match=f"{match} must .*got"):
            triplet_loss(scores, scores, **call)
    with pytest.raises(ValueError, match="must have the same shape"):
        triplet_loss(scores, scores.T)


def test_a_pair_without_tokens_shows():
    (images, texts), (image_mask, text_mask) = tokens_of()
    image_mask[2] = False
    scores, _ = late_interaction_scores(images, texts, image_mask, text_mask)
    assert scores.isnan().any(1).tolist() == [row == 2 for row in range(6)]
