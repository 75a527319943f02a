"""The physical limit: how many operations per second the machine does in products of matrices, per type and size.

Everything else that is measured here is made of such products; other benchmarks state their share of this rate.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from hnclip.measure import Report, gemm_timing, machine

log = logging.getLogger("hnclip.bench")

EMULATED = 512  # the largest bf16 product that is tried where bf16 is emulated, a hundred times slower


@dataclass(frozen=True)
class Options:
    """Rates of square products."""

    sizes: tuple[int, ...] = (512, 1024, 2048, 4096)
    """Rows and columns of the matrices."""
    device: str = "cpu"
    turns: int = 5
    """Repetitions; the median counts."""


def run(options: Options) -> Report:
    rows = []
    for size in options.sizes:
        log.info(f"{size} × {size}")
        full = gemm_timing(torch.float32, options.device, size=size, turns=options.turns)
        rate = full.per_second(2 * size**3 / 1e9)
        small = min(size, EMULATED)
        half = gemm_timing(torch.bfloat16, options.device, size=small, turns=options.turns)
        if small < size and half.per_second(2 * small**3 / 1e9).median > rate.median / 4:
            small, half = size, gemm_timing(torch.bfloat16, options.device, size=size, turns=options.turns)
        half_rate = half.per_second(2 * small**3 / 1e9)
        row = {"size": size, "fp32": rate, "bf16": half_rate, "ratio": half_rate.median / rate.median}
        rows.append({**row, "fp32_turns": full, "bf16_turns": half, "bf16_size": small})
    columns = {"size": "size", "fp32": "fp32 Gflop/s", "bf16": "bf16 Gflop/s", "ratio": "bf16 / fp32"}
    return Report("gemm", columns, rows, machine(options.device))
