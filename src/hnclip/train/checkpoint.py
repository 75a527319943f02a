"""The state of a run on disk: written whole or not at all, read without executing code, one writer at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hnclip.files import replace_file

NAME = "checkpoint.pt"


@dataclass(frozen=True)
class TrainState:
    """Everything an identical continuation needs. `step` counts finished optimiser steps; `model` holds only what
    training changes, the rest is where the run started from; `log_bytes` is the length of metrics.jsonl at that step,
    so that lines of lost steps are cut off on resuming; `data` is the fingerprint of the data, since with other data
    the same step would be another one."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    random: dict[str, Tensor]
    log_bytes: int
    best: dict[str, float]
    last: dict[str, float]
    data: str


def save_state(run: Path, state: TrainState) -> None:
    """Replace the run's checkpoint. When the disk is full the old one stays."""
    try:
        with replace_file(run / NAME) as partial:
            torch.save(vars(state), partial)  # asdict would copy every tensor
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        raise OSError(f"could not write {run / NAME} ({error}); the checkpoint before it is intact") from error


def load_state(run: Path) -> TrainState | None:
    """The run's checkpoint, or None if there is none yet."""
    path = run / NAME
    if not path.exists():
        return None
    try:
        return TrainState(**torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # pickle, zip and type errors all mean the same to the reader
        raise ValueError(f"{path} is not a checkpoint of this program or is damaged: {error}") from error


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The generators that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(*_which(device))
    return state


def restore_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type], *_which(device))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """Apple's accelerator is only one, and its functions take no device."""
    return () if device.type == "mps" else (device,)


@contextmanager
def only_writer(run: Path) -> Iterator[None]:
    """Hold the run directory for this process; the lock ends with the process, however it ends."""
    run.mkdir(parents=True, exist_ok=True)
    handle = os.open(run / ".lock", os.O_CREAT | os.O_RDWR)
    try:
        _lock(handle, run)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, run: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: no advisory locks of this kind; two writers are then the user's care
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(f"another process is training in {run}; wait for it or choose another --out") from error
