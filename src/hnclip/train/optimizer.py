"""AdamW over parameter groups, and the learning rate of every step."""

from __future__ import annotations

import math

import torch
from torch import nn


def parameter_groups(model: nn.Module, *, lr: float, scale_lr: float, weight_decay: float) -> list[dict]:
    """Three groups: matrices (decayed), biases, norms and embeddings of one row (not decayed), and the temperature,
    which has a learning rate of its own and is never decayed. A zero `scale_lr` leaves the temperature out and frozen:
    a gradient that no step uses would still count in the norm that clipping looks at."""
    decay, plain, scale = [], [], []
    for name, parameter in model.named_parameters():
        is_scale = name.endswith("logit_scale")
        if is_scale and scale_lr == 0:
            parameter.requires_grad_(False)
        if not parameter.requires_grad:
            continue
        if is_scale:
            scale.append(parameter)
        elif parameter.ndim < 2:
            plain.append(parameter)
        else:
            decay.append(parameter)
    groups = [
        {"params": decay, "lr": lr, "weight_decay": weight_decay},
        {"params": plain, "lr": lr, "weight_decay": 0.0},
        {"params": scale, "lr": scale_lr, "weight_decay": 0.0},
    ]
    return [{**group, "peak_lr": group["lr"]} for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module, *, lr: float, scale_lr: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """AdamW, one kernel for all of it where the device has one: a dozen passes over the weights become one."""
    groups = parameter_groups(model, lr=lr, scale_lr=scale_lr, weight_decay=weight_decay)
    kinds = {parameter.device.type for group in groups for parameter in group["params"]}
    return torch.optim.AdamW(groups, betas=betas, fused=kinds <= {"cpu", "cuda"} or None)


def learning_rate_factor(step: int, *, total: int, warmup: int, floor: float = 0.0) -> float:
    """Linear warm-up to 1 over `warmup` steps, then a half cosine down to `floor` at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - 1 - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Every group's peak rate times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def clamp_scale(logit_scale: nn.Parameter, maximum: float) -> None:
    """Keep s = exp(logit_scale) in [1, maximum] after a step, as CLIP does with 100. A fixed one is left as it is."""
    if logit_scale.requires_grad:
        with torch.no_grad():
            logit_scale.clamp_(0.0, math.log(maximum))
