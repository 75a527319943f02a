"""Gradients of both losses: at a model's own weights, and along short runs on shares of the training data."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

from hnclip.config import ObjectiveConfig, RunOptions, TrainConfig
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.parameters import train_mode
from hnclip.objectives.registry import build_objective
from hnclip.train.data import open_run_data
from hnclip.train.gradient_probe import GradientProbe
from hnclip.train.log import read_metrics
from hnclip.train.runs import train_or_continue
from hnclip.train.setup import choose_precision
from hnclip.util.console import progress

log = logging.getLogger(__name__)

EVERY = 5  # optimiser steps between measurements, as in the paper


def gradients_at_start(model: DualEncoder, config: TrainConfig, *, batches: int) -> list[dict[str, Any]]:
    """Entries as `hnclip train --probe-gradients` writes them, on the first batches of the first epoch, at the weights
    that the model has. All of its parameters count, whatever a run would freeze."""
    optim = replace(config.optim, precision=choose_precision(config.optim.precision, model.device))
    plain = build_objective(ObjectiveConfig(global_loss="infonce", token_weight=0.0))
    data = open_run_data(config, model, plain)
    pairs, epoch = data.batches(config, 0)
    probe = GradientProbe(model, optim, gamma=config.objective.gamma)
    chosen = epoch[:batches]
    train_mode(model)
    entries = []
    with progress("measuring gradients, batches") as bar:
        for number in bar.iterate(range(len(chosen))):
            found = probe.probe(pairs.batch(chosen[number]))
            if not all(math.isfinite(found[name]) for name in ("infonce", "hn", "infonce_norm", "hn_norm")):
                raise ValueError(
                    f"batch {number + 1} has a loss or gradient that is not a number: the model returns NaN or "
                    "infinity for some of its pictures or captions"
                )
            entries.append({"kind": "gradients", "epoch": 1, "step": number, **found})
    model.eval()
    return entries


@dataclass(frozen=True)
class ProbedRun:
    """What a run measured on its way: gradients of both losses, and retrieval on the validation split by epoch."""

    gradients: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


def probed_run(config: TrainConfig, fraction: float, options: RunOptions) -> ProbedRun:
    """A run with L_HN on a share of the training pairs, measured on the way, as in the paper's appendix C. One that is
    finished is read, a stopped one goes on.

    Args:
        options: `out` must be of this run alone, for as long as its data and model stay the same.
    """
    log.info(f"gradients along a run on {100 * fraction:g} % of the training pairs")
    train_or_continue(replace(config, fraction=fraction, probe_gradients=EVERY), options)
    return ProbedRun(read_metrics(options.out, "gradients"), read_metrics(options.out, "evaluation"))
