"""Parameter groups, schedules, and what is restored or clamped after a step."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from hnclip.config import OptimConfig
from hnclip.models.load import load
from hnclip.training.optimizer import (
    build_optimizer,
    clamp_scale,
    keep_positions,
    learning_rate_factor,
    schedule_factor,
    set_learning_rate,
    wrapped_factor,
)


class Toy(nn.Module):
    """With parameters of a method, under the name that the encoder gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.frozen = nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2).requires_grad_(False)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.readouts = nn.ModuleDict({"full": nn.Linear(2, 2)})
        self.not_readouts = nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_readouts_and_the_scale_have_rates_of_their_own_and_matrices_decay(decay: Literal["matrices", "all"]) -> None:
    """With decay "all", as in Long-CLIP's and FineLIP's trainers, biases, norms and the scale too."""
    model = Toy()
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, scale_lr=0.2, weight_decay=0.3, readout_lr=0.7, decay=decay))
    groups = optimizer.param_groups
    other, added = (0.3 if decay == "all" else 0.0), model.readouts["full"]
    expected = {
        id(model.linear.weight): (0.1, 0.3),
        id(model.not_readouts.weight): (0.1, 0.3),
        **{id(p): (0.1, other) for p in (model.linear.bias, *model.norm.parameters())},
        id(added.weight): (0.7, 0.3),
        id(added.bias): (0.7, other),
        id(model.logit_scale): (0.2, other),
    }
    assert {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]} == expected
    assert sum(len(group["params"]) for group in groups) == len(expected)
    assert optimizer.defaults["fused"]
    for factor in (0.5, 0.25):  # from the peak each time, not from the last rate
        set_learning_rate(optimizer, factor)
        for group in groups:
            assert group["lr"] == pytest.approx(expected[id(group["params"][0])][0] * factor)


def test_warm_up_then_half_a_cosine() -> None:
    factors = [learning_rate_factor(step, total=11, warmup=3, floor=0.1) for step in range(11)]
    assert factors[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert factors[10] == pytest.approx(0.1)
    assert factors[4] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 7)))
    assert all(later < earlier for earlier, later in pairwise(factors[3:]))
    assert learning_rate_factor(0, total=1, warmup=0) == 1


@pytest.mark.parametrize(("warmup", "steps"), [(4, 4), (4.0, 4), (0.25, 5), (0.1, 2), (1, 1), (0, 0)], ids=str)
def test_warm_up_in_steps_or_as_a_share(warmup: float, steps: int) -> None:
    optim = OptimConfig(warmup=warmup, lr_floor=0.0)
    found = [schedule_factor(step, 20, optim) for step in range(20)]
    assert found == [learning_rate_factor(step, total=20, warmup=steps) for step in range(20)]
    assert [rate < 1 for rate in found[: steps + 1]] == [True] * (steps - 1) + [False] * (1 if steps == 0 else 2)


def test_the_wrapped_schedule_is_that_of_finelips_released_code() -> None:
    """Measured in six epochs of 1,500 steps of 4 micro-batches, 200 of warm-up: it begins with a full step."""
    factors = [wrapped_factor(step, total=1500, warmup=200, accumulate=4) for step in range(1501)]
    assert [factors[step] for step in (0, 1, 2, 49, 50)] == pytest.approx([1, 4 / 200, 8 / 200, 196 / 200, 1])
    assert [factors[step] for step in (75, 375, 750, 1125, 1500)] == pytest.approx(
        [0.99, 0.0, 0.94, 0.22, 0.56], abs=0.006
    )
    assert wrapped_factor(6, total=5, warmup=5, accumulate=1) == 1  # nothing to divide by


def test_the_open_cosine_would_end_one_step_after_the_last() -> None:
    """As GOAL and StructXLIP were released: iteration t of T has the rate ½(1 + cos(π·t/T))."""
    optim = OptimConfig(warmup=0, schedule="open_cosine", lr_floor=0.0)
    expected = [0.5 * (1 + math.cos(math.pi * step / 20)) for step in range(20)]
    assert [schedule_factor(step, 20, optim) for step in range(20)] == pytest.approx(expected)


def test_the_scale_stays_between_one_and_its_limit() -> None:
    for start, end in ((6.0, math.log(100)), (-1.0, 0.0), (3.0, 3.0)):
        parameter = nn.Parameter(torch.tensor(start))
        clamp_scale(parameter, 100.0)
        assert parameter.item() == pytest.approx(end)
    fixed = nn.Parameter(torch.tensor(4.6052), requires_grad=False)  # OpenAI's, a little more than ln 100
    clamp_scale(fixed, 100.0)
    assert fixed.item() == torch.tensor(4.6052).item()


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_kept_positions_stay_the_same_bits(model_directory: Path, decay: Literal["matrices", "all"]) -> None:
    model = load(model_directory)
    table = model.backbone.text_model.embeddings.position_embedding.weight
    before = table.detach().clone()
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, scale_lr=0.1, weight_decay=0.3, decay=decay))
    keep_positions(optimizer, model, 5)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert torch.equal(table[:5], before[:5])
    assert (table[5:] != before[5:]).all()
    with pytest.raises(ValueError, match="positions"):
        keep_positions(optimizer, model, 10**4)
