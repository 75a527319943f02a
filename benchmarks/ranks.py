"""Time and memory to rank N captions and N pictures: hnclip's `retrieval_ranks` beside argsort of the whole matrix.

Both directions are ranked. The naive way is that of most evaluation scripts, which sort the N × N matrix and look the
right answer up in it.

Vectors are random and 768 wide, as Long-CLIP-L's. One thread; times are processor time, which other programs disturb
least, as the median over turns that both ways take in one process. Memory is the rise of the peak resident size during
the ranking alone, vectors excluded, each way in a process of its own. `all` is everything that an evaluation does after
encoding: ranks, metrics with all bootstrap intervals, and caption similarity.
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

from hnclip.analysis.captions import caption_similarity
from hnclip.evaluation import Ranks, recall_at, retrieval_ranks, summarize
from hnclip.measure import Report, machine, peak_memory, threads, time_ways

log = logging.getLogger("hnclip.bench")

WIDTH = 768
NAIVE_UP_TO = 10_000  # pairs; 100,000 would need 160 GB
COLUMNS = {
    "pairs": "pairs",
    "naive": "naive s",
    "hnclip": "hnclip s",
    "times_as_fast": "times as fast",
    "naive_megabytes": "naive MB",
    "hnclip_megabytes": "hnclip MB",
    "times_less_memory": "times less",
    "metrics": "metrics s",
    "similarity": "similarity s",
    "all_seconds": "all s",
}


@dataclass(frozen=True)
class Options:
    """Ranks of all pairs, in both directions."""

    pairs: tuple[int, ...] = (1_000, 5_100, 10_000)
    """Sizes; beyond 10,000 hnclip alone is measured. DOCCI's test set has 5,100 pairs."""
    turns: int = 3


def vectors(pairs: int) -> tuple[Tensor, Tensor]:
    """Pictures and captions [N, D]; about half of the captions find their picture first among 5,100.

    All in place: memory freed here would be used again by the ranking and not be seen as its own.
    """
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(pairs, WIDTH, generator=generator)
    image /= image.norm(dim=1, keepdim=True)
    text = torch.randn(pairs, WIDTH, generator=generator)
    text *= 7 / WIDTH**0.5
    text += image
    text /= text.norm(dim=1, keepdim=True)
    return image, text


def naive(image: Tensor, text: Tensor) -> Ranks:
    scores = text @ image.T  # [N, N]
    right = torch.arange(len(image))[:, None]  # [N, 1]
    found = [(part.argsort(1, descending=True) == right).nonzero()[:, 1] + 1 for part in (scores, scores.T)]
    return Ranks(found[0], found[1], right[:, 0])


def ours(image: Tensor, text: Tensor) -> Ranks:
    return retrieval_ranks(image, text, torch.arange(len(image)))


WAYS: dict[str, Callable[[Tensor, Tensor], Ranks]] = {"naive": naive, "hnclip": ours}


def ranking(way: str, pairs: int) -> Callable[[], Ranks]:
    """The work whose memory is measured."""
    WAYS[way](*vectors(64))  # what the first call of any size allocates is not the ranking's
    return partial(WAYS[way], *vectors(pairs))


def measure(pairs: int, turns: int) -> dict[str, Any]:
    """One row of the table."""
    ways = {name: way for name, way in WAYS.items() if name == "hnclip" or pairs <= NAIVE_UP_TO}
    image, text = vectors(pairs)
    found: dict[str, Ranks] = {}
    work: dict[str, Callable[[], object]] = {
        name: lambda name=name, way=way: found.update({name: way(image, text)}) for name, way in ways.items()
    }
    work["metrics"] = lambda: summarize(found["hnclip"], intervals=True)
    work["similarity"] = lambda: caption_similarity(text, torch.arange(pairs))
    warmup = 1 if pairs <= NAIVE_UP_TO else 0  # minutes of work are warm by themselves
    timings = time_ways(work, turns=turns, warmup=warmup, clock=time.process_time)
    memory = {f"{way}_megabytes": peak_memory(__file__, "ranking", way=way, pairs=pairs) / 1e6 for way in ways}
    row = {
        "pairs": pairs,
        "R@1": recall_at(found["hnclip"].text_to_image, 1),
        **timings,
        "all_seconds": sum(timings[name].median for name in ("hnclip", "metrics", "similarity")),
        **memory,
    }
    if "naive" in ways:
        row["times_as_fast"] = timings["naive"].ratios(timings["hnclip"])
        least = memory["hnclip_megabytes"]
        row["times_less_memory"] = memory["naive_megabytes"] / least if least else None
        apart = (found["naive"].text_to_image - found["hnclip"].text_to_image).abs()  # [N]
        row["largest_difference"] = int(apart.max())  # of two ranks: scores apart by rounding alone tie here
    return row


def run(options: Options) -> Report:
    with threads(1):
        rows = []
        for pairs in options.pairs:
            log.info(f"{pairs:,} pairs")
            rows.append(measure(pairs, options.turns))
        return Report("ranks", COLUMNS, rows, machine())
