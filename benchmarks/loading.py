"""Pictures per second for an epoch of training: decoding every picture again, beside reading the picture cache.

All ways give the same bytes, [128, 3, size, size] a batch, in a new random order each turn. They take turns in one
process: decoding in one thread, decoding in as many threads as the cache is filled with, filling an empty cache, and
reading the cache in one thread. The photos and the cache are in the operating system's memory by then, which favours
decoding and reading alike. Numbers are medians and quartiles over the turns, by the clock on the wall.
"""

from __future__ import annotations

import logging
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from hnclip.core import ImageSource
from hnclip.data.image_cache import CachedPixels, load_images
from hnclip.data.image_sources import FileImage, TarImage, is_image_name
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.measure import Report, machine, threads, time_ways

log = logging.getLogger("hnclip.bench")

BATCH = 128


@dataclass(frozen=True)
class Options:
    """Speed of an epoch."""

    photos: tyro.conf.Positional[Path]
    """A directory of pictures, or a tar file of them."""
    size: int = 224
    """Side of the picture that the model sees."""
    limit: int | None = None
    """Use only the first so many pictures."""
    turns: int = 5
    workers: int = os.cpu_count() or 1
    """Threads that decode together."""


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


def read_epoch(pixels: CachedPixels, order: Tensor) -> None:
    for rows in order.split(BATCH):
        pixels[rows]  # [128, 3, S, S]


def fill(images: Sequence[ImageSource], transform: ImageTransform, directory: Path, workers: int) -> CachedPixels:
    found = load_images(images, transform, cache=directory, workers=workers)
    if found.problems:
        raise ValueError(
            f"these cannot be decoded, leave them out: {[p.detail for p in list(found.problems.values())[:3]]}"
        )
    return found.pixels


def run(options: Options) -> Report:
    images = find_pictures(options.photos)[: options.limit]
    if not images:
        raise ValueError(f"{options.photos} holds no pictures")
    log.info(f"{len(images):,} images, {options.turns} turns")
    with threads(1), tempfile.TemporaryDirectory() as directory:
        return measure(images, ImageTransform(options.size), options.workers, options.turns, Path(directory))


def measure(
    images: Sequence[ImageSource], transform: ImageTransform, workers: int, turns: int, directory: Path
) -> Report:
    generator = torch.Generator().manual_seed(0)
    order = torch.arange(len(images))  # [N]

    def new_turn() -> None:
        torch.randperm(len(images), generator=generator, out=order)
        shutil.rmtree(directory / "empty", ignore_errors=True)

    pixels = fill(images, transform, directory / "filled", workers)
    found = time_ways(
        {
            "decode_1": lambda: decode_epoch(images, transform, order, 1),
            "decode_n": lambda: decode_epoch(images, transform, order, workers),
            "fill": lambda: fill(images, transform, directory / "empty", workers),
            "cache": lambda: read_epoch(pixels, order),
        },
        turns=turns,
        prepare=new_turn,
    )
    titles = {
        "decode_1": "decode, 1 thread",
        "decode_n": f"decode, {workers} threads",
        "fill": f"fill the cache, {workers} threads",
        "cache": "read the cache, 1 thread",
    }
    rows: list[dict[str, Any]] = [
        {
            "way": titles[name],
            "pictures_per_second": timing.per_second(len(images)),
            "cache_over": timing.ratios(found["cache"]) if name.startswith("decode") else None,
            "turns": timing,
        }
        for name, timing in found.items()
    ]
    start = time.perf_counter()
    fill(images, transform, directory / "filled", workers)
    opening = 1000 * (time.perf_counter() - start)
    decoded = torch.stack([preprocess_image(image.load(), transform) for image in images[:BATCH]])  # [128, 3, S, S]
    same = torch.equal(pixels[:BATCH], decoded)
    rows[-1] |= {"opening_ms": opening, "same_bytes": same}
    notes = [
        f"{len(images):,} pictures, size {transform.size}; same bytes: {same}",
        f"opening the filled cache: {opening:.0f} ms",
    ]
    columns = {"way": "", "pictures_per_second": "pictures per second", "cache_over": "cache is faster by"}
    return Report("loading", columns, rows, machine(), notes)
