from __future__ import annotations

import math
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_twins import (
    assert_equal,
    info_nce,
    make_pairs,
    negatives_of,
    paper_loss,
    twin_hard_negative,
    value_and_grads,
)

from hnclip.losses import GLOBAL_LOSSES, HardNegativeLoss, hard_negative_loss
from hnclip.losses import hard_negative as module
from hnclip.losses.hard_negative import negative_statistics

IDS = {
    "one column": torch.tensor([0, 1, 2, 1, 3, 0]),
    "two columns": torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 2], [4, 4]]),
}


@pytest.mark.parametrize(("n", "d"), [(2, 1), (3, 8), (7, 5), (16, 4)])
@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0])
def test_equals_the_paper_in_value_and_gradients(n, d, scale):
    leaves = make_pairs(n, d, seed=n, scale=scale)
    assert_equal(value_and_grads(hard_negative_loss, leaves), value_and_grads(paper_loss, leaves))


@settings(max_examples=30, deadline=None, database=None)
@given(
    n=st.integers(2, 9),
    d=st.integers(1, 6),
    gamma=st.floats(0, 2),
    scale=st.floats(0.1, 100),
    seed=st.integers(0, 999),
)
def test_equals_the_paper_for_any_size_and_strength(n, d, gamma, scale, seed):
    leaves = make_pairs(n, d, seed=seed, scale=scale)
    got = value_and_grads(lambda *x: hard_negative_loss(*x, gamma), leaves)
    expected = value_and_grads(lambda *x: paper_loss(*x, gamma), leaves)
    assert_equal(got, expected, 1e-11)


@settings(max_examples=20, deadline=None, database=None)
@given(
    n=st.integers(2, 9),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    autocast=st.booleans(),
    center=st.sampled_from([0.0, "mean"]),
    with_ids=st.booleans(),
)
def test_half_precision_inputs_and_autocast_compute_in_full_precision(n, dtype, autocast, center, with_ids):
    leaves = make_pairs(n, 6, seed=n, scale=50.0, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    upcast = [leaf.detach().to(wide).requires_grad_() for leaf in leaves]
    ids = torch.arange(n) // 2 if with_ids else None

    def loss(*x):
        return hard_negative_loss(*x, center=center, ids=ids)

    got = value_and_grads(loss, leaves, autocast=autocast)
    expected = value_and_grads(loss, upcast)
    assert got[0].dtype == wide
    assert_equal([got[0]], [expected[0]], 0)
    assert_equal(got[1:], [grad.to(dtype) for grad in expected[1:]], 0)


def test_mixed_dtypes_take_the_wider_one():
    image, text, scale = make_pairs(4, 3)
    assert hard_negative_loss(image.float(), text, scale.float()).dtype == torch.float64
    assert hard_negative_loss(image.bfloat16(), text.half(), 10.0).dtype == torch.float32


@pytest.mark.parametrize("ids", [None, *IDS.values()], ids=["none", *IDS])
@pytest.mark.parametrize(
    "options",
    [{}, {"gamma": 0.0, "margin": 0.3}, {"margin": 0.1, "center": 0.2}, {"gamma": 0.8, "center": "mean"}],
    ids=str,
)
def test_equals_the_double_loop(ids, options):
    leaves = make_pairs(6, 4, scale=8.0)
    got = value_and_grads(lambda *x: hard_negative_loss(*x, **options, ids=ids), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin_hard_negative(*x, **options, ids=ids), leaves))


def test_margin_text_replaces_the_captions_in_the_margin_only():
    leaves = make_pairs(6, 4)
    frozen = make_pairs(6, 9, seed=5)[1]
    got = value_and_grads(lambda *x: hard_negative_loss(*x, margin_text=frozen, center="mean"), leaves)
    expected = value_and_grads(lambda *x: twin_hard_negative(*x, margin_text=frozen, center="mean"), leaves)
    assert_equal(got, expected)
    assert abs(got[0] - hard_negative_loss(*leaves, center="mean")) > 1e-3


@pytest.mark.parametrize("ids", [None, *IDS.values()], ids=["none", *IDS])
def test_mean_over_negatives_without_the_matrix(ids):
    left, right, _ = make_pairs(6, 4)
    matrix = left @ right.T
    per_row = [negatives_of(i, 6, ids) for i in range(6)]
    values = torch.stack([matrix[i, j] for i in range(6) for j in per_row[i]])
    mean, count = negative_statistics(left, right, None if ids is None else ids.reshape(6, -1))
    assert_equal([mean, count], [values.mean().detach(), torch.tensor(len(values) / 6, dtype=torch.float64)])
    assert not mean.requires_grad


def test_centring_leaves_the_mean_margin_at_zero():
    image, text, scale = make_pairs(6, 4)
    pairs = module.check_pairs(image, text, scale)
    margins = module.negative_margins(pairs, 0.5, center="mean")
    assert abs(margins.sum()) < 1e-12
    assert margins.abs().max() > 0.05


def test_gamma_zero_is_infonce_and_builds_no_text_similarity(monkeypatch):
    leaves = make_pairs(5, 4)
    products = []
    monkeypatch.setattr(module, "product", lambda a, b: products.append(1) or a @ b.T)
    got = value_and_grads(lambda *x: hard_negative_loss(*x, 0.0), leaves)
    assert_equal(got, value_and_grads(info_nce, leaves))
    assert len(products) == 1
    hard_negative_loss(*leaves, 0.5)
    assert len(products) == 3


