"""Devices by name, and the state of their random generators."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def find_device(name: str | torch.device) -> torch.device:
    """The device of this name; `auto` is the machine's accelerator, or the CPU if it has none.

    With several processes (torchrun) each gets the accelerator of its local rank.
    """
    try:
        if name == "auto":
            found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = found or torch.device("cpu")
        else:
            device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(name)!r} cannot be used here: {error}") from error
    if device.type == "cpu" or not (dist.is_available() and dist.is_initialized()):
        return device
    if name != "auto" and torch.device(name).index is not None:
        raise ValueError(f"several processes cannot all use {name}: omit the index, and each process uses its own")
    return torch.device(device.type, local_rank())


def local_rank() -> int:
    """The rank of this process on its machine, which is the index of its accelerator."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of the generators that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(*_index(device))
    return state


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """The inverse of `random_state`; a state of another kind of device is ignored."""
    torch.set_rng_state(state["cpu"])
    if device.type in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type], *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """There is only one Apple accelerator, and its functions take no device."""
    return () if device.type == "mps" else (device,)
