"""Time from the command `hnclip train` to the end of its first optimiser step, and that of another checkout.

Every turn is a fresh process of each checkout, one after the other: `hnclip train --model bundled --data
scenes/park/small` with one thread and a batch of 8 pairs, so that the step itself takes little. Images are in the cache
of each checkout from a first run that does not count. Parts: `imports` are all imports wherever they run; `model`,
`data`, `evaluation` (before training) and `step` are what else passes until the log says that each is done.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from hnclip.measure import Report, Timing, machine

log = logging.getLogger("hnclip.bench")

CHILD = """
import builtins, importlib, json, logging, os, sys, time
now, marks, depth, imported = getattr(time, sys.argv.pop(1)), [], 0, 0.0

def timed(original):
    def call(*arguments, **options):
        global depth, imported
        start, depth = now(), depth + 1
        try:
            return original(*arguments, **options)
        finally:
            depth -= 1
            imported += now() - start if depth == 0 else 0
    return call

def mark(_, record):
    for name, words in (("model", "model: "), ("data", " training pairs"), ("evaluation", "before training")):
        if words in record.getMessage():
            marks.append((name, now(), imported))
            if name == "model":  # torch is imported by now
                from torch.optim.optimizer import register_optimizer_step_post_hook
                register_optimizer_step_post_hook(end)

def end(*_):
    marks.append(("step", now(), imported))
    print(json.dumps(marks), flush=True)
    os._exit(0)

marks.append(("start", now(), 0.0))
builtins.__import__, importlib.import_module = timed(builtins.__import__), timed(importlib.import_module)
logging.getLogger("hnclip").addHandler(type("Marks", (logging.NullHandler,), {"handle": mark})())
from hnclip.cli import main
sys.exit(main(sys.argv[1:]))
"""
TRAIN = ["train", "--model", "bundled", "--data", "scenes/park/small", "--threads", "1"]
TRAIN += ["--optim.micro-batch", "8", "--optim.accumulate", "1"]


@dataclass(frozen=True)
class Options:
    """The way to the first optimiser step."""

    against: Path | None = None
    """Another checkout of hnclip, which the ratio is against."""
    turns: int = 5
    processor_time: bool = False
    """Measure processor time instead of time: for a busy machine."""


def first_step(source: Path, directory: Path, clock: str) -> dict[str, float]:
    """Seconds in each part of one fresh process that imports hnclip from `source`."""
    with tempfile.TemporaryDirectory() as out:
        call = [*TRAIN, "--out", f"{out}/run", "--read.cache", f"{directory}/cache"]
        path = {**os.environ, "PYTHONPATH": str(source)}
        done = subprocess.run([sys.executable, "-c", CHILD, clock, *call], env=path, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"hnclip train of {source} failed:\n{done.stderr.strip()}")
    marks: list[tuple[str, float, float]] = json.loads(done.stdout.splitlines()[-1])
    parts = {new[0]: new[1] - old[1] - (new[2] - old[2]) for old, new in pairwise(marks)}
    return {"imports": marks[-1][2], **parts}


def run(options: Options) -> Report:
    sources = {"hnclip": Path(__file__).resolve().parents[1] / "src"}
    if options.against is not None:
        sources = {str(options.against): options.against.resolve() / "src", **sources}
    clock = "process_time" if options.processor_time else "perf_counter"
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    with tempfile.TemporaryDirectory() as directory:
        for turn in range(options.turns + 1):
            log.info(f"turn {turn} of {options.turns}" if turn else "filling the caches")
            for number, (name, source) in enumerate(sources.items()):
                found = first_step(source, Path(directory, str(number)), clock)
                turns[name] += [found] if turn else []
    timings = {name: Timing(tuple(sum(parts.values()) for parts in found)) for name, found in turns.items()}
    peer = timings[next(iter(sources))]
    parts = list(turns["hnclip"][0])
    rows = [
        {"way": name, "seconds": timing, "ratio": timing.ratios(peer)}
        | {part: median(found[part] for found in turns[name]) for part in parts}
        for name, timing in timings.items()
    ]
    columns = {"way": "checkout", "seconds": "s", "ratio": "× first", **{part: f"{part} s" for part in parts}}
    return Report("first_step", columns, rows, machine())
