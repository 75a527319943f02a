"""One training step of the same batch by one, two and four processes on one machine: time and what is sent.

The processors' threads are split among the processes, so that all have the same machine; what more than one of them
takes longer is the price of talking, of waiting for the slowest, and of the smaller products of matrices. Only on
several devices does the time fall. `sent` counts what one process hands to collectives in a step: embeddings,
gradients, and with fsdp weights. The jobs exist side by side and take turns; those that wait do nothing.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hnclip.measure import Report, load_file, machine, time_ways

log = logging.getLogger("hnclip.bench")


@dataclass(frozen=True)
class Options:
    """A step of several processes beside that of one."""

    model: str = "small"
    """small, or B/16, as in `hnclip bench step`."""
    pairs: int = 64
    """In the batch of the whole job."""
    micro_batch: int = 16
    processes: tuple[int, ...] = (1, 2, 4)
    modes: tuple[str, ...] = ("ddp", "fsdp")
    negatives: tuple[str, ...] = ("micro", "batch")
    turns: int = 5
    """Repetitions; the median counts."""


def run(options: Options) -> Report:
    jobs: dict[str, _Job] = {}
    try:
        for negatives in options.negatives:
            for count in options.processes:
                for mode in options.modes if count > 1 else ("one",):
                    name = f"{negatives}, {count} {mode}"
                    log.info(f"starting {name}")
                    jobs[name] = _Job(count, mode, negatives, options)
        log.info("measuring")
        times = time_ways({name: job.step for name, job in jobs.items()}, turns=options.turns)
        rows = []
        for name, job in jobs.items():
            peer = times[f"{job.negatives}, 1 one"] if 1 in options.processes else times[name]
            sent = job.ask("sent")
            rows.append(
                {
                    "negatives": job.negatives,
                    "processes": job.count,
                    "mode": job.mode if job.count > 1 else "",
                    "time": times[name].milliseconds,
                    "ratio": times[name].ratios(peer),
                    "gradients": sent["gradients"],
                    "collectives": sent["calls"],
                    "sent": sent["bytes"] / 1e6,
                    "turns": times[name],
                }
            )
    finally:
        for job in jobs.values():
            job.close()
    columns = {
        "negatives": "negatives",
        "processes": "processes",
        "mode": "mode",
        "time": "ms per step",
        "ratio": "÷ one process",
        "gradients": "gradient collectives",
        "collectives": "all collectives",
        "sent": "MB sent by each",
    }
    return Report("processes", columns, rows, machine("cpu"))


class _Job:
    """Processes that do a step whenever they are asked."""

    def __init__(self, count: int, mode: str, negatives: str, options: Options) -> None:
        self.count, self.mode, self.negatives = count, mode, negatives
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        threads = str(max(1, torch.get_num_threads() // count))
        shared = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        settings = [mode, negatives, options.model, str(options.pairs), str(options.micro_batch), threads]
        self._workers = [
            subprocess.Popen(
                [sys.executable, __file__, *settings],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": threads},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        self.ask("ready")

    def step(self) -> None:
        self.ask("step")

    def ask(self, what: str) -> Any:
        """Tell all of them, wait for all answers, give the first one's."""
        for worker in self._workers:
            assert worker.stdin is not None
            print(what, file=worker.stdin, flush=True)
        answers = []
        for worker in self._workers:
            assert worker.stdout is not None
            answers.append(worker.stdout.readline())
        if not all(answers):
            raise RuntimeError("a process of the benchmark ended; what it said is above")
        return json.loads(answers[0])

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()


def work(mode: str, negatives: str, model_name: str, pairs: str, micro_batch: str, threads: str) -> None:
    """One process: does what standard input says."""
    sent = _count_collectives()
    from hnclip.train.parallel import hold

    from hnclip.config import ObjectiveConfig, OptimConfig
    from hnclip.objectives.registry import build_objective
    from hnclip.train.data import own_share
    from hnclip.train.distributed import process_group
    from hnclip.train.optimizer import build_optimizer
    from hnclip.train.step import TrainStep

    step = load_file(Path(__file__).with_name("step.py"))
    torch.set_num_threads(int(threads))
    optim = OptimConfig(micro_batch=int(micro_batch), negatives=negatives, precision="fp32", warmup=0.0)  # type: ignore[arg-type]
    with process_group("cpu"):
        model = step.build_model(model_name, "cpu")
        parallel = hold(model, mode)  # type: ignore[arg-type]
        optimizer = build_optimizer(model, lr=1e-6, scale_lr=1e-6, weight_decay=0.01, betas=(0.9, 0.98))
        stepper = TrainStep(model, build_objective(ObjectiveConfig()), optimizer, optim, total=1000, parallel=parallel)
        share = own_share(list(range(int(pairs))), optim)
        batch = _rows(step.build_batch(model_name, int(pairs)), share.rows)
        for line in sys.stdin:
            if line.strip() == "step":
                sent.update(calls=0, gradients=0, bytes=0)
                stepper(batch, 0, share).read()
            print(json.dumps(sent if line.strip() == "sent" else {}), flush=True)


def _rows(batch: Any, rows: Any) -> Any:
    """Some rows of a batch, as data would make them."""
    chosen = torch.tensor(rows)
    texts = batch.texts["caption"]
    text = replace(texts, ids=texts.ids[chosen], lengths=texts.lengths[chosen])[: len(chosen)]
    return replace(batch, images={"full": batch.images["full"][chosen]}, texts={"caption": text}, ids=batch.ids[chosen])


def _count_collectives() -> dict[str, int]:
    """Wrap torch's collectives before anybody takes hold of them. Counts how many there are, how many of them carry
    gradients, and how many bytes this process gives."""
    import torch.distributed as dist

    sent = {"calls": 0, "gradients": 0, "bytes": 0}

    def counted(name: str, original: Callable[..., Any], given: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tensors = [value for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor)]
            sent["calls"] += 1
            sent["bytes"] += tensors[given].numel() * tensors[given].element_size()
            # Gradients are averaged without waiting, or scattered by FSDP; nothing else is either.
            scattered = name.startswith("reduce_scatter") and "fsdp" in sys._getframe(1).f_code.co_filename
            sent["gradients"] += scattered or (name == "all_reduce" and bool(options.get("async_op")))
            return original(*arguments, **options)

        return call

    for name in ("all_reduce", "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single"):
        if hasattr(dist, name):
            setattr(dist, name, counted(name, getattr(dist, name), 0 if name == "all_reduce" else 1))
    return sent


if __name__ == "__main__":
    work(*sys.argv[1:])
