"""The state of a run in one file, `checkpoint.pt`: written atomically by rank 0, read without executing code.

It holds whole tensors, so a run continues with any number of processes, and as ddp or fsdp.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hnclip.models.parameters import restore_trained_tensors, trained_tensors
from hnclip.training.distributed import gather_tensors, like_parameter, rank
from hnclip.util.files import exclusive_lock, replace_file

CHECKPOINT = "checkpoint.pt"
FORMAT = 2


@dataclass(frozen=True)
class TrainState:
    """Everything that an identical continuation needs.

    Args:
        step: finished optimiser steps.
        seconds: time spent on them, in all sessions.
        model: what training changes (`trained_tensors`); the rest is the model that the run started from.
        optimizer: its `state_dict` with whole tensors.
        random: random states of each rank.
        log_bytes: length of metrics.jsonl; lines of later steps are deleted on resuming.
        best, last: as in `TrainResult`.
        metrics: of the last evaluation.
        data: fingerprint of the data.
        config: the configuration as JSON.
        memory: `PairMemory.state_dict`, with negatives from memory.
    """

    step: int
    seconds: float
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    random: list[dict[str, Tensor]]
    log_bytes: int
    best: dict[str, float]
    last: dict[str, float]
    metrics: dict[str, Any]
    data: str
    config: str
    memory: dict[str, Any] = field(default_factory=dict)


@contextmanager
def report_failure(path: Path, run: Path) -> Iterator[None]:
    """Raise OSError for any error in writing `path`: torch and safetensors have their own for a full disk."""
    try:
        yield
    except Exception as error:
        raise OSError(
            f"could not write {path} ({error}); the previous files are intact: free some space and continue with "
            f"hnclip train --resume {run}"
        ) from error


def save_checkpoint(run: Path, state: TrainState) -> None:
    """Replace the checkpoint of a run. If that fails, the previous one is intact."""
    with report_failure(run / CHECKPOINT, run), replace_file(run / CHECKPOINT) as partial:
        torch.save({"format": FORMAT, **vars(state)}, partial)


def load_checkpoint(run: Path) -> TrainState | None:
    """The checkpoint of a run, or None if there is none yet."""
    path = run / CHECKPOINT
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:  # torch does not compare checksums
                raise ValueError(f"the checksum of {damaged} differs")
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if (version := found.pop("format", None)) != FORMAT:
            raise ValueError(f"its format is {version}, this version of hnclip reads {FORMAT}")
        return TrainState(**found)
    except Exception as error:  # zip, pickle and type errors
        raise ValueError(
            f"{path} is damaged, or not a checkpoint of this version of hnclip ({error}); delete it to start the run "
            "again from its configuration, or restore it from a copy"
        ) from error


def capture_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Whole tensors of a model and the state of its optimiser, on rank 0; collective if they are sharded."""
    found = optimizer.state_dict()
    moments = {number: gather_tensors(state) for number, state in found["state"].items()}
    return gather_tensors(trained_tensors(model)), {**found, "state": moments}


def restore_tensors(state: TrainState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The inverse of `capture_tensors`, for a model that may be sharded otherwise."""
    own = trained_tensors(model)
    weights = {name: like_parameter(tensor, own.get(name)) for name, tensor in state.model.items()}
    restore_trained_tensors(model, weights)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        number: {
            name: like_parameter(value, parameters[number] if value.shape == parameters[number].shape else None)
            for name, value in found.items()
        }
        for number, found in state.optimizer["state"].items()
    }
    optimizer.load_state_dict({**state.optimizer, "state": moments})


@contextmanager
def only_writer(run: Path) -> Iterator[None]:
    """Lock the run directory; only rank 0 writes. The lock ends with the process, even if it is killed."""
    if rank() > 0:
        yield
        return
    run.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(run / ".lock", f"another process is training in {run}; wait for it or choose another --out"):
        for leftover in run.glob(f".{CHECKPOINT}.new-*"):  # of a process that was killed
            leftover.unlink()
        try:
            yield
        finally:
            if [file.name for file in run.iterdir()] == [".lock"]:  # the run could not start
                shutil.rmtree(run)
