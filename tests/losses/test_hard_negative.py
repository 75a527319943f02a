"""L_HN against the paper's lines and a double loop, its identities, and the file on its own."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hnclip.losses import GLOBAL_LOSSES, HardNegativeLoss, hard_negative_loss
from hnclip.losses import hard_negative as module
from loss_twins import (
    assert_equal,
    info_nce,
    make_pairs,
    paper_loss,
    twin_hard_negative,
    value_and_grads,
)

IDS = {
    "none": None,
    "two columns": torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 2], [4, 4]]),
}
FROZEN = make_pairs(6, 9, seed=5)[1]


@settings(max_examples=30)
@given(st.integers(2, 9), st.integers(1, 6), st.floats(0, 2), st.floats(0.1, 100), st.integers(0, 999))
@example(n=16, d=4, gamma=0.5, scale=100.0, seed=1)
@example(n=2, d=1, gamma=0.5, scale=30.0, seed=0)
def test_equals_the_paper_for_any_size_and_strength(n, d, gamma, scale, seed):
    leaves = make_pairs(n, d, seed=seed, scale=scale)
    got = value_and_grads(lambda *x: hard_negative_loss(*x, gamma), leaves)
    assert_equal(got, value_and_grads(lambda *x: paper_loss(*x, gamma), leaves), 1e-11)


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 0.0, "margin": 0.3},
        {"margin": 0.1, "center": 0.2},
        {"gamma": 0.8, "center": "mean"},
        {"margin_text": FROZEN, "center": "mean"},
    ],
    ids=["fixed", "centred", "mean", "frozen"],
)
def test_equals_the_double_loop(ids, options):
    leaves, given = make_pairs(6, 4, scale=8.0), {**options, "ids": IDS[ids]}
    got = value_and_grads(lambda *x: hard_negative_loss(*x, **given), leaves)
    assert_equal(got, value_and_grads(lambda *x: twin_hard_negative(*x, **given), leaves))


@settings(max_examples=20)
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

    def loss(*x):
        return hard_negative_loss(*x, center=center, ids=torch.arange(n) // 2 if with_ids else None)

    got, expected = value_and_grads(loss, leaves, autocast=autocast), value_and_grads(loss, upcast)
    assert got[0].dtype == wide
    assert_equal(got, [expected[0], *(grad.to(dtype) for grad in expected[1:])], 0)
    assert hard_negative_loss(leaves[0], leaves[1].double(), 10.0).dtype == torch.float64


def fixed_margin(image, text, scale):
    """A margin taken from the positive instead of added to the negatives."""
    return info_nce(image, text, scale, 0.6)


EQUAL = F.normalize(torch.ones(5, 3, dtype=torch.float64), dim=1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gamma": 0.0}, info_nce),
        ({"gamma": 0.6, "margin_text": EQUAL}, fixed_margin),
        ({"gamma": 0.0, "margin": 0.6}, fixed_margin),
        ({"gamma": 0.5, "margin": 0.15, "center": 0.3}, paper_loss),
    ],
    ids=["gamma 0 is InfoNCE", "constant G is a fixed margin", "fixed margin", "center with the margin it removes"],
)
def test_identities(options, expected):
    """The text vectors that give the margin have no gradient."""
    leaves, live = make_pairs(5, 4), make_pairs(5, 4)[1]
    got = value_and_grads(lambda *x: hard_negative_loss(*x, **options), leaves)
    assert_equal(got, value_and_grads(expected, leaves))
    hard_negative_loss(*leaves, margin_text=live).backward()
    assert live.grad is None


@pytest.mark.parametrize("name", ["hn", "infonce"])
def test_zero_embeddings_give_log_n(name):
    zeros = torch.zeros(5, 3)
    assert GLOBAL_LOSSES[name](zeros, zeros, 100.0).item() == pytest.approx(math.log(5), rel=1e-6)


def test_open_clip_call():
    image, text, scale = make_pairs(5, 4)
    loss = HardNegativeLoss(gamma=0.7, margin=0.1, center=0.2)
    shard = {"ids": torch.tensor([0, 1, 1, 2, 3]), "offset": 1, "rows": 2, "margin_text": image.detach()}
    features = {"image_features": image, "text_features": text, "logit_scale": scale}
    for options in ({}, shard):
        expected = hard_negative_loss(image, text, scale, 0.7, margin=0.1, center=0.2, **options)
        assert loss(image, text, scale, **options) == expected
        assert loss(**features, logit_bias=None, output_dict=True, **options) == {"contrastive_loss": expected}
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
