"""Time and memory to rank N captions against N pictures in both directions: hnclip's `retrieval_ranks` beside the naive
way of most evaluation scripts, which sort the whole N × N matrix with argsort and look the right answer up in it.

    python benchmarks/ranks.py                     # 1,000, 5,100 (DOCCI) and 10,000 pairs
    python benchmarks/ranks.py --pairs 100000      # beyond 10,000 hnclip alone: the naive way would need 160 GB
    python benchmarks/ranks.py --json              # the same for programs

Vectors are random and 768 wide, as Long-CLIP-L's. One thread; times are processor time, which other programs disturb
least, as the median over turns that both ways take in one process. Memory is the rise of the peak resident size during
the ranking alone, vectors excluded, each way in a process of its own. `all` is everything that an evaluation does after
encoding: ranks, metrics with all bootstrap intervals, and caption similarity.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from open_checkpoint import peak, restart_peak

from hnclip.analysis.geometry import caption_geometry
from hnclip.evaluate import Ranks, recall_at, retrieval_ranks, summarize

WIDTH = 768
NAIVE_UP_TO = 10_000


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


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(pairs: int, turns: int) -> dict[str, Any]:
    """One row of the table."""
    ways = ["naive", "hnclip"] if pairs <= NAIVE_UP_TO else ["hnclip"]
    image, text = vectors(pairs)
    times: dict[str, list[float]] = {name: [] for name in [*ways, "metrics", "similarity"]}
    found: dict[str, Ranks] = {}
    for _ in range(turns):
        for way in ways:
            times[way].append(seconds(lambda way=way: found.update({way: WAYS[way](image, text)})))
        times["metrics"].append(seconds(lambda: summarize(found["hnclip"], intervals=True)))
        times["similarity"].append(seconds(lambda: caption_geometry(text, torch.arange(pairs))))
    typical = {name: statistics.median(values) for name, values in times.items()}
    row: dict[str, Any] = {"pairs": pairs, "turns": turns, "R@1": recall_at(found["hnclip"].text_to_image, 1)}
    row |= {f"{name}_seconds": round(value, 3) for name, value in typical.items()}
    row["all_seconds"] = round(typical["hnclip"] + typical["metrics"] + typical["similarity"], 3)
    row |= {f"{way}_megabytes": memory(way, pairs) for way in ways}
    if "naive" in ways:
        row["times_as_fast"] = round(typical["naive"] / typical["hnclip"], 1)
        apart = (found["naive"].text_to_image - found["hnclip"].text_to_image).abs()  # [N]
        row["largest_difference"] = int(apart.max())  # of two ranks: scores apart by rounding alone tie here
        row["times_less_memory"] = round(row["naive_megabytes"] / row["hnclip_megabytes"], 1)
    return row


def memory(way: str, pairs: int) -> float:
    """Megabytes that the ranking needs beside the vectors, in a fresh process."""
    command = [sys.executable, __file__, "--child", way, str(pairs)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def child(way: str, pairs: int) -> float:
    small = vectors(64)
    WAYS[way](*small)  # what the first call of any size allocates is not the ranking's
    image, text = vectors(pairs)
    before = restart_peak()
    WAYS[way](image, text)
    return round((peak() - before) / 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[1000, 5100, 10_000], help="sizes, %(default)s")
    parser.add_argument("--turns", type=int, default=3, help="repetitions, %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--child", nargs=2, metavar=("WAY", "PAIRS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        print(json.dumps(child(options.child[0], int(options.child[1]))))
        return
    rows = [measure(pairs, options.turns) for pairs in options.pairs]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    columns = {
        "pairs": "pairs",
        "naive_seconds": "naive s",
        "hnclip_seconds": "hnclip s",
        "times_as_fast": "times as fast",
        "naive_megabytes": "naive MB",
        "hnclip_megabytes": "hnclip MB",
        "times_less_memory": "times less",
        "metrics_seconds": "metrics s",
        "similarity_seconds": "similarity s",
        "all_seconds": "all s",
    }
    print("  ".join(title.rjust(9) for title in columns.values()))
    for row in rows:
        cells = (f"{row.get(name, '–')}".rjust(max(9, len(title))) for name, title in columns.items())
        print("  ".join(cells))


if __name__ == "__main__":
    main()
