"""Which device a process works on."""

from __future__ import annotations

import torch

from hnclip.device import find_device
from hnclip.train.distributed import is_distributed, local_rank


def pick_device(name: str) -> torch.device:
    """`auto` is the machine's accelerator if it has one; of several processes each has its own."""
    device = find_device(name)
    if is_distributed() and device.type != "cpu":
        if torch.device("cpu" if name == "auto" else name).index is not None:
            raise ValueError(f"several processes cannot all use {name}: leave the number out, each then has its own")
        return torch.device(device.type, local_rank())
    return device
