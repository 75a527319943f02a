"""Memory and communication of one process for global batches from 32 thousand to a million pairs, from formulas.

The formulas are those of `loss_cost.py`, with the tiles that the loss chooses itself. A process holds B / W pairs
as queries and all B as columns. Features are the gathered vectors of both sides; the peaks of the losses include the
gradients of all features, which are as large again. Sent are the bytes that leave a process: to gather the features,
and to sum their gradients by reduce-scatter (twice as many by all-reduce).

The last rows check the formulas where they fit: one process of W, forward and backward, the rise of the peak resident
size in a process of its own, and that size over the formula. The features are there before and not in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from loss_cost import rank_cost

from hnclip.losses import hard_negative_loss, tiled_hard_negative_loss
from hnclip.measure import Report, machine, peak_memory

log = logging.getLogger("hnclip.bench")

LOSSES = {"eager": hard_negative_loss, "tiled": tiled_hard_negative_loss}
COLUMNS = {
    "world": "processes",
    "pairs": "pairs",
    "rows": "own",
    "features": "features GB",
    "eager": "eager GB",
    "tiled": "tiled GB",
    "ratio": "tiled / eager",
    "gather_sent": "gather sends GB",
    "reduce_scatter_sent": "gradients send GB",
    "eager_measured": "eager measured",
    "eager_check": "/ formula",
    "tiled_measured": "tiled measured",
    "tiled_check": "/ formula",
}


@dataclass(frozen=True)
class Options:
    """Sizes of the table and of its check."""

    pairs: tuple[int, ...] = tuple(2**k for k in range(15, 21))
    """Global batches."""
    width: int = 768
    worlds: tuple[int, ...] = (8, 64)
    """Processes that share them."""
    checked: tuple[int, ...] = (4096, 8192, 16384)
    """Global batches that are also measured; `checked_world` processes would share them."""
    checked_world: int = 8
    device: str = "cpu"


def work(way: str, pairs: int, width: int, world: int, device: str) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.randn(pairs, width, generator=generator).div_(width**0.5) for _ in range(2))
    leaves = [leaf.to(device).requires_grad_() for leaf in (image, text, torch.tensor(50.0))]
    rows = pairs // world
    small = [leaf.detach()[:64].requires_grad_() for leaf in leaves[:2]]
    LOSSES[way](*small, 50.0).backward()

    def step() -> object:
        loss = LOSSES[way](*leaves, offset=pairs - rows, rows=rows)
        return torch.autograd.grad(loss, leaves)

    return step


def predicted(pairs: int, width: int, world: int, device: str) -> dict[str, Any]:
    """One row of the table, in bytes."""
    cost = rank_cost(pairs, width, world, device_type=torch.device(device).type)
    row = {"world": world, "pairs": pairs, "rows": pairs // world, "ratio": cost.tiled / cost.eager}
    return row | {f"{name}_bytes": size for name, size in vars(cost).items()}


def measured(row: dict[str, Any], width: int, device: str) -> dict[str, Any]:
    """The row with what its process needs, measured, and over what the formula says."""
    case = {"pairs": row["pairs"], "width": width, "world": row["world"], "device": device}
    for way in LOSSES:
        row[f"{way}_measured_bytes"] = peak_memory(__file__, "work", way=way, **case)
        row[f"{way}_check"] = row[f"{way}_measured_bytes"] / row[f"{way}_bytes"]
    return row


def run(options: Options) -> Report:
    rows = [predicted(n, options.width, world, options.device) for world in options.worlds for n in options.pairs]
    for pairs in options.checked:
        log.info(f"measuring one of {options.checked_world} processes with {pairs:,} pairs")
        row = predicted(pairs, options.width, options.checked_world, options.device)
        rows.append(measured(row, options.width, options.device))
    rows = [row | {name[:-6]: row[name] / 1e9 for name in row if name.endswith("_bytes")} for row in rows]
    notes = [f"width {options.width}, 4 bytes per number; features come on top of either loss"]
    return Report("batch_memory", COLUMNS, rows, machine(options.device), notes)
