from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hnclip.losses.principal import principal_part


def make(n, d, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)


def with_values(values, n, d, seed=0):
    """A matrix with these singular values around a mean that is not 0."""
    centred = make(n, len(values), seed)
    left = torch.linalg.qr(centred - centred.mean(0)).Q  # [N, K], columns of mean 0
    right = torch.linalg.qr(make(d, len(values), seed + 1)).Q  # [D, K]
    return left * torch.tensor(values, dtype=torch.float64) @ right.T + make(1, d, seed + 2)


def twin(vectors: Tensor, count: int) -> Tensor:
    """As it reads: mean, economy SVD, the first right vectors, there and back; gradients are autograd's."""
    mean = vectors.mean(0)
    _, _, right = torch.linalg.svd(vectors - mean, full_matrices=False)
    kept = right[:count].T
    return (vectors - mean) @ kept @ kept.T + mean


def gradients(function, vectors, count, seed=9):
    leaf = vectors.detach().clone().requires_grad_()
    value = function(leaf, count)
    (grad,) = torch.autograd.grad((value * make(*vectors.shape, seed=seed).to(value.dtype)).sum(), leaf)
    return value.detach(), grad


@pytest.mark.parametrize(("n", "d", "count"), [(12, 7, 3), (7, 12, 3), (9, 9, 4), (6, 30, 1), (40, 5, 4), (40, 60, 32)])
def test_value_and_gradient_are_those_of_the_decomposition(n, d, count):
    vectors = make(n, d)
    (value, grad), (expected, by_svd) = (gradients(f, vectors, count) for f in (principal_part, twin))
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grad, by_svd, rtol=1e-7, atol=1e-9)
    assert (value - vectors).abs().max() > 0.01


@pytest.mark.parametrize(("n", "d", "count"), [(8, 5, 2), (5, 8, 2)])
def test_finite_differences_agree(n, d, count):
    assert torch.autograd.gradcheck(lambda x: principal_part(x, count), make(n, d).requires_grad_())


@pytest.mark.parametrize("shape", [(10, 7), (7, 10)])
@pytest.mark.parametrize("values", [[3.0, 3.0, 1.0, 0.5], [4.0, 3.0, 1.0, 1.0], [3.0, 3.0, 1.0, 1.0]], ids=str)
def test_equal_values_on_one_side_of_the_cut_do_no_harm(values, shape):
    leaf = with_values(values, *shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: principal_part(x, 2), leaf)


def test_where_the_decomposition_has_no_gradient_the_projection_has_one():
    """Two axes of exactly the same length: the SVD's own gradient divides by their difference."""
    axes = torch.diag(torch.tensor([3.0, 3.0, 1.0, 0.5], dtype=torch.float64))
    vectors = torch.cat([axes, -axes])  # [8, 4]
    assert not gradients(twin, vectors, 2)[1].isfinite().all()
    assert torch.autograd.gradcheck(lambda x: principal_part(x, 2), vectors.requires_grad_())


def test_equal_values_across_the_cut_and_too_few_directions_stay_finite():
    for values in ([3.0, 1.0, 1.0, 0.5], [3.0, 1.0], [2.0]):
        for dtype in (torch.float32, torch.float64):
            value, grad = gradients(principal_part, with_values(values, 10, 7).to(dtype), 2)
            assert value.isfinite().all()
            assert grad.isfinite().all()
            assert grad.abs().max() < 100
    same = torch.ones(8, 6).requires_grad_()
    principal_part(same, 3).sum().backward()
    assert same.grad is not None
    assert same.grad.isfinite().all()


def test_a_choice_among_equals_sends_no_gradient_to_the_choice():
    """All directions are equally long, so which two are kept is chance: the gradient takes them as given."""
    axes = torch.eye(4, dtype=torch.float64)
    vectors = torch.cat([axes, -axes])  # [8, 4], orthogonal columns of length √2
    value, grad = gradients(principal_part, vectors, 2)
    right = vectors.T @ value / 2  # [4, 4], the projection onto what was kept
    left = vectors @ right @ vectors.T / 2  # [8, 8]
    weights = make(8, 4, seed=9)
    expected = left @ weights + weights @ right - left @ weights @ right
    # Behind it the mean: what is taken from all rows goes back to all.
    expected = expected - expected.mean(0) + weights.mean(0)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize(("n", "d"), [(4, 9), (2, 9), (33, 64), (40, 32)])
def test_so_few_vectors_come_back_as_they_are(n, d):
    count = 3 if n < 10 else 32
    vectors = make(n, d, dtype=torch.float32).requires_grad_()
    part = principal_part(vectors, count)
    assert torch.equal(part, vectors)
    (grad,) = torch.autograd.grad((part * 2).sum(), vectors)
    assert torch.equal(grad, torch.full_like(grad, 2))
    torch.testing.assert_close(twin(vectors, count), vectors, rtol=1e-4, atol=1e-5)


def test_one_vector_more_loses_a_direction():
    vectors = make(34, 64)
    assert (principal_part(vectors) - vectors).abs().max() > 1e-3
    part = principal_part(vectors)
    assert torch.linalg.matrix_rank(part - part.mean(0), atol=1e-9) == 32


def test_projecting_twice_is_projecting_once_and_the_mean_stays():
    vectors = make(50, 40)
    once = principal_part(vectors, 8)
    torch.testing.assert_close(principal_part(once, 8), once)
    torch.testing.assert_close(once.mean(0), vectors.mean(0))


def test_the_result_is_not_normalised_again():
    vectors = torch.nn.functional.normalize(make(50, 40), dim=1)
    assert (principal_part(vectors, 8).norm(dim=1) < 0.95).all()


def test_half_precision_and_autocast_are_computed_in_float32():
    vectors = make(40, 50, dtype=torch.bfloat16)
    assert principal_part(vectors, 8).dtype == torch.float32
    single = vectors.float()
    plain = gradients(principal_part, single, 8)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = gradients(principal_part, single, 8)
    for a, b in zip(plain, mixed):
        assert torch.equal(a, b)


def test_float32_is_close_to_float64():
    vectors = torch.nn.functional.normalize(make(64, 96), dim=1)
    (value, grad), (expected, exact) = (gradients(principal_part, x, 32) for x in (vectors.float(), vectors))
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad):
    vectors = make(40, 50)
    vectors[3, 4] = bad
    assert principal_part(vectors, 8).isnan().any()


def test_errors():
    with pytest.raises(ValueError, match="vectors must have 2 dimensions"):
        principal_part(torch.ones(4))
    with pytest.raises(ValueError, match="vectors must be floating point"):
        principal_part(torch.ones(4, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        principal_part(torch.ones(4, 3), 0)
