"""Parameter groups, schedules, and what is restored or clamped after a step."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

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


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_readouts_and_the_scale_have_rates_of_their_own_and_matrices_decay(decay) -> None:  # type: ignore[no-untyped-def]
    """With decay "all", as in Long-CLIP's and FineLIP's trainers, biases, norms and the scale too."""
    model = Toy()
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, scale_lr=0.2, weight_decay=0.3, readout_lr=0.7, decay=decay))
    groups = optimizer.param_groups
    other, added = (0.3 if decay == "all" else 0.0), model.readouts["full"]
    expected = {
        id(model.linear.weight): (0.1, 0.3),
        **{id(p): (0.1, other) for p in (model.linear.bias, *model.norm.parameters())},
        id(added.weight): (0.7, 0.3),
        id(added.bias): (0.7, other),
        id(model.logit_scale): (0.2, other),
    }
    assert {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]} == expected
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
    for warmup, steps in ((4, 4), (0.25, 5), (0.1, 2), (0, 0)):  # in steps or as a share
        found = [schedule_factor(step, 20, OptimConfig(warmup=warmup, lr_floor=0.0)) for step in range(20)]
        assert found == [learning_rate_factor(step, total=20, warmup=steps) for step in range(20)]


def test_schedules_of_released_code() -> None:
    """FineLIP's, measured in epochs of 1,500 steps of 4 micro-batches, 200 of warm-up, begins with a full step. GOAL's
    and StructXLIP's would end one step after the last: iteration t of T has the rate ½(1 + cos(π·t/T))."""
    factors = [wrapped_factor(step, total=1500, warmup=200, accumulate=4) for step in range(1501)]
    assert [factors[step] for step in (0, 1, 2, 49, 50)] == pytest.approx([1, 4 / 200, 8 / 200, 196 / 200, 1])
    assert [factors[step] for step in (75, 375, 750, 1125)] == pytest.approx([0.99, 0.0, 0.94, 0.22], abs=0.006)
    optim = OptimConfig(warmup=0, schedule="open_cosine", lr_floor=0.0)
    expected = [0.5 * (1 + math.cos(math.pi * step / 20)) for step in range(20)]
    assert [schedule_factor(step, 20, optim) for step in range(20)] == pytest.approx(expected)


def test_the_scale_stays_between_one_and_its_limit() -> None:
    for start, end in ((6.0, math.log(100)), (-1.0, 0.0), (3.0, 3.0)):
        parameter = nn.Parameter(torch.tensor(start))
        clamp_scale(parameter, 100.0)
        assert parameter.item() == pytest.approx(end)


def test_kept_positions_stay_the_same_bits(model_directory: Path) -> None:
    model = load(model_directory)
    table = model.backbone.text_model.embeddings.position_embedding.weight
    before = table.detach().clone()
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.3, decay="all"))
    keep_positions(optimizer, model, 5)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert torch.equal(table[:5], before[:5])
    assert (table[5:] != before[5:]).all()
