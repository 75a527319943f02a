"""Pictures per second for an epoch of training: decoding every picture again, beside reading the picture cache.

    python benchmarks/loading.py PHOTOS           # a table; PHOTOS is a directory of pictures, or a tar file of them
    python benchmarks/loading.py PHOTOS --json    # the same for programs

All ways give the same bytes, [128, 3, size, size] a batch, in a new random order each turn. They take turns in one
process: decoding in one thread, decoding in as many threads as the cache is filled with, filling an empty cache, and
reading the cache in one thread. The photos and the cache are in the operating system's memory by then, which favours
decoding and reading alike. Numbers are median, lowest and highest over the turns, by the clock on the wall.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hnclip.data.cache import Pixels, load_pictures
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.pictures import FileImage, TarImage, is_image_name
from hnclip.data.records import ImageSource

BATCH = 128
Work = Callable[[], object]


def find_pictures(photos: Path) -> list[ImageSource]:
    if photos.is_dir():
        return [FileImage(path) for path in sorted(photos.rglob("*")) if is_image_name(path.name)]
    with tarfile.open(photos, "r:") as tar:
        return [TarImage(photos, item.name, item.offset_data, item.size) for item in tar if is_image_name(item.name)]


def decode_epoch(images: Sequence[ImageSource], transform: ImageTransform, order: Tensor, workers: int) -> None:
    def one(index: int) -> Tensor:
        return preprocess_image(images[index].load(), transform)

    with ThreadPoolExecutor(workers) as pool:
        spread = map if workers == 1 else pool.map
        for rows in order.split(BATCH):
            torch.stack(list(spread(one, rows.tolist())))  # [128, 3, S, S]


def read_epoch(pixels: Pixels, order: Tensor) -> None:
    for rows in order.split(BATCH):
        pixels[rows]  # [128, 3, S, S]


def fill(images: Sequence[ImageSource], transform: ImageTransform, directory: str, workers: int) -> Pixels:
    found = load_pictures(images, transform, cache=Path(directory), workers=workers)
    if found.problems:
        raise SystemExit(f"these cannot be decoded, leave them out: {list(found.problems.values())[:3]}")
    return found.pixels


def seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(images: Sequence[ImageSource], transform: ImageTransform, workers: int, turns: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    speeds: dict[str, list[float]] = {"decode_1": [], "decode_n": [], "fill": [], "cache": []}
    with tempfile.TemporaryDirectory() as filled:
        pixels = fill(images, transform, filled, workers)  # and the photos are in memory
        read_epoch(pixels, torch.arange(len(images)))
        for _ in range(turns):
            order = torch.randperm(len(images), generator=generator)
            with tempfile.TemporaryDirectory() as empty:
                ways: dict[str, Work] = {
                    "decode_1": partial(decode_epoch, images, transform, order, 1),
                    "decode_n": partial(decode_epoch, images, transform, order, workers),
                    "fill": partial(fill, images, transform, empty, workers),
                    "cache": partial(read_epoch, pixels, order),
                }
                for name, work in ways.items():
                    speeds[name].append(len(images) / seconds(work))
        opening = seconds(partial(fill, images, transform, filled, workers))
        decoded = torch.stack([preprocess_image(image.load(), transform) for image in images[:BATCH]])
        exact = torch.equal(pixels[:BATCH], decoded)
    ratios = {name: [a / b for a, b in zip(speeds["cache"], speeds[name])] for name in ("decode_1", "decode_n")}
    return {
        "pictures": len(images),
        "size": transform.size,
        "turns": turns,
        "workers": workers,
        "pictures_per_second": {name: spread(values) for name, values in speeds.items()},
        "cache_over": {name: spread(values) for name, values in ratios.items()},
        "opening_ms": round(1000 * opening, 1),
        "same_bytes": exact,
    }


def spread(values: Sequence[float]) -> list[float]:
    return [round(value, 1) for value in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--size", type=int, default=224, help="side of the picture that the model sees")
    parser.add_argument("--limit", type=int, help="use only the first so many pictures")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print JSON; three numbers are median, lowest and highest")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = find_pictures(options.photos)[: options.limit]
    result = measure(images, ImageTransform(options.size), options.workers, options.turns)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    titles = {
        "decode_1": "decode, 1 thread",
        "decode_n": f"decode, {options.workers} threads",
        "fill": f"fill the cache, {options.workers} threads",
        "cache": "read the cache, 1 thread",
    }
    print(f"{len(images)} pictures, size {options.size}, {options.turns} turns; same bytes: {result['same_bytes']}")
    print(f"{'':28}{'pictures per second':>26}{'cache is faster by':>26}")
    for name, title in titles.items():
        speed = "{:.0f} ({:.0f}–{:.0f})".format(*result["pictures_per_second"][name])
        faster = "{:.1f} ({:.1f}–{:.1f})".format(*result["cache_over"][name]) if name in result["cache_over"] else ""
        print(f"{title:28}{speed:>26}{faster:>26}")
    print(f"opening the filled cache: {result['opening_ms']:.0f} ms")


if __name__ == "__main__":
    main()
