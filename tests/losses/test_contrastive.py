"""Global losses other than L_HN against double loops, and the properties that all global losses share."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hnclip.losses import (
    GLOBAL_LOSSES,
    clip_loss,
    debiased_loss,
    fixed_margin_loss,
    hcl_loss,
    hn_nce_loss,
    max_hinge_loss,
    score_margin_loss,
    sigmoid_loss,
    smoothed_loss,
)
from loss_twins import (
    assert_equal,
    info_nce,
    make_pairs,
    twin_hard_negative,
    twin_hcl,
    twin_hn_nce,
    twin_max_hinge,
    twin_score_margin,
    twin_sigmoid,
    twin_smoothed,
    value_and_grads,
)

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 3], [4, 4]])
FROZEN = make_pairs(6, 9, seed=5)[1].detach()
CASES = [
    (clip_loss, partial(twin_hard_negative, gamma=0.0), {}),
    *[(fixed_margin_loss, partial(twin_hard_negative, gamma=0.0), {"margin": margin}) for margin in (0.0, 0.42)],
    *[(smoothed_loss, twin_smoothed, {"smoothing": smoothing}) for smoothing in (0.1, 0.4)],
    *[(score_margin_loss, twin_score_margin, {"strength": strength}) for strength in (9.0, 2.0)],
    *[(hn_nce_loss, twin_hn_nce, {"alpha": alpha, "beta": beta}) for alpha, beta in ((1.0, 0.25), (0.5, 1.0))],
    *[(hcl_loss, twin_hcl, {"beta": beta, "tau_plus": tau}) for beta, tau in ((1.0, 0.0), (0.5, 1e-4), (0.0, 0.1))],
    (debiased_loss, partial(twin_hcl, beta=0.0), {"tau_plus": 1e-3}),
    *[(max_hinge_loss, twin_max_hinge, {"margin": margin}) for margin in (0.2, 0.6)],
    *[(sigmoid_loss, twin_sigmoid, {"bias": bias, "gamma": gamma}) for bias in (None, -3.0) for gamma in (0.0, 0.5)],
    (sigmoid_loss, twin_sigmoid, {"gamma": 0.5, "margin_text": FROZEN}),
]


@pytest.mark.parametrize("ids", [None, IDS], ids=["none", "two columns"])
@pytest.mark.parametrize(("loss", "twin", "options"), CASES)
def test_equals_the_double_loop(loss, twin, options, ids):
    leaves = make_pairs(6, 4)
    got = value_and_grads(lambda *x: loss(*x, **options, ids=ids), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin(*x, **options, ids=ids), leaves), 1e-11)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (clip_loss, {}),
        (fixed_margin_loss, {"margin": 0.0}),
        (smoothed_loss, {"smoothing": 0.0}),
        (score_margin_loss, {"strength": 0.0}),
        (hn_nce_loss, {"beta": 0.0}),
        (hcl_loss, {"beta": 0.0}),
        (debiased_loss, {"tau_plus": 0.0}),
    ],
)
def test_special_cases_are_infonce(loss, options):
    leaves = make_pairs(6, 4, scale=100.0)
    assert_equal(value_and_grads(lambda *x: loss(*x, **options), leaves), value_and_grads(info_nce, leaves))


def test_the_bias_of_the_sigmoid_loss_learns():
    leaves = [*make_pairs(6, 4), torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)]
    got = value_and_grads(lambda i, t, s, b: sigmoid_loss(i, t, s, bias=b), leaves)
    assert_equal(got, value_and_grads(lambda i, t, s, b: twin_sigmoid(i, t, s, bias=b), leaves))
    assert got[4] != 0


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
def test_autocast_order_and_large_scales(name):
    def loss(*x, ids=IDS):
        return GLOBAL_LOSSES[name](*x, ids=ids)

    leaves = make_pairs(6, 16, scale=20.0, dtype=torch.float32)
    assert_equal(value_and_grads(loss, leaves, autocast=True), value_and_grads(loss, leaves), 0)
    image, text, scale = make_pairs(6, 4)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert_equal([loss(image[order], text[order], scale, ids=IDS[order])], [loss(image, text, scale)])
    large = make_pairs(6, 4, scale=1000.0, dtype=torch.float32)
    assert all(torch.isfinite(result).all() for result in value_and_grads(loss, large))


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
def test_duplicates_exchange_no_gradient_and_distinct_ids_change_nothing(name):
    image, text, scale = make_pairs(4, 4, scale=3.0)
    options = {"margin": 2.0} if name == "max_hinge" else {}  # no hinge may be satisfied
    plain = value_and_grads(GLOBAL_LOSSES[name], [image, text, scale])
    distinct = torch.stack([torch.arange(4), torch.arange(4).flip(0)], 1)
    assert_equal(value_and_grads(lambda *x: GLOBAL_LOSSES[name](*x, ids=distinct), [image, text, scale]), plain)
    # Query 0 alone: its duplicate gets nothing from it, other pairs do.
    loss = GLOBAL_LOSSES[name](image, text, scale, ids=torch.tensor([7, 7, 1, 2]), rows=1, **options)
    grads = [grad for grad in torch.autograd.grad(loss, [image, text], allow_unused=True) if grad is not None]
    assert all((grad[1] == 0).all() for grad in grads)
    assert any((grad[2:] != 0).any() for grad in grads)


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
@pytest.mark.parametrize("ids", [[5, 5, 5], [5, 5, 6]], ids=str)
def test_pairs_without_negatives_stay_finite(name, ids):
    leaves = make_pairs(3, 4, scale=100.0, dtype=torch.float32)
    results = value_and_grads(lambda *x: GLOBAL_LOSSES[name](*x, ids=torch.tensor(ids)), leaves)
    assert all(torch.isfinite(result).all() for result in results)
    if len(set(ids)) == 1 and name != "sigmoid":
        assert all((result == 0).all() for result in results)


WRONG = [
    ("infonce", "image and text", {"text": torch.ones(3, 3)}),
    *[("infonce", "scale", {"scale": value}) for value in (0.0, torch.ones(4))],
    ("infonce", "ids", {"ids": torch.arange(3)}),
    ("infonce", "rows", {"offset": 2, "rows": 3}),
    ("hn", "gamma", {"gamma": float("nan")}),
    ("hn", "margin_text", {"margin_text": torch.ones(3, 3)}),
    ("debiased", "tau_plus", {"tau_plus": 1.0}),
]


@pytest.mark.parametrize(("name", "argument", "change"), WRONG)
def test_errors_name_the_argument(name, argument, change):
    image, text, _ = make_pairs(4, 3)
    with pytest.raises(ValueError, match=argument):
        GLOBAL_LOSSES[name](**{"image": image, "text": text, "scale": 5.0, **change})
