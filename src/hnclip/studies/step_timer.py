"""The time of a training step of each row of a study: measured on the data of a domain as a job of the plan, and shown
as ratios to HN-CLIP."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from hnclip.config import RunOptions, TrainConfig
from hnclip.core import NegativePairs
from hnclip.data.batching import PairData, prepare
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.parameters import train_mode
from hnclip.objectives.registry import build_objective
from hnclip.report.document import Block, Table
from hnclip.studies.identity import open_start, training_records
from hnclip.studies.paper import STEPS
from hnclip.studies.plan import MeasureJob
from hnclip.studies.results import StudyResults
from hnclip.studies.store import Store
from hnclip.training.data import add_views, needed_views
from hnclip.training.memory import PairMemory
from hnclip.training.optimizer import build_optimizer
from hnclip.training.setup import choose_precision, prepare_model
from hnclip.training.step import TrainStep
from hnclip.util.device import find_device
from hnclip.util.text import counted
from hnclip.util.timing import Timing, machine, threads, time_ways

PEER = "HN-CLIP"
_TURNS, _SECONDS = 5, 30.0  # repetitions of a step, and how long they take together at least
_TOGETHER = 8 << 30  # bytes of weights, gradients and optimiser states up to which the steps of all rows take turns


def measure_steps(job: MeasureJob, store: Store) -> dict[str, Any]:
    """The time of an optimiser step of every row on the data of the domain, without reading images.

    The rows take turns, so that a busy machine is busy for all; only models that do not fit into memory together are
    timed one after the other.
    """
    options, device = store.options, find_device(store.options.device)
    timings: dict[str, Timing] = {}
    ways: dict[str, Callable[[], object]] = {}
    used = 0
    with torch.random.fork_rng(), threads(options.threads or torch.get_num_threads()):
        for number, run in enumerate(job.runs, start=1):
            ways[run.identity], size = _training_step(run.config, options)
            used += size
            if used + size > _TOGETHER or number == len(job.runs):
                seconds = _SECONDS if len(ways) == len(job.runs) else 0.0  # ratios need as many turns of every row
                timings |= time_ways(ways, turns=_TURNS, seconds=seconds, device=device)
                used = 0
                ways.clear()
                gc.collect()  # a model and its modules refer to each other
        return {
            "machine": machine(device),
            "precision": choose_precision(job.config.optim.precision, device),
            "pairs": job.config.optim.micro_batch * job.config.optim.accumulate,
            "seconds": {name: list(timing.seconds) for name, timing in timings.items()},
        }


def _training_step(config: TrainConfig, options: RunOptions) -> tuple[Callable[[], object], int]:
    """An optimiser step of a run on one batch of its records, and the bytes that its model needs."""
    torch.manual_seed(config.seed)
    model = open_start(config, options.device)
    objective = prepare_model(config, options.speed, model)
    train_mode(model)
    optim = replace(config.optim, precision=choose_precision(config.optim.precision, model.device))
    count = optim.micro_batch * optim.accumulate
    records, _ = training_records(config)
    pairs = prepare(
        add_views(config, records[:: max(1, len(records) // count)][:count], objective),  # from all over the data
        model.text_transform,
        model.image_transform,
        image_views=objective.image_views,
        text_views=objective.text_views,
        parts=objective.parts,
        grid=model.family.grid(model.backbone, model.image_size),
    )
    if config.objective.margin_source == "frozen":  # computed before the first step; the values do not matter
        pairs = replace(pairs, margin_text=F.normalize(torch.randn(len(pairs.owner), model.width), dim=-1))
    batch = pairs.batch(range(len(pairs)))
    memory = _memory(min(optim.memory, len(records)), pairs, model) if optim.memory else None
    step = TrainStep(model, objective, build_optimizer(model, optim), optim, total=2, memory=memory)
    size = sum(weight.numel() * (16 if weight.requires_grad else 4) for weight in model.parameters())
    # In the middle of the run, where a method whose terms change on the way has all of them.
    return lambda: step(batch, 1).read(), size


def _memory(size: int, pairs: PairData, model: DualEncoder) -> PairMemory:
    """A full memory of other pairs than these; the values do not matter."""
    image, text = F.normalize(torch.randn(2, size, model.width), dim=-1).to(model.device, model.dtype)  # [M, D] each
    ids = -1 - torch.arange(size, device=model.device)[:, None].expand(size, pairs.ids.shape[1])  # [M, K]
    margin_text = None if pairs.margin_text is None else text
    return PairMemory(size, NegativePairs(image, text, ids, margin_text), len(pairs) + torch.arange(size))


def step_timings(results: StudyResults) -> dict[str, dict[str, Timing]]:
    """The times of a step by domain and row."""
    rows = {job.identity: place.row for place, job in results.jobs.items()}
    return {
        domain: {rows[name]: Timing(tuple(seconds)) for name, seconds in found["seconds"].items() if name in rows}
        for domain, found in results.measured("step_time").items()
    }


def efficiency(results: StudyResults) -> list[Block]:
    """What a training step of each row needs and costs (the paper's Table A3)."""
    configs = {place.row: job.config for place, job in results.jobs.items()}
    blocks: list[Block] = []
    for domain, timings in step_timings(results).items():
        found = results.measured("step_time")[domain]
        name = PEER if PEER in timings else [*timings][-1]
        peer = timings[name]
        lines = []
        for row, timing in timings.items():
            objective = build_objective(configs[row].objective)
            views = {"image": len(objective.image_views) - 1, "text": len(objective.text_views) - 1}
            inputs = ", ".join(counted(count, name) for name, count in views.items() if count)
            preparation = ", ".join(sorted(needed_views(objective)))
            speed = f"{found['pairs'] / timing.median:.1f}"
            lines.append((row, inputs or "none", preparation or "none", speed, f"{timing.ratio(peer):.2f}"))
        here = found["machine"]
        paper = ", ".join(f"{row} {speed}" for row, speed in STEPS.items())
        notes = [
            f"Optimiser steps of {found['pairs']} pairs in {found['precision']} on {here['processor']} "
            f"({here['device']}, threads: {here['threads']}), median of {len(peer.seconds)} turns; a ratio is the "
            "median of those within the turns. Reading images and preparation are not in it.",
            f"The paper: {paper} images/s, of Long-CLIP-L on DCI, on one Ascend 910B (Table A3).",
        ]
        headers = ("", "views in addition to the pair", "preparation", "pairs/s", f"time / {name}")
        blocks.append(Table(headers, lines, title=f"A training step on {domain}", notes=notes))
    return blocks
