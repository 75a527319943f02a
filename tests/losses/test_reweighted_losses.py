from __future__ import annotations

import math

import pytest
import torch
from loss_twins import assert_equal, info_nce, make_pairs, twin_hcl, twin_hn_nce, value_and_grads

from hnclip.losses import debiased_floor_rows, debiased_loss, hcl_loss, hn_nce_loss
from hnclip.losses.reweighted import log_weights

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 3], [4, 4]])
BOTH_IDS = pytest.mark.parametrize("ids", [None, IDS], ids=["none", "two columns"])


@BOTH_IDS
@pytest.mark.parametrize("scale", [5.0, 100.0])
@pytest.mark.parametrize("options", [{}, {"alpha": 0.7, "beta": 0.5}, {"alpha": 0.0}], ids=str)
def test_hn_nce_equals_the_double_loop(ids, scale, options):
    leaves = make_pairs(6, 4, scale=scale)
    got = value_and_grads(lambda *x: hn_nce_loss(*x, **options, ids=ids), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin_hn_nce(*x, **options, ids=ids), leaves), 1e-11)


@BOTH_IDS
@pytest.mark.parametrize("scale", [1.5, 5.0, 50.0])
@pytest.mark.parametrize("options", [{}, {"beta": 0.5, "tau_plus": 0.1}, {"beta": 0.0, "tau_plus": 0.3}], ids=str)
def test_hcl_equals_the_double_loop(ids, scale, options):
    leaves = make_pairs(6, 4, scale=scale)
    got = value_and_grads(lambda *x: hcl_loss(*x, **options, ids=ids), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin_hcl(*x, **options, ids=ids), leaves), 1e-11)


@BOTH_IDS
@pytest.mark.parametrize("scale", [1.5, 20.0])
@pytest.mark.parametrize("tau_plus", [0.01, 0.2])
def test_debiased_equals_the_double_loop(ids, scale, tau_plus):
    leaves = make_pairs(6, 4, scale=scale)
    got = value_and_grads(lambda *x: debiased_loss(*x, tau_plus=tau_plus, ids=ids), leaves)
    expected = value_and_grads(lambda *x: twin_hcl(*x, beta=0.0, tau_plus=tau_plus, ids=ids), leaves)
    assert_equal(got, expected, 1e-11)


@pytest.mark.parametrize("scale", [5.0, 100.0])
def test_special_cases_are_infonce(scale):
    leaves = make_pairs(6, 4, scale=scale)
    expected = value_and_grads(info_nce, leaves)
    for loss in (
        lambda *x: hn_nce_loss(*x, alpha=1.0, beta=0.0),
        lambda *x: hcl_loss(*x, beta=0.0, tau_plus=0.0),
        lambda *x: debiased_loss(*x, tau_plus=0.0),
    ):
        assert_equal(value_and_grads(loss, leaves), expected)


def test_hn_nce_is_hcl_without_debiasing():
    leaves = make_pairs(6, 4)
    got = value_and_grads(lambda *x: hn_nce_loss(*x, beta=0.6), leaves)
    assert_equal(got, value_and_grads(lambda *x: hcl_loss(*x, beta=0.6), leaves))


def test_weights_sum_to_the_number_of_negatives_in_every_row():
    image, text, scale = (leaf.detach() for leaf in make_pairs(6, 4))
    logits, negatives = scale * image @ text.T, ~torch.eye(6, dtype=torch.bool)
    weights = log_weights(logits, negatives, 0.5).exp()
    assert_equal([weights.sum(1)], [torch.full((6,), 5.0, dtype=torch.float64)])
    assert (weights.diagonal() == 0).all()
    # Dividing by the row sums without a new axis normalises columns instead, and sums to something else.
    raw = (0.5 * logits).exp() * negatives
    assert (5 * raw / raw.sum(1) - weights).abs().max() > 0.1
    assert ((5 * raw / raw.sum(1)).sum(1) - 5).abs().max() > 0.1


def test_large_scale_does_not_overflow():
    leaves = make_pairs(6, 4, scale=1000.0, dtype=torch.float32)
    for loss in (hn_nce_loss, hcl_loss, debiased_loss):
        assert all(torch.isfinite(result).all() for result in value_and_grads(loss, leaves))


def gap(n: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors whose positives have similarity 0.3 and whose negatives have 0.1."""
    return torch.eye(n), torch.full((n, n), 0.1) + 0.2 * torch.eye(n)


@pytest.mark.parametrize(
    ("scale", "tau_plus", "expected"),
    [(100.0, 0.01, 32), (33.0, 0.01, 32), (100.0, 1e-12, 0), (100.0, 0.0, 0), (1.0, 0.01, 0)],
)
def test_floor_rows(scale, tau_plus, expected):
    assert debiased_floor_rows(*gap(), scale, tau_plus=tau_plus).item() == expected


def test_floor_rows_count_shards_and_ids():
    image, text = gap()
    text[3, 4] = text[4, 3] = 0.4  # these two keep a negative above their positive in both directions
    assert debiased_floor_rows(image, text, 100.0).item() == 28
    shards = [debiased_floor_rows(image, text, 100.0, offset=offset, rows=4) for offset in (0, 4, 8, 12)]
    assert [int(count) for count in shards] == [6, 6, 8, 8]
    ids = torch.arange(16)
    ids[4] = ids[3]
    assert debiased_floor_rows(image, text, 100.0, ids=ids).item() == 32


def test_floor_also_holds_above_zero():
    # What remains after the subtraction is positive here, and yet less than the floor.
    image = torch.eye(2, dtype=torch.float64).requires_grad_()
    text = torch.tensor([[0.9, -0.9], [-0.9, 0.9]], dtype=torch.float64).requires_grad_()
    leaves = [image, text, torch.tensor(3.0, dtype=torch.float64).requires_grad_()]
    assert math.exp(-3) > math.exp(-2.7) - 0.002 * math.exp(2.7) > 0
    assert debiased_floor_rows(*leaves, tau_plus=0.002).item() == 4
    got = value_and_grads(lambda *x: debiased_loss(*x, tau_plus=0.002), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin_hcl(*x, beta=0.0, tau_plus=0.002), leaves))


def test_rows_at_the_floor_give_their_negatives_no_gradient():
    image, text = gap()
    image, text = image.requires_grad_(), text.requires_grad_()
    loss = debiased_loss(image, text, 100.0, rows=1)
    by_image, by_text = torch.autograd.grad(loss, [image, text])
    assert (by_image[1:] == 0).all()
    assert (by_text[1:] == 0).all()
