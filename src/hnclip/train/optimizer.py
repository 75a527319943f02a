"""AdamW over parameter groups, and the learning rate of every step."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn

from hnclip.config import OptimConfig
from hnclip.models.dual_encoder import DualEncoder


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    scale_lr: float,
    weight_decay: float,
    readout_lr: float | None = None,
    decay: Literal["matrices", "all"] = "matrices",
) -> list[dict]:
    """Matrices (decayed), biases, norms and embeddings of one row (not decayed), the same two of a method's readouts
    at their own rate, and the temperature, which has a learning rate of its own and is not decayed. With `decay` all,
    everything is decayed. A zero `scale_lr` leaves the temperature out and frozen: a gradient that no step uses would
    still count in the norm that clipping looks at."""
    rates = {"model": lr, "readouts": lr if readout_lr is None else readout_lr, "scale": scale_lr}
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {
        (kind, decayed): [] for kind in rates for decayed in (True, False)
    }
    for name, parameter in model.named_parameters():
        is_scale = name.endswith("logit_scale")
        if is_scale and scale_lr == 0:
            parameter.requires_grad_(False)
        if not parameter.requires_grad:
            continue
        kind = "scale" if is_scale else "readouts" if name.startswith("readouts.") else "model"
        decayed = decay == "all" or (parameter.ndim >= 2 and not is_scale)
        groups[kind, decayed].append(parameter)
    return [
        {
            "params": parameters,
            "lr": rates[kind],
            "weight_decay": weight_decay if decayed else 0.0,
            "peak_lr": rates[kind],
        }
        for (kind, decayed), parameters in groups.items()
        if parameters
    ]


def build_optimizer(model: nn.Module, *, betas: tuple[float, float], **rates: Any) -> torch.optim.AdamW:
    """AdamW, one kernel for all of it where the device has one: a dozen passes over the weights become one.

    Args:
        rates: as `parameter_groups` takes them.
    """
    groups = parameter_groups(model, **rates)
    kinds = {parameter.device.type for group in groups for parameter in group["params"]}
    return torch.optim.AdamW(groups, betas=betas, fused=kinds <= {"cpu", "cuda"} or None)


def optimizer_of(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """The optimiser of a run."""
    return build_optimizer(
        model,
        lr=optim.lr,
        scale_lr=optim.lr if optim.scale_lr is None else optim.scale_lr,
        weight_decay=optim.weight_decay,
        readout_lr=optim.readout_lr,
        decay=optim.decay,
        betas=(optim.beta1, optim.beta2),
    )


def keep_positions(optimizer: torch.optim.Optimizer, model: DualEncoder, count: int) -> None:
    """Restore the first `count` positions of the text tower after every step, whatever momentum and decay did.

    Raises:
        ValueError: the text tower has no table with so many positions.
    """
    table = model.family.positions(model.backbone).position_embedding.weight  # [T, W]
    if len(table) < count:
        raise ValueError(f"adapt.freeze_positions must be at most the {len(table)} positions of the model, got {count}")
    before = table.detach()[:count].clone()

    def restore(*_: object) -> None:
        with torch.no_grad():
            table[:count] = before

    optimizer.register_step_post_hook(restore)


def learning_rate_factor(step: int, *, total: int, warmup: int, floor: float = 0.0, open_end: bool = False) -> float:
    """Linear warm-up to 1 over `warmup` steps, then a half cosine down to `floor` at the last step, or one step after
    it with `open_end`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup - (0 if open_end else 1))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def wrapped_factor(step: int, *, total: int, warmup: int, accumulate: int) -> float:
    """FineLIP's released schedule: the half cosine of `learning_rate_factor` with floor 0, but with `step` counted in
    micro-batches and `total` in optimiser steps, so that it runs `accumulate` times too fast and rises again. The rate
    is set after each step for the next, from the number of the step's last micro-batch; the first step has the full
    rate."""
    if step == 0:
        return 1.0
    micro = step * accumulate - 1
    if micro < warmup:
        return (micro + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (micro - warmup) / max(1, total - warmup)))


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Every group's peak rate times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def clamp_scale(logit_scale: nn.Parameter, maximum: float | None) -> None:
    """Keep s = exp(logit_scale) in [1, maximum] after a step, as CLIP does with 100. A fixed one is left as it is, and
    with None any."""
    if logit_scale.requires_grad and maximum is not None:
        with torch.no_grad():
            logit_scale.clamp_(0.0, math.log(maximum))
