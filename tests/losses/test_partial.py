"""Terms over pairs that have a view, and Long-CLIP's principal part.

tests/objectives compares chunk_loss with its definition.
"""

from __future__ import annotations

import pytest
import torch

from hnclip.losses import GLOBAL_LOSSES, clip_loss
from hnclip.losses.partial import (
    chunk_loss,
    loss_of_present,
    mean_of_present,
    principal_part,
)
from loss_twins import assert_equal, make_pairs, make_tokens, value_and_grads

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 0], [4, 4], [5, 5]])
PRESENT = [[1, 0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1, 1]]


def bools(values):
    return torch.tensor(values, dtype=torch.bool)


@pytest.mark.parametrize("present", PRESENT)
def test_mean_of_present_does_not_read_absent_rows(present):
    values, mask = torch.randn(7, dtype=torch.float64), bools(present)
    values = values.where(mask, torch.nan).requires_grad_()
    expected = value_and_grads(lambda v: v[mask].mean(), [values])
    assert_equal(value_and_grads(lambda v: mean_of_present(v, mask), [values]), expected)


@pytest.mark.parametrize("present", [[0] * 7, [0, 0, 1, 0, 0, 0, 0]], ids=["none present", "one present"])
def test_nothing_to_compare_is_zero_with_zero_gradients(present):
    got = value_and_grads(lambda *x: loss_of_present(clip_loss, *x, bools(present)), make_pairs(7, 5))
    assert all((tensor == 0).all() for tensor in got)


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
@pytest.mark.parametrize("present", PRESENT)
def test_loss_of_present_is_the_loss_of_a_batch_of_them(present, name):
    leaves, mask, loss = make_pairs(7, 5), bools(present), GLOBAL_LOSSES[name]

    def subset(image, text, scale):
        return loss(image[mask], text[mask], scale, ids=IDS[mask])

    got = value_and_grads(lambda *x: loss_of_present(loss, *x, mask, ids=IDS), leaves)
    assert_equal(got, value_and_grads(subset, leaves))


@pytest.mark.parametrize("absent", [0, 1])
def test_without_chunks_or_crops_the_loss_is_zero(absent):
    chunks, _, scale = make_tokens(7, 4, 3, 5)[0]
    crops, masks = make_tokens(7, 2, 3, 5)[0][0], [torch.ones(7, count, dtype=torch.bool) for count in (4, 2)]
    masks[absent][:] = False
    got = value_and_grads(lambda c, p, s: chunk_loss(c, p, *masks, s), [chunks, crops, scale])
    assert all((tensor == 0).all() for tensor in got)


@pytest.mark.parametrize(("n", "d", "count"), [(12, 7, 3), (7, 12, 3), (9, 9, 4), (6, 30, 1), (40, 60, 32)])
def test_principal_part_is_the_best_approximation_of_its_rank(n, d, count):
    vectors = torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    part = principal_part(vectors, count)
    mean = vectors.mean(0)
    values = torch.linalg.svdvals(vectors - mean)
    assert torch.linalg.matrix_rank(part - mean, atol=1e-9) == count
    assert_equal([(vectors - part).square().sum(), part.mean(0)], [values[count:].square().sum(), mean], 1e-9)
    assert_equal([principal_part(part, count)], [part], 1e-9)
    assert torch.autograd.gradcheck(lambda x: principal_part(x, count), vectors[:9, :9].clone().requires_grad_())
