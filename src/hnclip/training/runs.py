"""Runs and their directories: start, resume, and what a directory says about its run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hnclip.config import RunOptions, TrainConfig, read_config
from hnclip.data.records import DataSet
from hnclip.models.load import RUN_CONFIG, RUN_RESULT
from hnclip.training.distributed import process_group
from hnclip.training.trainer import OPTIONS, Trainer, TrainResult
from hnclip.util.files import read_json

log = logging.getLogger(__name__)


def train(
    config: TrainConfig,
    options: RunOptions | None = None,
    *,
    data: DataSet | None = None,
    on_step: Callable[[int], None] | None = None,
) -> TrainResult:
    """Start a run in `options.out`, which must not hold one already. Under `torchrun`, all processes together.

    Args:
        data: records to train and validate on, instead of reading `config.data`.
        on_step: called after every optimiser step with the number of finished steps.
    """
    options = options or RunOptions()
    if (options.out / RUN_CONFIG).exists():
        raise ValueError(
            f"{options.out} already holds a run; continue it with --resume {options.out}, or choose another --out"
        )
    with process_group(options.device):
        return Trainer(config, options, data=data, on_step=on_step).fit()


def resume(out: Path, options: RunOptions | None = None, **others: Any) -> TrainResult:
    """Continue the run in `out` from its last checkpoint, to the same weights as if it had never stopped.

    Args:
        options: where and how it continues; as it was started if not given.
        others: `data` and `on_step`, as in `train`.
    """
    config = saved_config(out)
    options = replace(options or saved_options(out), out=out)
    if (out / RUN_RESULT).exists():
        log.info(f"{out} is finished already")
        return _read_result(out)
    with process_group(options.device):
        return Trainer(config, options, **others).fit()


def train_or_continue(config: TrainConfig, options: RunOptions, **others: Any) -> TrainResult:
    """Start the run, or continue it if `options.out` holds it. The result of a finished run is read."""
    out = options.out
    if not (out / RUN_CONFIG).exists():
        return train(config, options, **others)
    saved = saved_config(out)
    if config.optim.precision == "auto":  # saved as what it was resolved to
        config = replace(config, optim=replace(config.optim, precision=saved.optim.precision))
    if saved != config:
        raise ValueError(f"{out} holds a run with other settings; choose another --out or delete it")
    return resume(out, options, **others)


def saved_config(out: Path) -> TrainConfig:
    """The configuration of the run in a directory."""
    path = out / RUN_CONFIG
    if not path.exists():
        raise ValueError(f"{out} holds no run to resume: {path} does not exist; start it with hnclip train --out {out}")
    return read_config(TrainConfig, path)


def saved_options(out: Path) -> RunOptions:
    """The options with which the run in a directory was started or last resumed; the directory may have moved."""
    path = out / OPTIONS
    found = read_config(RunOptions, path) if path.exists() else RunOptions()
    return replace(found, out=out)


def _read_result(out: Path) -> TrainResult:
    path = out / RUN_RESULT
    try:
        result = TrainResult(out=out, **read_json(path))
        for found in (result.best, result.last):
            _ = found["epoch"], found["mean_R@1"]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} is not the result of a run ({error}); delete it and resume the run") from error
    return result
