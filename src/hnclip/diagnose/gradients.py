"""Gradients of both losses: at a model's own weights, and along short runs on shares of the training data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hnclip.config import ObjectiveConfig, TrainConfig
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.speed import choose_precision
from hnclip.models.trainable import train_mode
from hnclip.objectives.build import build_objective
from hnclip.train.gradient_probe import GradientProbe
from hnclip.train.log import progress_bar, read_metrics
from hnclip.train.loop import train_or_continue
from hnclip.train.run_data import length_order, open_run_data, own_share

EVERY = 5  # optimiser steps between measurements, as in the paper


def gradients_at_start(
    model: DualEncoder, config: TrainConfig, *, batches: int, quiet: bool, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Entries as `hnclip train --probe-gradients` writes them, on the first batches of the first epoch, at the weights
    that the model has. All of its parameters count, whatever a run would freeze."""
    optim = replace(config.optim, precision=choose_precision(config.optim.precision, model.device))
    plain = build_objective(ObjectiveConfig(global_loss="infonce", token_weight=0.0))
    data = open_run_data(config, model, plain, quiet=quiet, report=report)
    pairs, dealt = data.deal(config, 0)
    probe = GradientProbe(model, optim, gamma=config.objective.gamma)
    chosen = dealt.batches[:batches]
    train_mode(model)
    entries = []
    with progress_bar("measuring gradients, batches", quiet=quiet) as bar:
        for number in bar.walk(range(len(chosen))):
            share = own_share(length_order(pairs, chosen[number], optim), optim)
            found = probe.probe(pairs.batch(share.rows), share)
            entries.append({"kind": "gradients", "epoch": 1, "step": number, **found})
    model.eval()
    return entries


def gradients_of_fractions(
    config: TrainConfig, fractions: tuple[float, ...], out: Path, *, quiet: bool, report: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Runs with L_HN on nested shares of the training pairs, measured on the way, as in the paper's appendix C. Runs
    that are finished are read, stopped ones go on."""
    found = {}
    for fraction in fractions:
        name = f"{100 * fraction:g} %"
        report(f"gradients along a run on {name} of the training pairs")
        run = replace(config, fraction=fraction, probe_gradients=f"every={EVERY}", out=out / f"fraction-{fraction:g}")
        train_or_continue(run, quiet=quiet, report=report)
        found[name] = read_metrics(run.out, "gradients")
    return found
