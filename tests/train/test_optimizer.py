from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from hnclip.train.optimizer import (
    build_optimizer,
    clamp_scale,
    learning_rate_factor,
    parameter_groups,
    set_learning_rate,
)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.frozen = nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2).requires_grad_(False)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))


def test_only_matrices_are_decayed_and_everything_is_there_once() -> None:
    model = Toy()
    matrices, vectors, scale = parameter_groups(model, lr=0.1, scale_lr=0.2, weight_decay=0.3)
    assert [p.shape for p in matrices["params"]] == [(2, 3)]
    assert {id(p) for p in vectors["params"]} == {id(p) for p in (model.linear.bias, *model.norm.parameters())}
    assert [id(p) for p in scale["params"]] == [id(model.logit_scale)]
    assert [group["weight_decay"] for group in (matrices, vectors, scale)] == [0.3, 0.0, 0.0]
    assert [group["lr"] for group in (matrices, vectors, scale)] == [0.1, 0.1, 0.2]


def test_a_fixed_temperature_takes_no_gradient_at_all() -> None:
    model = Toy()
    groups = parameter_groups(model, lr=0.1, scale_lr=0.0, weight_decay=0.3)
    assert len(groups) == 2
    assert not model.logit_scale.requires_grad


def test_warm_up_then_half_a_cosine() -> None:
    factors = [learning_rate_factor(step, total=11, warmup=3, floor=0.1) for step in range(11)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert factors[3] == 1
    assert factors[10] == pytest.approx(0.1)
    assert factors[4] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 7)))
    assert all(later < earlier for earlier, later in pairwise(factors[3:]))
    assert learning_rate_factor(0, total=1, warmup=0) == 1


def test_the_rate_of_a_step_scales_every_group() -> None:
    optimizer = build_optimizer(Toy(), lr=0.1, scale_lr=0.4, weight_decay=0.0, betas=(0.9, 0.98))
    for factor in (0.5, 0.25):  # from the peak each time, not from the last rate
        set_learning_rate(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * factor] * 2 + [0.4 * factor])


def test_the_scale_stays_between_one_and_its_limit() -> None:
    for start, end in ((6.0, math.log(100)), (-1.0, 0.0), (3.0, 3.0)):
        parameter = nn.Parameter(torch.tensor(start))
        clamp_scale(parameter, 100.0)
        assert parameter.item() == pytest.approx(end)


def test_a_fixed_scale_is_not_even_clamped() -> None:
    """OpenAI's 4.6052 is a little more than ln 100; what is frozen keeps every bit."""
    parameter = nn.Parameter(torch.tensor(4.6052), requires_grad=False)
    clamp_scale(parameter, 100.0)
    assert parameter.item() == torch.tensor(4.6052).item()


def test_one_kernel_does_what_the_literal_formula_does() -> None:
    """Decoupled decay, bias-corrected moments: three steps of AdamW written out."""
    torch.manual_seed(0)
    model = Toy().double()
    optimizer = build_optimizer(model, lr=0.1, scale_lr=0.2, weight_decay=0.3, betas=(0.9, 0.98))
    assert optimizer.defaults["fused"]
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = [parameter.detach().clone() for parameter in trained]
    first, second = ([torch.zeros_like(value) for value in expected] for _ in range(2))
    for step in range(1, 4):
        for k, parameter in enumerate(trained):
            parameter.grad = torch.randn_like(parameter)
            lr, decay = rates[id(parameter)]
            first[k] = 0.9 * first[k] + 0.1 * parameter.grad
            second[k] = 0.98 * second[k] + 0.02 * parameter.grad**2
            update = (first[k] / (1 - 0.9**step)) / ((second[k] / (1 - 0.98**step)).sqrt() + 1e-8)
            expected[k] = expected[k] * (1 - lr * decay) - lr * update
        optimizer.step()
    for parameter, value in zip(trained, expected):
        torch.testing.assert_close(parameter.detach(), value)
