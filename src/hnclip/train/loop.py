"""The training loop: one readable path from a configuration to a fine-tuned model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Literal

import torch

from hnclip.config import TrainConfig, from_json, to_json
from hnclip.models.adapters import BaseModel, add_adapters
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.models.parameters import describe_trainable, freeze
from hnclip.objectives.base import Objective
from hnclip.objectives.registry import build_objective, build_readouts, term_weights
from hnclip.train.checkpoint import only_writer, recover_state
from hnclip.train.distributed import (
    agreement,
    is_distributed,
    process_group,
    rank,
    tell_everybody,
    world_size,
)
from hnclip.train.epochs import LEFT_OUT, RESULT, Progress, Run, TrainingDiverged, TrainResult
from hnclip.train.lost import ends_together
from hnclip.train.run_data import RunData, open_run_data, with_similarities
from hnclip.train.speed import choose_precision, compile_blocks, recompute_activations
from hnclip.util.device import find_device
from hnclip.util.files import recover_directory, replace_file

__all__ = ["CONFIG", "LEFT_OUT", "RESULT", "TrainResult", "TrainingDiverged", "resume", "train", "train_or_continue"]

CONFIG = "config.json"


def train(config: TrainConfig, *, quiet: bool = False, report: Callable[[str], None] = print) -> TrainResult:
    """Start a run in `config.out`, which must not hold one already. Under `torchrun`, all processes together."""

    def begin() -> TrainConfig:
        if (config.out / CONFIG).exists():
            raise ValueError(
                f"{config.out} already holds a run; continue it with --resume {config.out}, or choose another --out"
            )
        return config

    return _in_a_group(config.out, config.device, begin, quiet, report)


def resume(
    out: Path,
    *,
    parallel: Literal["ddp", "fsdp"] | None = None,
    quiet: bool = False,
    report: Callable[[str], None] = print,
) -> TrainResult:
    """Continue the run in `out` from its last checkpoint, to the same weights as if it had never stopped.

    Args:
        parallel: how several processes hold the model from now on; as before when left out.
    """

    def begin() -> TrainConfig:
        config = _saved_config(out)
        return config if parallel is None else replace(config, speed=replace(config.speed, parallel=parallel))

    device = _saved_config(out).device if (out / CONFIG).exists() else "cpu"
    return _in_a_group(out, device, begin, quiet, report)


def train_or_continue(
    config: TrainConfig, *, quiet: bool = False, report: Callable[[str], None] = print
) -> TrainResult:
    """`train`; or, if `config.out` holds this very run, what is left of it. A finished run is read."""
    if not (config.out / CONFIG).exists():
        return train(config, quiet=quiet, report=report)
    saved = _saved_config(config.out)
    if config.optim.precision == "auto":  # what it came to was saved
        config = replace(config, optim=replace(config.optim, precision=saved.optim.precision))
    if saved != config:
        raise ValueError(f"{config.out} holds a run with other settings; choose another --out or delete it")
    if (config.out / RESULT).exists():
        report(f"using the finished run in {config.out}")
    return resume(config.out, quiet=quiet, report=report)


def _saved_config(out: Path) -> TrainConfig:
    path = out / CONFIG
    if not path.exists():
        raise ValueError(
            f"{out} holds no run to resume: {path} does not exist. A run that was stopped before its first step is "
            "started again by the same command; pictures that were read stay in the cache"
        )
    return from_json(TrainConfig, path.read_text(encoding="utf-8"))


def _in_a_group(
    out: Path, device: str, begin: Callable[[], TrainConfig], quiet: bool, report: Callable[[str], None]
) -> TrainResult:
    """Run as one process of the job that `torchrun` started, if it did. The first one holds the directory and is the
    only one that writes and speaks."""
    with process_group(device), ExitStack() as stack:
        progress = Progress(out)
        stack.enter_context(ends_together(progress.where, report))
        with agreement():
            config = begin()
            if rank() == 0:
                stack.enter_context(only_writer(out))
        speaks = rank() == 0
        return _run(config, out, quiet or not speaks, report if speaks else _nobody, progress)


def _nobody(text: str) -> None:
    """The other processes found the same."""


def _run(config: TrainConfig, out: Path, quiet: bool, report: Callable[[str], None], progress: Progress) -> TrainResult:
    if (out / RESULT).exists():
        report(f"{out} is finished already")
        return TrainResult(out=out, **json.loads((out / RESULT).read_text(encoding="utf-8")))
    with agreement():
        if rank() == 0:
            for name in ("best", "last"):
                recover_directory(out / name)
            recover_state(out)
        _check_processes(config)
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        device = find_device(config.device)
    # Decided once, and saved: neither another process nor the machine that a run is resumed on decides otherwise.
    precision = tell_everybody(choose_precision(config.optim.precision, device))
    config = replace(config, optim=replace(config.optim, precision=precision))
    with agreement(patient=True):  # a model may have to be fetched
        base = _base(config)
        model = load(**asdict(base)).to(device)
        report(f"model: {model.source}")
        model.untrained_projections = False  # this run trains them
        choose_trainable(config, model)
        objective = build_objective(config.objective)
        model.readouts.update(build_readouts(objective, model))
        report(describe_trainable(model))
        _announce(config, model, objective, report)
        if config.speed.recompute:
            recompute_activations(model)
        if config.speed.compile:
            compile_blocks(model)
    data = _open_in_turn(config, model, objective, quiet, report)
    # Only now: a run that could not start because of its model or data leaves nothing that is in the way of the next.
    with agreement():
        if rank() == 0:
            with replace_file(out / CONFIG) as partial:
                partial.write_text(to_json(config), encoding="utf-8")
    return Run(config, out, base, model, objective, data, quiet, report, progress).go()


def _check_processes(config: TrainConfig) -> None:
    optim, processes = config.optim, world_size()
    if optim.negatives == "micro" and optim.micro_batch < processes:
        raise ValueError(
            f"{processes} processes cannot share micro-batches of {optim.micro_batch} pairs: set --optim.micro-batch "
            f"to {processes} or a multiple of it, or --optim.negatives batch, or use fewer processes"
        )
    if config.adapt.freeze_positions and is_distributed() and config.speed.parallel == "fsdp":
        raise ValueError("adapt.freeze_positions needs whole parameters: use --speed.parallel ddp")


def _announce(config: TrainConfig, model: DualEncoder, objective: Objective, report: Callable[[str], None]) -> None:
    if (chosen := config.objective).method != "hn_clip":
        weights = ", ".join(f"{name} {weight:g}" for name, weight in term_weights(chosen).items())
        report(f"{objective.title}, {chosen.fidelity}: global loss {chosen.global_loss}, terms {weights}")
    highest = config.optim.scale_max
    trains = model.backbone.logit_scale.requires_grad
    if trains and highest is not None and model.scale.item() > highest * 1.01:
        report(
            f"warning: the inverse temperature {model.scale.item():.1f} will be clamped to {highest:g}; "
            "raise --optim.scale-max or set it to None to keep it, or fix it with --optim.scale-lr 0"
        )
    if "short" in objective.text_views:
        from hnclip.objectives.long_clip import principal_note

        whole = config.optim.negatives == "batch"
        pairs = config.optim.micro_batch * (config.optim.accumulate if whole else 1)
        if note := principal_note(pairs):
            report(f"note: {note}")
    if config.optim.precision != "fp32":
        report(f"the towers compute in {config.optim.precision}")
    if is_distributed():
        report(f"{world_size()} processes, {config.speed.parallel}; every batch is dealt to all of them")


def _open_in_turn(
    config: TrainConfig, model: DualEncoder, objective: Objective, quiet: bool, report: Callable[[str], None]
) -> RunData:
    """The data: by the first process, which fills the picture cache, then by the others, which find it filled."""
    for turn in (True, False):
        with agreement(patient=True):
            if (rank() == 0) == turn:
                data = open_run_data(config, model, objective, quiet=quiet, report=report)
    with agreement():
        first = tell_everybody(data.fingerprint())
        if data.fingerprint() != first:
            raise ValueError(f"process {rank()} sees other data than process 0: {data.fingerprint()}, there {first}")
    return with_similarities(data, config, model, quiet=quiet)


def _base(config: TrainConfig) -> BaseModel:
    """The model that the run starts from, and that its adapters will ask for."""
    base = BaseModel(**{spec.name: getattr(config, spec.name) for spec in fields(BaseModel)})
    return base if config.adapt.method == "full" else base.located()  # else refused now, not after the first epoch


def choose_trainable(config: TrainConfig, model: DualEncoder) -> None:
    """Set the scale of the start, freeze what a run leaves as it is, or add its adapters."""
    adapt, scale_trains = config.adapt, config.optim.scale_lr != 0
    if config.optim.scale is not None:
        with torch.no_grad():
            model.backbone.logit_scale.fill_(math.log(config.optim.scale))
    if adapt.method == "full":
        freeze(model, image=adapt.freeze_image, text=adapt.freeze_text)
        model.backbone.logit_scale.requires_grad_(scale_trains)
    else:
        add_adapters(
            model,
            method=adapt.method,
            rank=adapt.rank,
            alpha=adapt.alpha,
            dropout=adapt.dropout,
            towers=adapt.towers,
            projections=adapt.projections,
            train_scale=scale_trains,
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("nothing is left to train: both towers are frozen and the temperature is fixed")
