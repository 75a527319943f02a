"""Terms over pairs that have a view; masks of chunks; Long-CLIP's principal part.

tests/objectives compares chunk_loss with its definition.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from loss_twins import assert_equal, make_pairs, value_and_grads

from hnclip.losses import GLOBAL_LOSSES, clip_loss
from hnclip.losses.partial import (
    chunk_loss,
    cosine_gap,
    loss_of_present,
    mean_of_present,
    principal_part,
)

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 0], [4, 4], [5, 5]])
PRESENT = [[1, 0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]


def bools(values):
    return torch.tensor(values, dtype=torch.bool)


@pytest.mark.parametrize("present", PRESENT)
def test_mean_of_present(present):
    values, mask = torch.randn(7, dtype=torch.float64, requires_grad=True), bools(present)
    expected = value_and_grads(lambda v: v[mask].mean(), [values])
    assert_equal(value_and_grads(lambda v: mean_of_present(v, mask), [values]), expected)


def test_absent_rows_are_not_read():
    values = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    mean = mean_of_present(values, bools([1, 0, 1]))
    mean.backward()
    assert mean == 2
    assert values.grad.tolist() == [0.5, 0, 0.5]


@pytest.mark.parametrize("present", [[0] * 7, [0, 0, 1, 0, 0, 0, 0]], ids=["none present", "one present"])
def test_nothing_to_compare_is_zero_with_zero_gradients(present):
    got = value_and_grads(lambda *x: loss_of_present(clip_loss, *x, bools(present)), make_pairs(7, 5))
    assert all((tensor == 0).all() for tensor in got)


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
@pytest.mark.parametrize("ids", [None, IDS], ids=["no ids", "ids"])
@pytest.mark.parametrize("present", PRESENT)
def test_loss_of_present_is_the_loss_of_a_batch_of_them(present, ids, name):
    leaves, mask, loss = make_pairs(7, 5), bools(present), GLOBAL_LOSSES[name]

    def subset(image, text, scale):
        return loss(image[mask], text[mask], scale, ids=None if ids is None else ids[mask])

    got = value_and_grads(lambda *x: loss_of_present(loss, *x, mask, ids=ids), leaves)
    assert_equal(got, value_and_grads(subset, leaves))


def test_cosine_gap_is_computed_in_float32():
    a, b, _ = make_pairs(7, 300, dtype=torch.bfloat16)
    assert cosine_gap(a, b).dtype == torch.float32
    expected = 1 - torch.einsum("nd,nd->n", a.double(), b.double())
    assert_equal([cosine_gap(a, b).double()], [expected], 1e-5)


def make_chunks(n=7, s=4, k=2, d=5, seed=0):
    """Chunks, crops and a scale with gradient; pair 3 has no chunk, pair 4 no crop, the others some of each."""
    g = torch.Generator().manual_seed(seed)
    chunks, crops = (F.normalize(torch.randn(n, t, d, generator=g, dtype=torch.float64), dim=2) for t in (s, k))
    chunk_mask = torch.arange(s) < torch.tensor([4, 1, 3, 0, 2, 2, 1])[:, None]
    crop_mask = bools([[1, 1], [0, 1], [1, 0], [1, 1], [0, 0], [1, 1], [1, 1]])
    leaves = [t.requires_grad_() for t in (chunks, crops, torch.tensor(7.0, dtype=torch.float64))]
    return leaves, [chunk_mask, crop_mask]


def test_masked_chunks_and_crops_are_not_read():
    leaves, masks = make_chunks()

    def evaluate(given):
        return value_and_grads(lambda c, p, s: chunk_loss(c, p, *masks, s), [t.requires_grad_() for t in given])

    moved = [leaf.detach().clone() for leaf in leaves]
    for tensor, mask in zip(moved, masks):
        tensor[~mask] *= -50
    assert_equal(evaluate(moved), evaluate(leaves))


@pytest.mark.parametrize("absent", [0, 1])
def test_without_chunks_or_crops_the_loss_is_zero(absent):
    leaves, masks = make_chunks()
    with pytest.raises(ValueError, match="mask"):
        chunk_loss(*leaves[:2], *[mask.long() if k == absent else mask for k, mask in enumerate(masks)], leaves[2])
    masks[absent] = torch.zeros_like(masks[absent])
    got = value_and_grads(lambda c, p, s: chunk_loss(c, p, *masks, s), leaves)
    assert all((tensor == 0).all() for tensor in got)


def make_vectors(n, d, dtype=torch.float64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("n", "d", "count"), [(12, 7, 3), (7, 12, 3), (9, 9, 4), (6, 30, 1), (40, 60, 32)])
def test_principal_part_is_the_best_approximation_of_its_rank(n, d, count):
    vectors = make_vectors(n, d)
    part = principal_part(vectors, count)
    mean = vectors.mean(0)
    values = torch.linalg.svdvals(vectors - mean)
    assert torch.linalg.matrix_rank(part - mean, atol=1e-9) == count
    assert_equal([(vectors - part).square().sum(), part.mean(0)], [values[count:].square().sum(), mean], 1e-9)
    assert_equal([principal_part(part, count)], [part], 1e-9)
    assert torch.autograd.gradcheck(lambda x: principal_part(x, count), vectors[:9, :9].clone().requires_grad_())


def test_few_vectors_are_returned_unchanged_and_others_in_float32():
    few, vectors = make_vectors(33, 64), make_vectors(34, 64, torch.bfloat16)
    assert principal_part(few) is few
    part = principal_part(vectors)
    assert part.dtype == torch.float32
    assert (part - vectors).abs().max() > 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(principal_part(vectors.float()), part)
