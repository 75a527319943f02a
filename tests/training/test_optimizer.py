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
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.frozen = nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2).requires_grad_(False)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))


class ToyWithReadouts(Toy):
    """Also the parameters of a method, under the name that the encoder gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.readouts = nn.ModuleDict({"full": nn.Linear(2, 2)})
        self.not_readouts = nn.Linear(2, 2, bias=False)


def test_readouts_have_a_rate_of_their_own() -> None:
    model = ToyWithReadouts()
    optim = OptimConfig(lr=0.1, scale_lr=0.2, weight_decay=0.3, readout_lr=0.7)
    groups = build_optimizer(model, optim).param_groups
    found = {id(p): (group["lr"], group["peak_lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    added = model.readouts["full"]
    assert found == {
        id(model.linear.weight): (0.1, 0.1, 0.3),
        id(model.not_readouts.weight): (0.1, 0.1, 0.3),
        **{id(p): (0.1, 0.1, 0.0) for p in (model.linear.bias, *model.norm.parameters())},
        id(added.weight): (0.7, 0.7, 0.3),
        id(added.bias): (0.7, 0.7, 0.0),
        id(model.logit_scale): (0.2, 0.2, 0.0),
    }
    assert sum(len(group["params"]) for group in groups) == len(found)


@pytest.mark.parametrize("scale_trains", [True, False])
def test_everything_can_decay(scale_trains: bool) -> None:
    """As in Long-CLIP's and FineLIP's trainers, biases, norms and the scale too; frozen parameters are left out."""
    model = ToyWithReadouts()
    model.logit_scale.requires_grad_(scale_trains)
    optim = OptimConfig(lr=0.1, scale_lr=0.2, weight_decay=0.3, readout_lr=0.7, decay="all")
    groups = build_optimizer(model, optim).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3] * len(groups)
    assert [group["lr"] for group in groups] == [0.1, 0.7] + [0.2] * scale_trains
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in trained}


def test_warm_up_then_half_a_cosine() -> None:
    factors = [learning_rate_factor(step, total=11, warmup=3, floor=0.1) for step in range(11)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert factors[3] == 1
    assert factors[10] == pytest.approx(0.1)
    assert factors[4] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 7)))
    assert all(later < earlier for earlier, later in pairwise(factors[3:]))
    assert learning_rate_factor(0, total=1, warmup=0) == 1


@pytest.mark.parametrize(
    ("fraction", "factor"), [(0.05, 0.99), (0.25, 0.0), (0.5, 0.94), (0.75, 0.22), (1.0, 0.56)], ids=str
)
def test_the_wrapped_schedule_is_the_measured_one(fraction: float, factor: float) -> None:
    """FineLIP's six epochs: 1,500 steps of 4 micro-batches, 200 of warm-up."""
    found = wrapped_factor(round(fraction * 1500), total=1500, warmup=200, accumulate=4)
    assert found == pytest.approx(factor, abs=0.006)


def test_the_wrapped_schedule_begins_with_a_full_step_and_then_warms_up() -> None:
    factors = [wrapped_factor(step, total=1500, warmup=200, accumulate=4) for step in range(51)]
    assert factors[:3] == pytest.approx([1, 4 / 200, 8 / 200])
    assert factors[50] == pytest.approx(200 / 200)
    assert factors[49] == pytest.approx(196 / 200)
    assert min(factors) > 0
    assert wrapped_factor(6, total=5, warmup=5, accumulate=1) == 1  # nothing to divide by


def test_the_open_cosine_would_end_one_step_after_the_last() -> None:
    """As GOAL and StructXLIP were released: iteration t of T has the rate ½(1 + cos(π·t/T))."""
    factors = [learning_rate_factor(step, total=20, warmup=0, open_end=True) for step in range(21)]
    assert factors == pytest.approx([0.5 * (1 + math.cos(math.pi * step / 20)) for step in range(21)])
    optim = OptimConfig(warmup=0, schedule="open_cosine", lr_floor=0.0)
    assert [schedule_factor(step, 20, optim) for step in range(20)] == factors[:20]


@pytest.mark.parametrize(("warmup", "steps"), [(4, 4), (4.0, 4), (0.25, 5), (0.1, 2), (1, 1), (0, 0)], ids=str)
def test_warm_up_in_steps_or_as_a_share(warmup: float, steps: int) -> None:
    optim = OptimConfig(warmup=warmup, lr_floor=0.0)
    found = [schedule_factor(step, 20, optim) for step in range(20)]
    assert found == [learning_rate_factor(step, total=20, warmup=steps) for step in range(20)]
    assert [rate < 1 for rate in found[: steps + 1]] == [True] * (steps - 1) + [False] * (1 if steps == 0 else 2)


def test_the_rate_of_a_step_scales_every_group() -> None:
    optimizer = build_optimizer(Toy(), OptimConfig(lr=0.1, scale_lr=0.4))
    assert optimizer.defaults["fused"]
    for factor in (0.5, 0.25):  # from the peak each time, not from the last rate
        set_learning_rate(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * factor] * 2 + [0.4 * factor])


def test_the_scale_stays_between_one_and_its_limit() -> None:
    for start, end in ((6.0, math.log(100)), (-1.0, 0.0), (3.0, 3.0)):
        parameter = nn.Parameter(torch.tensor(start))
        clamp_scale(parameter, 100.0)
        assert parameter.item() == pytest.approx(end)
    fixed = nn.Parameter(torch.tensor(4.6052), requires_grad=False)  # OpenAI's, a little more than ln 100
    clamp_scale(fixed, 100.0)
    assert fixed.item() == torch.tensor(4.6052).item()


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_kept_positions_stay_to_the_bit(model_directory: Path, decay: Literal["matrices", "all"]) -> None:
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
