from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from live_memory import LiveMemory
from loss_twins import assert_equal, make_pairs, negatives_of, over_queries, value_and_grads

from hnclip.losses import clip_loss, smoothed_loss
from hnclip.losses import smoothed as module

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 3], [4, 4]])


def twin_smoothed(image, text, scale, smoothing=0.1, ids=None):
    """−Σ_j label_ij · log p_ij over the pairs that are not excluded."""

    def term(i, negatives, similarity, _):
        columns = [i, *negatives]
        total = sum(torch.exp(scale * similarity[j]) for j in columns)
        loss = 0.0
        for j in columns:
            label = smoothing / len(columns) + (1 - smoothing if j == i else 0.0)
            loss = loss - label * torch.log(torch.exp(scale * similarity[j]) / total)
        return loss / 2

    return over_queries(image, text, ids, term)


@pytest.mark.parametrize("ids", [None, IDS], ids=["none", "two columns"])
@pytest.mark.parametrize("smoothing", [0.1, 0.4])
def test_equals_the_double_loop(ids, smoothing):
    leaves = make_pairs(6, 4)
    options = {"smoothing": smoothing, "ids": ids}
    got = value_and_grads(lambda *x: smoothed_loss(*x, **options), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin_smoothed(*x, **options), leaves))


@pytest.mark.parametrize(("n", "d"), [(2, 1), (7, 5), (16, 4)])
def test_equals_the_cross_entropy_of_torch(n, d):
    def expected(image, text, scale):
        logits, target = scale * image @ text.T, torch.arange(n)
        return sum(F.cross_entropy(matrix, target, label_smoothing=0.1) for matrix in (logits, logits.T)) / 2

    leaves = make_pairs(n, d)
    assert_equal(value_and_grads(smoothed_loss, leaves), value_and_grads(expected, leaves))


@pytest.mark.parametrize("ids", [None, IDS], ids=["none", "two columns"])
def test_without_smoothing_it_is_infonce_bit_for_bit(ids):
    leaves = make_pairs(6, 4, dtype=torch.float32)
    got = value_and_grads(lambda *x: smoothed_loss(*x, smoothing=0, ids=ids), leaves)
    assert_equal(got, value_and_grads(lambda *x: clip_loss(*x, ids=ids), leaves), 0)


@pytest.mark.parametrize(("n", "minimum"), [(16, 0.565), (128, 0.804)])
def test_its_minimum_is_the_entropy_of_the_labels(n, minimum):
    """Reached by orthogonal pairs at the scale whose softmax is the label; smaller and larger ones are worse."""
    label = 0.9 + 0.1 / n
    best = torch.tensor(label / (0.1 / n)).log().item()
    pairs = torch.eye(n, dtype=torch.float64)
    losses = [smoothed_loss(pairs, pairs, factor * best).item() for factor in (0.9, 1.0, 1.1)]
    assert losses[1] == pytest.approx(minimum, abs=5e-4)
    assert losses[1] < min(losses[0], losses[2])
    assert smoothed_loss(pairs, pairs, 100.0) > 5  # a saturated InfoNCE is far from it


@pytest.mark.parametrize("rows", [None, 3])
def test_masks_in_several_blocks_change_nothing(rows, monkeypatch):
    leaves, options = make_pairs(6, 4), {"ids": IDS, "rows": rows}
    whole = value_and_grads(lambda *x: smoothed_loss(*x, **options), leaves)
    monkeypatch.setattr(module, "MASK_ELEMENTS", 12)
    assert_equal(value_and_grads(lambda *x: smoothed_loss(*x, **options), leaves), whole)


def test_large_batches_hold_no_matrix():
    n = 1100
    leaves = make_pairs(n, 4, dtype=torch.float32)
    with LiveMemory() as memory:
        smoothed_loss(*leaves, ids=torch.arange(n)[:, None]).backward()
    assert memory.largest < n * n


def test_half_precision_is_computed_in_float32():
    image, text, _ = make_pairs(6, 8, scale=20.0)
    half = smoothed_loss(image.bfloat16(), text.bfloat16(), 20.0)
    assert half.dtype == torch.float32
    assert half == smoothed_loss(image.bfloat16().float(), text.bfloat16().float(), 20.0)


def test_an_excluded_pair_has_no_share_of_the_label():
    """Without it, far-away duplicates would pull: moving one must change nothing for the query."""
    image, text, scale = make_pairs(5, 4)
    ids = torch.tensor([3, 3, 0, 1, 2])
    assert negatives_of(0, 5, ids) == [2, 3, 4]
    moved = text.detach().clone()
    moved[1] = -moved[1]
    assert smoothed_loss(image, text, scale, ids=ids, rows=1) == smoothed_loss(image, moved, scale, ids=ids, rows=1)
