"""One optimiser step, and what it found: numbers that stay on the device until somebody reads them.

Reading a number makes the host wait until an accelerator is done. A step asks for none; the loop reads what a step
found after it has queued the next one, so the device always has work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hnclip.config import OptimConfig
from hnclip.data.batches import Batch
from hnclip.models.dual_encoder import DualEncoder
from hnclip.objectives.objective import Objective
from hnclip.train.grad_cache import BACKWARD
from hnclip.train.optimizer import clamp_scale, learning_rate_factor, set_learning_rate

SATURATED = 1e-3  # an InfoNCE below this teaches nothing: the paper's threshold


@dataclass(frozen=True)
class Found:
    """The numbers of one step, on the device: terms, InfoNCE, gradient norm, scale.

    Shape:
        values: [K], in the order of `names`; the first `terms` of them add up to the loss.
    """

    names: tuple[str, ...]
    values: Tensor
    terms: int

    def read(self) -> dict[str, float]:
        """By name, with `loss` first; waits for the device."""
        values = self.values.tolist()
        return {"loss": sum(values[: self.terms]), **dict(zip(self.names, values))}


class Stepper:
    """What the optimiser steps of a run share: model, objective, optimiser and the schedule of its rates."""

    def __init__(
        self,
        model: DualEncoder,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        optim: OptimConfig,
        *,
        total: int,
    ) -> None:
        self.model, self.objective, self.optimizer, self.optim = model, objective, optimizer, optim
        self.total, self.warmup = total, round(optim.warmup * total)
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if optim.precision == "bf16":
            self.autocast = lambda: torch.autocast(model.device.type, dtype=torch.bfloat16)

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return self.optimizer.param_groups[0]["lr"]

    def __call__(self, batch: Batch, step: int) -> Found:
        """Do the optimiser step after `step` others. The batch may lie in the host's memory."""
        optim = self.optim
        factor = learning_rate_factor(step, total=self.total, warmup=self.warmup, floor=optim.lr_floor)
        set_learning_rate(self.optimizer, factor)
        self.optimizer.zero_grad(set_to_none=True)
        result = BACKWARD[optim.negatives](
            self.model,
            batch,
            self.objective,
            chunk=optim.micro_batch,
            device=self.model.device,
            autocast=self.autocast,
        )
        limit = optim.clip_grad or float("inf")  # an infinite limit measures the norm and changes nothing
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        clamp_scale(self.model.backbone.logit_scale, optim.scale_max)
        found = {
            **result.terms,
            "infonce": result.infonce.mean(),
            "saturated": (result.infonce < SATURATED).float().mean(),
            "grad_norm": norm,
            "scale": self.model.scale.detach(),
        }
        return Found(tuple(found), torch.stack([value.float() for value in found.values()]), len(result.terms))
