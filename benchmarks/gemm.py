"""The physical limit: how many operations per second the machine does in products of matrices, per type and size.

Everything else that is measured here is made of such products; other benchmarks state their share of this rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hnclip.measure import Report, gemm_rate, machine


@dataclass(frozen=True)
class Options:
    """Rates of square products."""

    sizes: tuple[int, ...] = (512, 1024, 2048, 4096)
    """Rows and columns of the matrices."""
    device: str = "cpu"
    turns: int = 5
    """Repetitions; the median counts."""


def run(options: Options, say: Callable[[str], None]) -> Report:
    rows = []
    for size in options.sizes:
        say(f"{size} × {size}")
        full = gemm_rate(torch.float32, options.device, size=size, turns=options.turns)
        # Emulated half precision is a hundred times slower; a small product shows it without the wait.
        small = size if size <= 512 else 512
        half = gemm_rate(torch.bfloat16, options.device, size=small, turns=options.turns)
        if half > full / 4 and small != size:
            half = gemm_rate(torch.bfloat16, options.device, size=size, turns=options.turns)
        rows.append({"size": size, "fp32": full / 1e9, "bf16": half / 1e9, "ratio": half / full})
    columns = {"size": "size", "fp32": "fp32 Gflop/s", "bf16": "bf16 Gflop/s", "ratio": "bf16 / fp32"}
    return Report("gemm", columns, rows, machine(options.device))
