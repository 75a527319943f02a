"""One optimiser step, and what it found: numbers that stay on the device until somebody reads them.

Reading a number makes the host wait until an accelerator is done. A step asks for none; the loop reads what a step
found after it has queued the next one, so the device always has work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hnclip.config import OptimConfig
from hnclip.core import Batch
from hnclip.models.dual_encoder import DualEncoder
from hnclip.objectives.base import Objective, TrainProgress
from hnclip.train.distributed import mean_over_processes
from hnclip.train.grad_cache import BACKWARD, Share, StepResult
from hnclip.train.optimizer import clamp_scale, learning_rate_factor, set_learning_rate, wrapped_factor
from hnclip.train.parallel import Alone

SATURATED = 1e-3  # a loss below this teaches nothing: the paper's threshold


@dataclass(frozen=True)
class Found:
    """The numbers of one step, on the device: terms, InfoNCE, gradient norm, scale; of all processes, the same in each.

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


def backward(
    parallel: Alone, batch: Batch, objective: Objective, optim: OptimConfig, share: Share | None = None
) -> StepResult:
    """Add to the parameters the gradient of a batch of the whole job, as a step of this configuration computes it.

    Args:
        batch, share, optim: as in `Stepper`.
    """
    model = parallel.model
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    if optim.precision == "bf16":
        autocast = partial(torch.autocast, model.device.type, dtype=torch.bfloat16)
    result = BACKWARD[optim.negatives](
        model,
        batch,
        objective,
        chunk=optim.micro_batch,
        device=model.device,
        autocast=autocast,
        gather=parallel.gather,
        sync=parallel.sync,
        share=share,
    )
    parallel.finish()
    return result


class Stepper:
    """What the optimiser steps of a run share: model, objective, optimiser and the schedule of its rates.

    Args:
        optim: with the precision chosen; `auto` is the loop's to decide.
        parallel: how the processes hold the model; this process alone when left out.
    """

    def __init__(
        self,
        model: DualEncoder,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        optim: OptimConfig,
        *,
        total: int,
        parallel: Alone | None = None,
    ) -> None:
        self.model, self.objective, self.optimizer, self.optim = model, objective, optimizer, optim
        self.parallel = parallel or Alone(model)
        self.total, self.warmup = total, round(optim.warmup * total if optim.warmup < 1 else optim.warmup)

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return self.optimizer.param_groups[0]["lr"]

    def _factor(self, step: int) -> float:
        if self.optim.schedule == "wrapped":
            return wrapped_factor(step, total=self.total, warmup=self.warmup, accumulate=self.optim.accumulate)
        return learning_rate_factor(
            step,
            total=self.total,
            warmup=self.warmup,
            floor=self.optim.lr_floor,
            open_end=self.optim.schedule == "open_cosine",
        )

    def __call__(self, batch: Batch, step: int, share: Share | None = None) -> Found:
        """Do the optimiser step after `step` others. The batch may lie in the host's memory; of several processes it is
        the `share` of each."""
        optim = self.optim
        set_learning_rate(self.optimizer, self._factor(step))
        self.optimizer.zero_grad(set_to_none=True)
        progress = TrainProgress(step, max(1, self.total // optim.epochs), optim.epochs)
        result = backward(self.parallel, batch, self.objective.at(progress), optim, share)
        # An infinite limit measures the norm and changes nothing.
        norm = self.parallel.clip(optim.clip_grad or float("inf"))
        self.optimizer.step()
        clamp_scale(self.model.backbone.logit_scale, optim.scale_max)
        terms = torch.stack(list(result.terms.values()))  # [K]
        terms, infonce = mean_over_processes(torch.cat([terms, result.infonce])).tensor_split([len(terms)])
        found = {
            **dict(zip(result.terms, terms)),
            "infonce": infonce.mean(),
            "saturated": (infonce < SATURATED).float().mean(),
            "grad_norm": norm,
            "scale": self.model.scale.detach(),
        }
        return Found(tuple(found), torch.stack([value.float() for value in found.values()]), len(result.terms))
