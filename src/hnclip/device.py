"""Devices by name."""

from __future__ import annotations

import torch


def find_device(name: str | torch.device) -> torch.device:
    """The device of this name; `auto` is the accelerator of the machine, or the CPU if it has none."""
    try:
        if name != "auto":
            return torch.empty(0, device=name).device
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(name)!r} cannot be used here: {error}") from error
