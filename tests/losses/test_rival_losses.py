from __future__ import annotations

import pytest
import torch
from loss_twins import (
    assert_equal,
    info_nce,
    make_pairs,
    twin_max_hinge,
    twin_score_margin,
    twin_siglip,
    value_and_grads,
)

from hnclip.losses import max_hinge_loss, score_margin_loss, siglip_loss

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 3], [4, 4]])
BOTH_IDS = pytest.mark.parametrize("ids", [None, IDS], ids=["none", "two columns"])


@BOTH_IDS
@pytest.mark.parametrize("directions", ["both", "image_to_text", "text_to_image"])
@pytest.mark.parametrize("strength", [9.0, 2.0])
def test_score_margin_equals_the_double_loop(ids, directions, strength):
    leaves = make_pairs(6, 4, scale=20.0)
    options = {"strength": strength, "directions": directions, "ids": ids}
    got = value_and_grads(lambda *x: score_margin_loss(*x, **options), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin_score_margin(*x, **options), leaves))


def test_score_margin_without_strength_is_infonce():
    leaves = make_pairs(6, 4)
    got = value_and_grads(lambda *x: score_margin_loss(*x, strength=0.0), leaves)
    assert_equal(got, value_and_grads(info_nce, leaves))


@BOTH_IDS
@pytest.mark.parametrize("margin", [0.2, 0.6])
def test_max_hinge_equals_the_double_loop(ids, margin):
    leaves = make_pairs(6, 4)
    got = value_and_grads(lambda *x: max_hinge_loss(*x, margin=margin, ids=ids), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin_max_hinge(*x, margin=margin, ids=ids), leaves))
    assert got[0] > 0


def test_max_hinge_plateau_and_scale():
    collapsed = torch.ones(5, 4) / 2
    assert max_hinge_loss(collapsed, collapsed, 100.0, margin=0.3).item() == pytest.approx(0.6)
    image, text, _ = make_pairs(6, 4)
    assert max_hinge_loss(image, text, 1.0) == max_hinge_loss(image, text, 100.0)


@BOTH_IDS
@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize("bias", [None, -3.0])
def test_siglip_equals_the_double_loop(ids, gamma, bias):
    leaves = make_pairs(6, 4)
    options = {"bias": bias, "gamma": gamma, "ids": ids}
    got = value_and_grads(lambda *x: siglip_loss(*x, **options), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin_siglip(*x, **options), leaves))


def test_siglip_bias_learns():
    leaves = [*make_pairs(6, 4), torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)]
    got = value_and_grads(lambda i, t, s, b: siglip_loss(i, t, s, bias=b), leaves)
    assert_equal(got, value_and_grads(lambda i, t, s, b: twin_siglip(i, t, s, bias=b), leaves))
    assert got[4] != 0
