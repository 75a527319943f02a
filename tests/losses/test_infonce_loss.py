from __future__ import annotations

import pytest
import torch
from loss_twins import assert_equal, info_nce, make_pairs, twin_hard_negative, value_and_grads

from hnclip.losses import clip_loss, fixed_margin_loss

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 3]])


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_clip_loss_is_symmetric_cross_entropy(scale):
    leaves = make_pairs(5, 4, scale=scale)
    assert_equal(value_and_grads(clip_loss, leaves), value_and_grads(info_nce, leaves))


@pytest.mark.parametrize("ids", [None, IDS], ids=["none", "two columns"])
@pytest.mark.parametrize("margin", [0.0, 0.2, 0.42])
def test_fixed_margin_equals_the_double_loop(ids, margin):
    leaves = make_pairs(5, 4)
    got = value_and_grads(lambda *x: fixed_margin_loss(*x, margin=margin, ids=ids), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin_hard_negative(*x, 0.0, margin, ids=ids), leaves))


def test_clip_loss_with_ids_equals_the_double_loop():
    leaves = make_pairs(5, 4)
    got = value_and_grads(lambda *x: clip_loss(*x, ids=IDS), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin_hard_negative(*x, 0.0, ids=IDS), leaves))


def test_default_margin_raises_the_loss():
    leaves = make_pairs(5, 4)
    assert fixed_margin_loss(*leaves) == fixed_margin_loss(*leaves, margin=0.2)
    assert fixed_margin_loss(*leaves) > clip_loss(*leaves) + 0.1
