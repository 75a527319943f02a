"""AdamW over parameter groups, and the learning rate of every step."""

from __future__ import annotations

import math

import torch
from torch import nn

from hnclip.config import OptimConfig
from hnclip.models.dual_encoder import DualEncoder


def build_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters, fused where the device supports it: one pass over the weights, not a dozen.

    Matrices decay; biases, norms and the scale do not, unless `optim.decay` is "all". The scale and the readouts of a
    method have learning rates of their own.
    """
    rates = {
        "model": optim.lr,
        "readouts": optim.lr if optim.readout_lr is None else optim.readout_lr,
        "scale": optim.lr if optim.scale_lr is None else optim.scale_lr,
    }
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {
        (kind, decays): [] for kind in rates for decays in (True, False)
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_scale = name.endswith("logit_scale")
            kind = "scale" if is_scale else "readouts" if name.startswith("readouts.") else "model"
            decays = optim.decay == "all" or (parameter.ndim >= 2 and not is_scale)
            groups[kind, decays].append(parameter)
    found = [
        {"params": parameters, "lr": rates[kind], "weight_decay": optim.weight_decay * decays, "peak_lr": rates[kind]}
        for (kind, decays), parameters in groups.items()
        if parameters
    ]
    devices = {parameter.device.type for parameters in groups.values() for parameter in parameters}
    fused = devices <= {"cpu", "cuda"} or None
    return torch.optim.AdamW(found, betas=(optim.beta1, optim.beta2), fused=fused)


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


def warmup_steps(total: int, optim: OptimConfig) -> int:
    return round(optim.warmup * total if optim.warmup < 1 else optim.warmup)


def schedule_factor(step: int, total: int, optim: OptimConfig) -> float:
    """The share of the learning rate in the step that follows `step` others of `total`."""
    warmup = warmup_steps(total, optim)
    if optim.schedule == "wrapped":
        return wrapped_factor(step, total=total, warmup=warmup, accumulate=optim.accumulate)
    open_end = optim.schedule == "open_cosine"
    return learning_rate_factor(step, total=total, warmup=warmup, floor=optim.lr_floor, open_end=open_end)


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
