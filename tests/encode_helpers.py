"""Small data on disk, and calls of `encode` in this process or in another."""

from __future__ import annotations

import csv
import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hnclip.config import ReadConfig
from hnclip.encode.shards import EncodeResult, encode

WORDS = ["a", "red", "house", "stands", "near", "two", "small", "trees", "under", "the", "cloudy", "sky"]

# Real processes, but what they import is imported once.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["hnclip.encode.shards", "transformers.models.clip.modeling_clip", "transformers.models.clip.tokenization_clip"]
)


def save_image(path: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (60, 50 + seed % 7, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_table(folder: Path, records: int) -> Path:
    """A table of images with one to three captions each, of very different lengths."""
    random = np.random.default_rng(records)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "caption"])
        for number in range(records):
            save_image(folder / f"{number:02}.png", number)
            for index in range(1 + number % 3):
                words = " ".join(random.choice(WORDS, 2 + int(random.integers(60))))
                rows.writerow([f"{number:02}.png", f"{number} {index} {words}"])
    return folder / "pairs.csv"


def run(data: Path | str, model: Path | str, out: Path, *, max_bad: float = 0.01, **changed: Any) -> EncodeResult:
    """`encode` with five records in a shard."""
    given = {"shard_size": 5, "batch": 4, "threads": 1, "device": "cpu", **changed}
    return encode(str(data), out, model=str(model), read=ReadConfig(max_bad=max_bad), **given)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below, hidden ones too."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def start(target: Callable[..., Any], *arguments: Any, **others: Any) -> BaseProcess:
    process = PROCESSES.Process(target=target, args=arguments, kwargs=others)
    process.start()
    return process
