"""Real processes for tests: started from a server that has imported everything once, connected by gloo."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

SECONDS = 600  # for all of a job; only to end a test that hangs
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["torch", "transformers.models.clip.modeling_clip", "hnclip.train.runs", "peft"])


def start(world: int, work: Callable[..., Any], folder: Path, *arguments: Any, **settings: str) -> list[BaseProcess]:
    """`work(rank, *arguments)` in `world` processes with the environment of torchrun; its result goes to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **settings}
    processes = []
    for rank in range(world):
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = _server.Process(target=_one, args=(environment, work, folder / str(rank), rank, *arguments))
        process.start()
        processes.append(process)
    return processes


def run(world: int, work: Callable[..., Any], folder: Path, *arguments: Any, **settings: str) -> list[Any]:
    """The results of all processes."""
    processes = start(world, work, folder, *arguments, **settings)
    finish(processes)
    return [found(folder, rank) for rank in range(world)]


def finish(processes: list[BaseProcess]) -> None:
    """Wait for them; those that are not done in time are killed, and the test fails."""
    deadline = time.monotonic() + SECONDS
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"{len(processes)} processes did not finish in {SECONDS} s"
    finally:
        for process in processes:
            process.kill()


def found(folder: Path, rank: int) -> Any:
    """What a process returned; its error is raised here."""
    result = pickle.loads((folder / str(rank)).read_bytes())
    if isinstance(result, dict) and "traceback" in result:
        raise AssertionError(f"process {rank}: {result['traceback']}")
    return result


def _one(environment: dict[str, str], work: Callable[..., Any], file: Path, rank: int, *arguments: Any) -> None:
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        result = work(rank, *arguments)
    except BaseException:
        result = {"traceback": traceback.format_exc()}
    partial = file.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(result))
    os.replace(partial, file)
