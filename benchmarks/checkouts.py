"""Steps of several checkouts of hnclip in turns, each in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("hnclip.bench")

# One step for every line of standard input.
CHILD = """
import json, os, sys, time, torch
from hnclip.measure import load_file
file, arguments, threads = sys.argv[1:]
sys.path.insert(0, os.path.dirname(file))
torch.set_num_threads(int(threads))
step = load_file(file).build_way(**json.loads(arguments))
for _ in sys.stdin:
    start, used = time.perf_counter(), time.process_time()
    found = step()
    seconds, processor = time.perf_counter() - start, time.process_time() - used
    loss = found["loss"] if isinstance(found, dict) else None
    print(json.dumps({"loss": loss, "seconds": seconds, "processor": processor}), flush=True)
"""


def steps_in_turn(
    checkouts: Mapping[str, Path], arguments: Mapping[str, Any], turns: int
) -> dict[str, list[dict[str, float]]]:
    """Loss, seconds and processor time of every step, the first of each checkout and `turns` more.

    Args:
        arguments: of `build_way` in `benchmarks/step.py` of each checkout.
    """
    with ExitStack() as stack:
        processes = {}
        for name, checkout in checkouts.items():
            file = checkout / "benchmarks" / "step.py"
            if not file.exists():
                raise ValueError(f"{checkout} is not a checkout of hnclip: {file} does not exist")
            process = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(file), json.dumps(arguments), str(torch.get_num_threads())],
                env={**os.environ, "PYTHONPATH": str(checkout / "src")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes[name] = process
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in processes}
        for turn in range(1 + turns):
            log.info(f"turn {turn} of {turns}" if turn else "first steps")
            for name, process in processes.items():
                taken[name].append(_ask(process))
        return taken


def _ask(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("step\n")
    process.stdin.flush()
    if not (line := process.stdout.readline()):
        raise RuntimeError("the process of a checkout failed; its error is above")
    return json.loads(line)
