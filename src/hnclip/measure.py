"""Time, memory and speed as ratios: several ways of one job take turns in one process, so that a busy machine is busy
for all of them; memory is measured per way in a process of its own.

`benchmarks/` is written with this, and `hnclip bench` runs it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hnclip.tables import text_table


@dataclass(frozen=True)
class Timing:
    """The seconds of every turn of one way."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The range between the quartiles, as a share of the median; 0 of a single turn."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    def ratio(self, peer: Timing) -> float:
        """How long this takes in units of the peer: the median over the turns that both took one after the other."""
        return statistics.median(own / other for own, other in zip(self.seconds, peer.seconds, strict=True))


def time_ways(
    ways: Mapping[str, Callable[[], object]],
    *,
    turns: int = 5,
    warmup: int = 1,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Let the ways take turns, after `warmup` turns that do not count, and time each; waits for the device."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warmup + turns):
        for name, work in ways.items():
            synchronize(device)
            start = clock()
            work()
            synchronize(device)
            if turn >= warmup:
                taken[name].append(clock() - start)
    return {name: Timing(tuple(seconds)) for name, seconds in taken.items()}


def synchronize(device: torch.device | str) -> None:
    """Wait until an accelerator has done what was asked of it."""
    kind = torch.device(device).type
    if kind != "cpu":
        torch.get_device_module(kind).synchronize()


def gemm_rate(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *, size: int = 2048, turns: int = 5
) -> float:
    """Multiplications and additions per second of the product of two square matrices: what the machine can do at most
    for a program that is made of such products."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timing = time_ways({"gemm": lambda: left @ right}, turns=turns, device=device)["gemm"]
    return 2 * size**3 / timing.median


def peak_memory(file: str | Path, function: str, **arguments: Any) -> int:
    """The bytes that a piece of work needs beside its inputs, in a fresh process.

    Args:
        file, function: `function(**arguments)` of this Python file prepares the inputs, and the first call of anything
            that allocates once, and returns the work: a callable without arguments.
        arguments: what JSON can carry. A `device` that is not cpu is asked for its own memory.
    """
    command = [sys.executable, "-m", "hnclip.measure", str(file), function, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {function}({arguments}) failed, see above")
    return int(done.stdout.splitlines()[-1])


def rise(work: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """The bytes by which `work` raises the peak of this process's memory, or of the device's."""
    kind = torch.device(device).type
    if kind != "cpu":
        module = torch.get_device_module(kind)
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        work()
        module.synchronize()
        return module.max_memory_allocated() - before
    before = restart_peak()
    work()
    return resident_peak() - before


def restart_peak() -> int:
    """Forget the peak so far where the system allows it; the resident bytes now, or else the peak until now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def resident_peak() -> int:
    """The largest resident size of this process, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else largest * 1024
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@dataclass(frozen=True)
class Report:
    """What a benchmark found: a table, what it was measured on, and remarks.

    Args:
        name: of the benchmark.
        columns: titles by key, in order; a row may leave keys out.
        rows: raw numbers, in the units that the titles name.
        figures: files that were drawn.
    """

    name: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    machine: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    figures: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "machine": dict(self.machine),
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
            "figures": list(self.figures),
        }

    def to_text(self) -> str:
        body = [[_cell(row.get(key)) for key in self.columns] for row in self.rows]
        about = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        drawn = [f"drawn: {path}" for path in self.figures]
        return "\n".join([about, "", text_table(list(self.columns.values()), body), *self.notes, *drawn])


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "device": str(device),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def load_file(path: str | Path) -> ModuleType:
    """A Python file as a module, under the name of the file."""
    path = Path(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _child(file: str, function: str, arguments: str) -> None:
    sys.path.insert(0, str(Path(file).parent))
    given = json.loads(arguments)
    work = getattr(load_file(file), function)(**given)
    print(rise(work, given.get("device", "cpu")))


if __name__ == "__main__":
    _child(*sys.argv[1:])
