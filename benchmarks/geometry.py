"""Time and memory of the caption geometry of N captions, beside the N × N matrix of similarities.

`hnclip` is `caption_geometry`: the distribution of all pairs and the hardest negative of each caption, from tiles. The
peer makes the whole matrix, and from it the histogram and the maxima.

Vectors are random and 512 wide. One thread; times are processor time, as the median over turns that both ways take in
one process. Memory is the rise of the peak resident size, vectors excluded, each way in a process of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hnclip.analysis.captions import caption_geometry
from hnclip.measure import Report, machine, peak_memory, threads, time_ways

log = logging.getLogger("hnclip.bench")

WIDTH = 512
MATRIX_UP_TO = 20_000  # captions; 50,000 would need 10 GB
COLUMNS = {
    "captions": "captions",
    "matrix": "matrix s",
    "hnclip": "hnclip s",
    "times_as_fast": "times as fast",
    "matrix_megabytes": "matrix MB",
    "hnclip_megabytes": "hnclip MB",
}


@dataclass(frozen=True)
class Options:
    """How alike N captions are."""

    captions: tuple[int, ...] = (5_100, 20_000, 50_000)
    """Sizes; beyond 20,000 hnclip alone is measured."""
    turns: int = 1


def vectors(captions: int) -> Tensor:
    """[N, D], made in place: memory freed here would be used again by the work and not be seen as its own."""
    text = torch.randn(captions, WIDTH, generator=torch.Generator().manual_seed(0))
    text /= text.norm(dim=1, keepdim=True)
    return text


def matrix(text: Tensor) -> None:
    similarity = text @ text.T  # [N, N]
    similarity.fill_diagonal_(-1)
    similarity.amax(1)
    torch.histc(similarity, 20_000, -1, 1)


def ours(text: Tensor) -> None:
    caption_geometry(text, torch.arange(len(text)))


WAYS: dict[str, Callable[[Tensor], None]] = {"matrix": matrix, "hnclip": ours}


def comparing(way: str, captions: int) -> Callable[[], None]:
    """The work whose memory is measured."""
    WAYS[way](vectors(64))  # what the first call of any size allocates is not the work's
    return partial(WAYS[way], vectors(captions))


def measure(captions: int, turns: int) -> dict[str, Any]:
    """One row of the table."""
    ways = {name: way for name, way in WAYS.items() if name == "hnclip" or captions <= MATRIX_UP_TO}
    text = vectors(captions)
    timings = time_ways(
        {name: partial(way, text) for name, way in ways.items()}, turns=turns, warmup=0, clock=time.process_time
    )
    row = {
        "captions": captions,
        **timings,
        **{f"{way}_megabytes": peak_memory(__file__, "comparing", way=way, captions=captions) / 1e6 for way in ways},
    }
    if "matrix" in ways:
        row["times_as_fast"] = timings["matrix"].ratios(timings["hnclip"])
    return row


def run(options: Options) -> Report:
    with threads(1):
        rows = []
        for captions in options.captions:
            log.info(f"{captions:,} captions")
            rows.append(measure(captions, options.turns))
        return Report("geometry", COLUMNS, rows, machine())
