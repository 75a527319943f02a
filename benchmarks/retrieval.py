"""Time and memory to rank N captions and N images: `retrieval_ranks` against argsort of the whole score matrix.

Both directions are ranked. The peer sorts the N × N matrix, as most evaluation scripts do, and looks the right answer
up in it. Vectors are random and 768 wide. One thread, processor time; memory is the rise of the peak resident size
during the ranking alone, vectors excluded, in a fresh process. `all` is everything that an evaluation does after
encoding: ranks, metrics with bootstrap intervals, and caption similarity.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measure import Report, log, machine, main, peak_memory, threads, time_ways
from torch import Tensor

from hnclip.analysis.captions import caption_similarity
from hnclip.evaluation import Ranks, retrieval_ranks, summarize

WIDTH = 768


@dataclass(frozen=True)
class Options:
    """Ranks of all pairs, in both directions."""

    pairs: tuple[int, ...] = (1_000, 5_100, 10_000)
    """Sizes; DOCCI's test set has 5,100 pairs."""
    largest: int = 10_000
    """Beyond this hnclip alone is measured: argsort of 100,000 would need 160 GB."""
    turns: int = 3


def vectors(pairs: int) -> tuple[Tensor, Tensor]:
    """Images and captions [N, D]; about half of the captions find their image first among 5,100. All in place: memory
    that is freed here would be used again by the ranking and not be counted as its own."""
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.randn(pairs, WIDTH, generator=generator) for _ in range(2))
    image /= image.norm(dim=1, keepdim=True)
    text.mul_(7 / WIDTH**0.5).add_(image)
    text /= text.norm(dim=1, keepdim=True)
    return image, text


def argsort(image: Tensor, text: Tensor) -> Ranks:
    scores = text @ image.T  # [N, N]
    right = torch.arange(len(image))[:, None]  # [N, 1]
    found = [(part.argsort(1, descending=True) == right).nonzero()[:, 1] + 1 for part in (scores, scores.T)]
    return Ranks(found[0], found[1], right[:, 0])


def tiled(image: Tensor, text: Tensor) -> Ranks:
    return retrieval_ranks(image, text, torch.arange(len(image)))


WAYS: dict[str, Callable[[Tensor, Tensor], Ranks]] = {"argsort": argsort, "hnclip": tiled}


def ranking(way: str, pairs: int) -> Callable[[], Ranks]:
    """The work whose memory is measured."""
    WAYS[way](*vectors(64))  # what the first call of any size allocates is not counted
    return partial(WAYS[way], *vectors(pairs))


def run(options: Options) -> Report:
    rows = []
    with threads(1):
        for pairs in options.pairs:
            log.info(f"{pairs:,} pairs")
            names = [way for way in WAYS if way == "hnclip" or pairs <= options.largest]
            image, text = vectors(pairs)
            ranks = tiled(image, text)
            work: dict[str, Callable[[], object]] = {way: partial(WAYS[way], image, text) for way in names}
            work["metrics"] = partial(summarize, ranks, intervals=True)
            work["similarity"] = partial(caption_similarity, text, torch.arange(pairs))
            warmup = 1 if pairs <= options.largest else 0  # minutes of work need none
            timings = time_ways(work, turns=options.turns, warmup=warmup, clock=time.process_time)
            row: dict[str, Any] = {"pairs": pairs, **{f"{name} s": timing for name, timing in timings.items()}}
            row["all s"] = sum(timings[name].median for name in ("hnclip", "metrics", "similarity"))
            for way in names:
                row[f"{way} MB"] = peak_memory(__file__, "ranking", way=way, pairs=pairs) / 1e6
            if "argsort" in names:
                row["times as fast"] = timings["argsort"].ratios(timings["hnclip"])
            rows.append(row)
        return Report("ranks", rows, machine())


if __name__ == "__main__":
    main(Options, run)
