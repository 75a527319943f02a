"""Times of several ways to do one job: they take turns in one process, so that a busy machine is busy for all of them,
and are compared by ratios within the turns.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Quartiles:
    """The median of several numbers and the range around it that holds half of them."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quartiles:
        numbers = list(values)
        return cls(*(statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else 3 * numbers))


@dataclass(frozen=True)
class Timing:
    """The seconds of every turn of one way."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratios(self, peer: Timing) -> Quartiles:
        """How long this takes in units of the peer, over the turns that both took one after the other."""
        return Quartiles.of(own / other for own, other in zip(self.seconds, peer.seconds, strict=True))

    def ratio(self, peer: Timing) -> float:
        """The median of `ratios`."""
        return self.ratios(peer).median


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
        turns: the least number of turns that count.
        clock: `time.process_time` counts processor time, of all threads together.
        seconds: continue until the turns that count took so long together.
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
    """Let torch use this number of threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronize(device: torch.device | str) -> None:
    """Wait until an accelerator has finished its work."""
    kind = torch.device(device).type
    if kind != "cpu":
        torch.get_device_module(kind).synchronize()


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
