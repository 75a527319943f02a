"""Time, memory and speed as ratios: several ways of one job take turns in one process, so that a busy machine is busy
for all of them; memory is measured per way in a process of its own.

`benchmarks/` is written with this, and `hnclip bench` runs it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from hnclip.util.tables import text_table


@dataclass(frozen=True)
class Quartiles:
    """The middle of several numbers and how far they scatter: half of them lie between low and high."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quartiles:
        numbers = list(values)
        return cls(*(statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else 3 * numbers))


@dataclass(frozen=True)
class Timing:
    """The seconds of every turn of one way. Put it into a row of a `Report`, so that its JSON holds every turn."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The range between the quartiles, as a share of the median; 0 of a single turn."""
        found = Quartiles.of(self.seconds)
        return (found.high - found.low) / found.median

    @property
    def milliseconds(self) -> Quartiles:
        return Quartiles.of(1000 * seconds for seconds in self.seconds)

    def per_second(self, work: float) -> Quartiles:
        """The speed of a turn that does so much work: images, pairs, multiplications …"""
        return Quartiles.of(work / seconds for seconds in self.seconds)

    def ratio(self, peer: Timing) -> float:
        """How long this takes in units of the peer: the median over the turns that both took one after the other."""
        return self.ratios(peer).median

    def ratios(self, peer: Timing) -> Quartiles:
        """`ratio` and its scatter over the turns."""
        return Quartiles.of(own / other for own, other in zip(self.seconds, peer.seconds, strict=True))


def time_ways(
    ways: Mapping[str, Callable[[], object]],
    *,
    turns: int = 5,
    warmup: int = 1,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
    seconds: float = 0.0,
    prepare: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Let the ways take turns, after `warmup` turns that do not count, and time each; waits for the device.

    Args:
        ways: what to time, by name; in a turn each runs once, in this order.
        turns: at least so many.
        clock: `time.process_time` counts what the processors did for this program, all threads added up.
        seconds: go on until the turns that count took so long together.
        prepare: runs before every turn and is not timed.
    """
    if turns < 1:
        raise ValueError(f"turns must be at least 1, got {turns}")
    taken: dict[str, list[float]] = {name: [] for name in ways}
    turn = 0
    while turn < warmup + turns or sum(map(sum, taken.values())) < seconds:
        if prepare is not None:
            prepare()
        for name, work in ways.items():
            synchronize(device)
            start = clock()
            work()
            synchronize(device)
            if turn >= warmup:
                taken[name].append(clock() - start)
        turn += 1
    return {name: Timing(tuple(values)) for name, values in taken.items()}


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads inside torch for the time of the block, also in processes that measure memory for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronize(device: torch.device | str) -> None:
    """Wait until an accelerator has done what was asked of it."""
    kind = torch.device(device).type
    if kind != "cpu":
        torch.get_device_module(kind).synchronize()


def gemm_rate(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *, size: int = 2048, turns: int = 5
) -> float:
    """Multiplications and additions per second in a product of two square matrices: the limit of the machine for a
    program that consists of such products."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / time_ways({"gemm": lambda: left @ right}, turns=turns, device=device)["gemm"].median


def peak_memory(file: str | Path, function: str, /, **arguments: Any) -> int:
    """The bytes that a piece of work needs in addition to its inputs, in a fresh process.

    Args:
        file, function: `function(**arguments)` of this Python file prepares the inputs, and the first call of anything
            that allocates once, and returns the work: a callable without arguments.
        arguments: what JSON can carry. A `device` that is not cpu is asked for its own memory.
    """
    return _in_fresh_process("rise", file, function, arguments)


def fresh_result(file: str | Path, function: str, /, **arguments: Any) -> Any:
    """What `function(**arguments)` of a Python file returns in a process of its own; JSON carries both."""
    return _in_fresh_process("result", file, function, arguments)


def _in_fresh_process(what: Literal["rise", "result"], file: str | Path, function: str, arguments: Any) -> Any:
    given = [what, str(file), function, json.dumps(arguments), str(torch.get_num_threads())]
    done = subprocess.run([sys.executable, "-m", "hnclip.measure", *given], capture_output=True, text=True, check=False)
    if done.returncode < 0:
        ended = signal.Signals(-done.returncode).name
        raise RuntimeError(f"the process of {function}({arguments}) was ended by {ended}; is there memory enough?")
    if done.returncode > 0:
        raise RuntimeError(f"the process of {function}({arguments}) failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def rise(work: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """The bytes by which `work` raises the peak of this process's memory, or of the device's."""
    kind = torch.device(device).type
    if kind != "cpu":
        module = torch.get_device_module(kind)
        if not hasattr(module, "reset_peak_memory_stats"):
            raise ValueError(f"the memory of {kind} cannot be measured: torch does not keep its peak")
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
        rows: raw numbers in the units that the titles name, `Timing`s in seconds, `Quartiles`. Keys without a column
            are in the JSON only.
    """

    name: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    machine: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON: a number that is not finite becomes None."""
        found = {
            "benchmark": self.name,
            "machine": self.machine,
            "columns": self.columns,
            "rows": self.rows,
            "notes": self.notes,
        }
        return {key: _plain(value) for key, value in found.items()}

    def to_text(self) -> str:
        body = [[_cell(row.get(key)) for key in self.columns] for row in self.rows]
        about = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        return "\n".join([about, "", text_table(list(self.columns.values()), body), *self.notes])


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "device": str(device),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
    if isinstance(value, Timing):
        return f"{_cell(value.median)} ±{value.spread / 2:.0%}"
    if isinstance(value, Quartiles):
        return f"{_cell(value.median)} ({_cell(value.low)}–{_cell(value.high)})"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "–"
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Timing):
        return _plain({"median": value.median, "spread": value.spread, "seconds": value.seconds})
    if isinstance(value, Quartiles):
        return _plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _child(what: str, file: str, function: str, arguments: str, count: str) -> None:
    torch.set_num_threads(int(count))
    sys.path.insert(0, str(Path(file).parent))
    given = json.loads(arguments)
    found = getattr(load_file(file), function)(**given)
    print(json.dumps(rise(found, given.get("device", "cpu")) if what == "rise" else found))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # the parent says it
        _child(*sys.argv[1:])
