"""The training loop: one readable path from a configuration to a fine-tuned model."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from hnclip.config import RunOptions, TrainConfig, read_config, to_json
from hnclip.models.adapters import BaseModel, add_adapters
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.models.parameters import describe_trainable, freeze
from hnclip.objectives.base import Objective
from hnclip.objectives.registry import METHODS, build_objective, build_readouts, term_weights
from hnclip.train.checkpoint import only_writer, recover_state
from hnclip.train.distributed import (
    agreement,
    is_distributed,
    process_group,
    rank,
    tell_everybody,
    world_size,
)
from hnclip.train.epochs import LEFT_OUT, RESULT, Run, RunStatus, TrainingDiverged, TrainResult
from hnclip.train.lost import ends_together
from hnclip.train.run_data import RunData, open_run_data, with_similarities
from hnclip.train.speed import choose_precision, compile_blocks, recompute_activations
from hnclip.util.device import find_device
from hnclip.util.files import recover_directory, replace_file

log = logging.getLogger(__name__)

__all__ = [
    "CONFIG",
    "LEFT_OUT",
    "OPTIONS",
    "RESULT",
    "TrainResult",
    "TrainingDiverged",
    "resume",
    "saved_config",
    "saved_options",
    "train",
    "train_or_continue",
]

CONFIG, OPTIONS = "config.json", "options.json"


def train(config: TrainConfig, options: RunOptions | None = None) -> TrainResult:
    """Start a run in `options.out`, which must not hold one already. Under `torchrun`, all processes together."""
    options = options or RunOptions()
    out = options.out

    def begin() -> TrainConfig:
        if (out / CONFIG).exists():
            raise ValueError(f"{out} already holds a run; continue it with --resume {out}, or choose another --out")
        return config

    return _in_a_group(options, begin)


def resume(out: Path, options: RunOptions | None = None) -> TrainResult:
    """Continue the run in `out` from its last checkpoint, to the same weights as if it had never stopped.

    Args:
        options: where and how it goes on; as it was started if not given.
    """
    return _in_a_group(replace(options or saved_options(out), out=out), lambda: saved_config(out))


def train_or_continue(config: TrainConfig, options: RunOptions) -> TrainResult:
    """Start the run, or continue it if `options.out` holds it. The result of a finished run is read."""
    out = options.out
    if not (out / CONFIG).exists():
        return train(config, options)
    saved = saved_config(out)
    if config.optim.precision == "auto":  # saved as what it was resolved to
        config = replace(config, optim=replace(config.optim, precision=saved.optim.precision))
    if saved != config:
        raise ValueError(f"{out} holds a run with other settings; choose another --out or delete it")
    if (out / RESULT).exists():
        log.info(f"using the finished run in {out}")
    return resume(out, options)


def saved_config(out: Path) -> TrainConfig:
    """The configuration of the run in a directory."""
    path = out / CONFIG
    if not path.exists():
        raise ValueError(
            f"{out} holds no run to resume: {path} does not exist. If the run was stopped before its first step, start "
            "it again with the same command"
        )
    return read_config(TrainConfig, path)


def saved_options(out: Path) -> RunOptions:
    """The options with which the run in a directory was started or last resumed; its directory may have moved."""
    path = out / OPTIONS
    found = read_config(RunOptions, path) if path.exists() else RunOptions()
    return replace(found, out=out)


def _in_a_group(options: RunOptions, begin: Callable[[], TrainConfig]) -> TrainResult:
    """Run as one process of the job that `torchrun` started, if it did. Rank 0 holds the directory and is the only one
    that writes."""
    with process_group(options.device), ExitStack() as stack:
        progress = RunStatus(options.out)
        stack.enter_context(ends_together(progress.where))
        with agreement():
            config = begin()
            if rank() == 0:
                stack.enter_context(only_writer(options.out))
        return _run(config, options, progress)


def _run(config: TrainConfig, options: RunOptions, progress: RunStatus) -> TrainResult:
    out = options.out
    if (out / RESULT).exists():
        log.info(f"{out} is finished already")
        return TrainResult(out=out, **json.loads((out / RESULT).read_text(encoding="utf-8")))
    with agreement():
        if rank() == 0:
            for name in ("best", "last"):
                recover_directory(out / name)
            recover_state(out)
        _check_processes(config, options)
        if options.threads:
            torch.set_num_threads(options.threads)
        torch.manual_seed(config.seed)
        device = find_device(options.device)
    # Decided once, and saved: neither another process nor the machine that a run is resumed on decides otherwise.
    precision = tell_everybody(choose_precision(config.optim.precision, device))
    config = replace(config, optim=replace(config.optim, precision=precision))
    with agreement(patient=True):  # a model may have to be fetched
        base = _base(config)
        model = load(**asdict(base)).to(device)
        log.info(f"model: {model.source}")
        model.untrained_projections = False  # this run trains them
        choose_trainable(config, model)
        objective = build_objective(config.objective)
        model.readouts.update(build_readouts(objective, model))
        log.info(describe_trainable(model))
        _announce(config, options, model, objective)
        if options.speed.recompute:
            recompute_activations(model)
        if options.speed.compile:
            compile_blocks(model)
    data = _open_in_turn(config, options, model, objective)
    # Only now: a run that could not start because of its model or data leaves nothing that is in the way of the next.
    with agreement():
        if rank() == 0:
            for name, content in ((OPTIONS, options), (CONFIG, config)):
                with replace_file(out / name) as partial:
                    partial.write_text(to_json(content), encoding="utf-8")
    return Run(config, options, base, model, objective, data, progress).go()


def _check_processes(config: TrainConfig, options: RunOptions) -> None:
    optim, processes = config.optim, world_size()
    if optim.negatives == "micro" and optim.micro_batch < processes:
        raise ValueError(
            f"{processes} processes cannot share micro-batches of {optim.micro_batch} pairs: set --optim.micro-batch "
            f"to {processes} or a multiple of it, or --optim.negatives batch, or use fewer processes"
        )
    if config.adapt.freeze_positions and is_distributed() and options.speed.parallel == "fsdp":
        raise ValueError("adapt.freeze_positions needs whole parameters: use --speed.parallel ddp")


def _announce(config: TrainConfig, options: RunOptions, model: DualEncoder, objective: Objective) -> None:
    if (chosen := config.objective).method != "hn_clip":
        weights = ", ".join(f"{name} {weight:g}" for name, weight in term_weights(chosen).items())
        title = METHODS[chosen.method].title
        log.info(f"{title}, {chosen.fidelity}: global loss {chosen.global_loss}, terms {weights}")
    highest = config.optim.scale_max
    trains = model.backbone.logit_scale.requires_grad
    if trains and highest is not None and model.scale.item() > highest * 1.01:
        log.warning(
            f"the inverse temperature {model.scale.item():.1f} will be clamped to {highest:g}; "
            "raise --optim.scale-max or set it to None to keep it, or fix it with --optim.scale-lr 0"
        )
    if "short" in objective.text_views:
        from hnclip.objectives.long_clip import principal_note

        whole = config.optim.negatives == "batch"
        pairs = config.optim.micro_batch * (config.optim.accumulate if whole else 1)
        if note := principal_note(pairs):
            log.info(note)
    if config.optim.precision != "fp32":
        log.info(f"the towers compute in {config.optim.precision}")
    if is_distributed():
        log.info(f"{world_size()} processes, {options.speed.parallel}; each batch is shared among them")


def _open_in_turn(config: TrainConfig, options: RunOptions, model: DualEncoder, objective: Objective) -> RunData:
    """Open the data: rank 0 first, which fills the image cache, then the other ranks."""
    for turn in (True, False):
        with agreement(patient=True):
            if (rank() == 0) == turn:
                data = open_run_data(config, model, objective)
    with agreement():
        first = tell_everybody(data.fingerprint())
        if data.fingerprint() != first:
            raise ValueError(f"process {rank()} sees other data than process 0: {data.fingerprint()}, there {first}")
    return with_similarities(data, config, model, batch=options.evaluate_batch)


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
