"""The method of all benchmarks: ways of one job take turns in one process and are compared by ratios with a named peer;
memory is what a way adds to the peak of a fresh process that holds the inputs already.

Each script of this directory calls `main`, which gives it `--json` (all numbers: the seconds of every turn, the
machine, the command), `--out FILE` (the same in a file, the table on the screen) and `--help`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import torch
import tyro

from hnclip import __version__
from hnclip.util.console import configure_logging
from hnclip.util.files import replace_file
from hnclip.util.tables import text_table
from hnclip.util.timing import Quartiles, Timing, machine, threads, time_ways

__all__ = [
    "Quartiles",
    "Report",
    "Timing",
    "gemm_rate",
    "log",
    "machine",
    "main",
    "peak_memory",
    "threads",
    "time_ways",
]

log = logging.getLogger("hnclip.benchmarks")


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
    call = [str(file), function, json.dumps(arguments), str(torch.get_num_threads())]
    done = subprocess.run([sys.executable, __file__, *call], capture_output=True, text=True, check=False)
    if done.returncode:  # negative: the number of the signal that ended it
        raise RuntimeError(f"{function}({arguments}) ended with status {done.returncode}:\n{done.stderr.strip()}")
    return int(done.stdout.splitlines()[-1])


def _rise(work: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """The bytes by which `work` raises the peak of this process's memory, or of the device's."""
    kind = torch.device(device).type
    if kind != "cpu":
        module = torch.get_device_module(kind)
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        work()
        module.synchronize()
        return module.max_memory_allocated() - before
    with contextlib.suppress(OSError):  # forget the peak until now where the system allows it
        Path("/proc/self/clear_refs").write_text("5")
    before = _resident_peak()
    work()
    return _resident_peak() - before


def _resident_peak() -> int:
    """The largest resident size of this process, in bytes."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


@dataclass(frozen=True)
class Report:
    """The result of a benchmark: a table, the machine, and notes.

    Args:
        rows: raw numbers, `Timing`s and `Quartiles` by the titles of their columns; a row may leave columns out.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    machine: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def to_text(self) -> str:
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        body = [[_cell(row.get(key)) for key in columns] for row in self.rows]
        about = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        return "\n".join([about, "", text_table(columns, body), *self.notes])


def _cell(value: Any) -> str:
    if isinstance(value, Timing):
        spread = Quartiles.of(value.seconds)
        return f"{_cell(value.median)} ±{(spread.high - spread.low) / value.median / 2:.0%}"
    if isinstance(value, Quartiles):
        return f"{_cell(value.median)} ({_cell(value.low)}–{_cell(value.high)})"
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


Options = TypeVar("Options")


@dataclass(frozen=True)
class Call(Generic[Options]):
    """The options of one benchmark, and those that all have."""

    options: Annotated[Options, tyro.conf.arg(name="")]
    json: bool = False
    """Print all numbers as JSON; messages are then limited to warnings."""
    out: Path | None = None
    """Also write all numbers as JSON to this file."""


def main(options: Any, run: Callable[[Any], Report], arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark from the command line.

    Args:
        options: a dataclass, or a union of them, which become subcommands.
    """
    module = sys.modules[run.__module__]
    given = list(sys.argv[1:] if arguments is None else arguments)
    prog = Path(str(module.__file__)).name
    # `Call` of a class that is known only now is no type that a checker could follow.
    kind: Any = Call[options]  # type: ignore[valid-type]
    call = tyro.cli(kind, prog=prog, description=module.__doc__, args=given, config=(tyro.conf.CascadeSubcommandArgs,))
    if call.out is not None and call.out.is_dir():
        raise SystemExit(f"{prog}: --out {call.out} is a directory; name a file")  # before minutes of measuring
    configure_logging(quiet=call.json)
    start = time.perf_counter()
    try:
        report = run(call.options)
    except ValueError as error:
        raise SystemExit(f"{prog}: {error}") from error
    found = {
        "benchmark": report.name,
        "machine": report.machine,
        "rows": report.rows,
        "notes": report.notes,
        "command": shlex.join(["python", f"benchmarks/{prog}", *given]),
        "version": __version__,
        "seconds": time.perf_counter() - start,
    }
    text = json.dumps(found, default=lambda timing: {"median": timing.median, **vars(timing)})
    if call.out is not None:
        with replace_file(call.out) as partial:
            partial.write_text(text + "\n", encoding="utf-8")
    print(text if call.json else report.to_text())


def _child(file: str, function: str, arguments: str, count: str) -> None:
    """Print the memory that a piece of work needs; `peak_memory` starts this as a process."""
    torch.set_num_threads(int(count))
    sys.path.insert(0, str(Path(file).parent))
    given = json.loads(arguments)
    work = getattr(importlib.import_module(Path(file).stem), function)(**given)
    print(_rise(work, given.get("device", "cpu")))


if __name__ == "__main__":
    _child(*sys.argv[1:])