def test_equal_captions_are_a_fixed_margin_taken_from_the_positive():
    leaves = make_pairs(5, 4)
    equal = F.normalize(torch.ones(5, 3, dtype=torch.float64), dim=1)
    got = value_and_grads(lambda *x: hard_negative_loss(*x, 0.6, margin_text=equal), leaves)

    def positive_lowered(image, text, scale):
        logits = scale * (image @ text.T - 0.6 * torch.eye(5, dtype=torch.float64))
        target = torch.arange(5)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    assert_equal(got, value_and_grads(positive_lowered, leaves))


def test_center_with_the_margin_it_removes_is_the_paper():
    leaves = make_pairs(5, 4)
    got = value_and_grads(lambda *x: hard_negative_loss(*x, 0.7, margin=0.7 * 0.3, center=0.3), leaves)
    assert_equal(got, value_and_grads(lambda *x: paper_loss(*x, 0.7), leaves))
    assert abs(got[0] - hard_negative_loss(*leaves, 0.7, center=0.3)) > 1e-3


def test_gradient_is_the_softmax_residual():
    leaves = make_pairs(6, 4, scale=12.0)
    image, text, scale = (leaf.detach() for leaf in leaves)
    boost = 0.5 * text @ text.T
    boost.fill_diagonal_(0.0)
    logits = scale * (image @ text.T + boost)
    residual = (logits.softmax(1) - torch.eye(6)) + (logits.softmax(0) - torch.eye(6))
    by_similarity = scale * residual / (2 * 6)
    _, by_image, by_text, by_scale = value_and_grads(hard_negative_loss, leaves)
    with_boost = (residual * (image @ text.T + boost)).sum() / (2 * 6)
    assert_equal([by_image, by_text, by_scale], [by_similarity @ text, by_similarity.T @ image, with_boost])


def test_gradient_ratio_of_two_negatives():
    # With captions as unit axes S is `image`, and one query alone leaves s·p_ij / 2 in row i of its gradient.
    image, _, scale = make_pairs(5, 5)
    margin_text = make_pairs(5, 4, seed=3)[1].detach()
    captions = torch.eye(5, dtype=torch.float64)
    loss = hard_negative_loss(image, captions, scale, 0.5, margin_text=margin_text, offset=1, rows=1)
    force = torch.autograd.grad(loss, image)[0][1]
    similarity, caption_similarity = image[1].detach(), margin_text[1] @ margin_text.T
    expected = torch.exp(
        scale * (similarity[2] - similarity[4]) + scale * 0.5 * (caption_similarity[2] - caption_similarity[4])
    )
    assert_equal([force[2] / force[4]], [expected.detach()])


def test_no_gradient_through_the_margin():
    leaves = make_pairs(5, 4)
    live = value_and_grads(hard_negative_loss, leaves)
    margin_text = leaves[1].detach().clone().requires_grad_()
    assert_equal(value_and_grads(lambda *x: hard_negative_loss(*x, margin_text=margin_text), leaves), live)
    hard_negative_loss(*leaves, margin_text=margin_text).backward()
    assert margin_text.grad is None


@pytest.mark.parametrize("options", [{}, {"gamma": 0.0, "margin": 0.4}, {"center": "mean"}], ids=str)
def test_scale_gradient_includes_the_boost(options):
    image, text, scale = make_pairs(5, 4)
    by_scale = value_and_grads(lambda *x: hard_negative_loss(*x, **options), [image, text, scale])[3]
    step = 1e-5
    up, down = (hard_negative_loss(image, text, scale.item() + h, **options) for h in (step, -step))
    assert_equal([by_scale], [(up - down).detach() / (2 * step)], 1e-8)
    assert abs(by_scale - value_and_grads(info_nce, [image, text, scale])[3]) > 1e-3


@pytest.mark.parametrize("name", ["hn", "infonce"])
@pytest.mark.parametrize("n", [2, 5])
def test_zero_embeddings_give_log_n(name, n):
    zeros = torch.zeros(n, 3)
    assert GLOBAL_LOSSES[name](zeros, zeros, 100.0).item() == pytest.approx(math.log(n), rel=1e-6)


def test_open_clip_call():
    image, text, scale = make_pairs(5, 4)
    loss = HardNegativeLoss(gamma=0.7, margin=0.1, center=0.2)
    expected = hard_negative_loss(image, text, scale, 0.7, margin=0.1, center=0.2)
    features = {"image_features": image, "text_features": text, "logit_scale": scale}
    assert loss(image, text, scale) == expected
    assert loss(**features, logit_bias=None, output_dict=True) == {"contrastive_loss": expected}
    shard = {"ids": torch.tensor([0, 1, 1, 2, 3]), "offset": 1, "rows": 2, "margin_text": image.detach()}
    assert loss(**features, **shard) == hard_negative_loss(image, text, scale, 0.7, margin=0.1, center=0.2, **shard)
    assert "gamma=0.7" in repr(loss)
    with pytest.raises(ValueError, match="logit_bias"):
        loss(**features, logit_bias=torch.tensor(-10.0))


def test_file_works_alone(tmp_path):
    shutil.copy(module.__file__, tmp_path / "borrowed.py")
    script = (
        "import sys; sys.modules['hnclip'] = None; sys.path.insert(0, '.')\n"
        "import torch, borrowed\n"
        "print(borrowed.HardNegativeLoss()(torch.eye(3), torch.eye(3), 1.0).item())\n"
    )
    run = subprocess.run([sys.executable, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == pytest.approx(math.log(1 + 2 * math.exp(-1)), rel=1e-6)
