"""Real processes for tests: started from a server that has imported everything once, connected by gloo."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import start_processes

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["transformers.models.clip.modeling_clip", "hnclip.training.runs", "peft"])


def run(world: int, work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """The results of `work(rank, *arguments)` in `world` processes with the environment of torchrun. If one of them
    fails, the others are killed."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    start_processes(_one, (shared, work, folder, arguments), nprocs=world, start_method="forkserver")
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world)]


def _one(rank: int, shared: dict[str, str], work: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    os.environ.update({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    (folder / str(rank)).write_bytes(pickle.dumps(work(rank, *arguments)))
