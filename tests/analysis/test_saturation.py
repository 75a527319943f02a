"""Both losses of every batch: a literal twin, exactness where float32 fails, shares, and what is left out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hnclip.analysis.saturation import batch_losses


def unit(count: int, seed: int, width: int = 6) -> Tensor:
    vectors = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(vectors, dim=1)


def numbers(count: int) -> Tensor:
    return torch.arange(count)[:, None].repeat(1, 2)


def literal(image: Tensor, text: Tensor, rows: list[int], scale: float, gamma: float) -> float:
    """Eq. 2, one softmax at a time."""
    total = 0.0
    for i in rows:
        for direction in ("image", "text"):
            logits = []
            for j in rows:
                score = float(image[i] @ text[j]) if direction == "image" else float(image[j] @ text[i])
                margin = gamma * float(text[i] @ text[j]) if i != j else 0.0
                logits.append(scale * (score + margin))
            own = logits[rows.index(i)]
            total += math.log(sum(math.exp(logit - own) for logit in logits)) / 2
    return total / len(rows)


def test_losses_are_those_of_the_equations() -> None:
    image, text = unit(7, 0).double(), unit(7, 1).double()
    batches = [[4, 0, 2], [1, 3], [5]]
    found = batch_losses(image, text, numbers(7), batches, scale=8.0, gamma=0.3)
    for index, rows in enumerate(batches[:2]):
        assert found.infonce[index].item() == pytest.approx(literal(image, text, rows, 8.0, 0.0), rel=1e-12)
        assert found.hn[index].item() == pytest.approx(literal(image, text, rows, 8.0, 0.3), rel=1e-12)
    assert len(found.infonce) == 2  # a single pair has nothing to be told from
    assert found.negatives == pytest.approx((3 * 2 + 2 * 1) / 5)


def test_small_losses_keep_their_digits_for_float32_vectors() -> None:
    # Two pairs, orthogonal: the loss is log(1 + exp(-s)), which float32 rounds to 0 from s = 17 on.
    vectors = torch.eye(2)
    found = batch_losses(vectors, vectors, numbers(2), [[0, 1]], scale=20.0)
    assert found.infonce.item() == pytest.approx(math.exp(-20.0), rel=1e-6)
    assert found.infonce_saturated == 1.0


def test_equal_ids_are_no_negatives() -> None:
    image, text = unit(4, 2), unit(4, 3)
    ids = numbers(4)
    ids[1, 0] = ids[0, 0]
    together = batch_losses(image, text, ids, [[0, 1]], scale=5.0)
    assert together.infonce.item() == 0.0
    assert batch_losses(image, text, numbers(4), [[0, 1]], scale=5.0).infonce.item() > 0


def test_shares_count_batches_below_the_threshold() -> None:
    vectors = torch.eye(4)
    crossed = vectors[[0, 1, 3, 2]]  # the last two pairs are each other's answer
    found = batch_losses(vectors, crossed, numbers(4), [[0, 1], [2, 3]], scale=20.0)
    assert found.infonce_saturated == 0.5
    assert found.to_dict()["infonce_saturated"] == 0.5
    assert found.to_dict()["dtype"] == "float64"


def test_a_margin_keeps_near_duplicates_active() -> None:
    text = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2], [1.0, -0.2]]), dim=1)
    image = torch.nn.functional.normalize(torch.tensor([[1.0, 0.9], [1.0, -0.9]]), dim=1)
    found = batch_losses(image, text, numbers(2), [[0, 1]], scale=40.0, gamma=0.5)
    assert found.infonce_saturated == 1.0
    assert found.hn_saturated == 0.0


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ValueError, match="no batch holds two different pairs"):
        batch_losses(unit(2, 0), unit(2, 1), numbers(2), [[0], [1]], scale=1.0)
