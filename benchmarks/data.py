"""Data: preprocessing against transformers, the image cache against decoding, `hnclip encode` against its encoder.

preprocess: one decoded image to the bytes [3, 224, 224], by `preprocess_image` and by `CLIPImageProcessorPil` without
its rescaling and normalising, which hnclip does on the model's device; one thread, processor time.

cache: epochs in a new random order each turn, [128, 3, size, size] a batch: all images decoded anew, the cache filled,
the cache read. Files and cache are in the operating system's memory.

encode: JPEGs of 640 × 480 pixels, captions as long as DOCCI's, a model of random weights. The encoder alone has
preprocessed images and token ids in memory and writes nothing: the upper bound. The plain loop decodes a batch, pads
its captions to the model's context, encodes and continues. Model and data are opened before.
"""

from __future__ import annotations

import csv
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from measure import Quartiles, Report, machine, main, threads, time_ways
from PIL import Image
from torch import Tensor

from hnclip.core import ImageSource
from hnclip.data.image_cache import CachedPixels, load_images
from hnclip.data.image_sources import FileImage, TarImage, is_image_name
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.encode.embeddings import open_embeddings
from hnclip.encode.loop import encode_captions, encode_pixels
from hnclip.encode.shards import Encoder, EncodeSettings
from hnclip.models.load import load
from search import write_model, write_photos

BATCH = 128  # images of an epoch read at once
WORDS = ("a", "the", "red", "house", "with", "small", "white", "tree", "in", "left", "corner", "stands")  # a token each


@dataclass(frozen=True)
class Preprocess:
    """Time of one image."""

    sizes: tuple[tuple[int, int], ...] = ((500, 375), (640, 480), (1500, 1000), (4000, 3000), (1080, 2340))
    """Width and height of the images, one pair after the other."""
    seconds: float = 2.0
    """Time for each size, but at least 7 turns."""


def preprocess(options: Preprocess) -> Report:
    from transformers import CLIPImageProcessorPil

    transform, rows = ImageTransform(224), []
    processor = CLIPImageProcessorPil(do_rescale=False, do_normalize=False)
    with threads(1):
        for width, height in options.sizes:
            noise = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
            image = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
            ways: dict[str, Callable[[], Tensor]] = {
                "transformers": lambda image=image: processor(image, return_tensors="pt")["pixel_values"][0],
                "hnclip": partial(preprocess_image, image, transform),
            }
            timings = time_ways(ways, turns=7, seconds=options.seconds, clock=time.process_time)
            rows.append(
                {
                    "image": f"{width} × {height}",
                    **{f"{way} ms": 1000 * timing.median for way, timing in timings.items()},
                    "times as fast": timings["transformers"].ratios(timings["hnclip"]),
                    "same bytes": torch.equal(ways["transformers"](), ways["hnclip"]()),
                }
            )
        return Report("preprocess", rows, machine())


@dataclass(frozen=True)
class Cache:
    """Images per second of an epoch."""

    photos: tyro.conf.Positional[Path]
    """A directory of images, or a tar file of them."""
    size: int = 224
    """Side of the image that the model gets."""
    limit: int | None = None
    """Use only the first images."""
    turns: int = 5
    workers: int = os.cpu_count() or 1
    """Threads that decode together."""


def cache(options: Cache) -> Report:
    photos, transform = options.photos, ImageTransform(options.size)
    images: Sequence[ImageSource]
    if photos.is_dir():
        images = [FileImage(path) for path in sorted(photos.rglob("*")) if is_image_name(path.name)]
    else:
        with tarfile.open(photos, "r:") as tar:
            files = [file for file in tar if is_image_name(file.name)]
            images = [TarImage(photos, file.name, file.offset_data, file.size) for file in files]
    images = images[: options.limit]
    if not images:
        raise ValueError(f"{photos} contains no images")
    generator, order = torch.Generator().manual_seed(0), torch.arange(len(images))

    def decode(workers: int) -> None:
        with ThreadPoolExecutor(workers) as pool:
            for rows in order.split(BATCH):  # [128, 3, S, S] each
                torch.stack([*pool.map(lambda row: preprocess_image(images[row].load(), transform), rows.tolist())])

    def fill(directory: Path) -> CachedPixels:
        found = load_images(images, transform, cache=directory, workers=options.workers)
        if found.problems:
            raise ValueError(f"{len(found.problems)} images cannot be decoded")
        return found.pixels

    with threads(1), tempfile.TemporaryDirectory() as place:
        full, empty = Path(place, "full"), Path(place, "empty")

        def new_turn() -> None:
            torch.randperm(len(images), generator=generator, out=order)
            shutil.rmtree(empty, ignore_errors=True)

        pixels = fill(full)
        ways = {
            "decode, 1 thread": partial(decode, 1),
            f"decode, {options.workers} threads": partial(decode, options.workers),
            f"fill the cache, {options.workers} threads": partial(fill, empty),
            "read the cache, 1 thread": lambda: [pixels[rows] for rows in order.split(BATCH)],
        }
        timings = time_ways(ways, turns=options.turns, prepare=new_turn)
        opening = time_ways({"open": partial(fill, full)}, turns=3)["open"].median
        about = machine()
    cached = timings["read the cache, 1 thread"]
    rows = [
        {
            "way": way,
            "images/s": Quartiles.of(len(images) / taken for taken in timing.seconds),
            "× reading the cache": timing.ratios(cached),
        }
        for way, timing in timings.items()
    ]
    notes = [f"{len(images):,} images; opening the filled cache takes {1000 * opening:.0f} ms"]
    return Report("cache", rows, about, notes)


@dataclass(frozen=True)
class Encode:
    """Speed of `hnclip encode`."""

    records: int = 128
    """Images, each with one caption."""
    layers: int = 6
    width: int = 384
    batch: int = 16
    turns: int = 3
    threads: int = torch.get_num_threads()


def encode(options: Encode) -> Report:
    with tempfile.TemporaryDirectory() as place, threads(options.threads):
        folder, random = Path(place), np.random.default_rng(0)
        files = write_photos(folder / "photos", options.records)
        lengths = np.exp(random.normal(np.log(123), 0.35, len(files))).clip(20, 200).astype(int)
        with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as table:
            captions = [
                [file, f"{row} {' '.join(random.choice(WORDS, n))}"]
                for row, (file, n) in enumerate(zip(files, lengths))
            ]
            csv.writer(table).writerows([["image", "caption"], *captions])
        tower = {"layers": options.layers, "width": options.width}
        model = write_model(
            folder / "model", load().tokenizer, text={**tower, "context": 248}, vision={**tower, "patch": 32}
        )
        data, out = str(folder / "pairs.csv"), folder / "out"
        given = EncodeSettings(data, out, model, batch=options.batch, shard_size=64, device="cpu")
        encoder = Encoder(given)
        records, batch, model = encoder.data.records, options.batch, encoder.model
        texts = [record.captions[0] for record in records]
        pixels = torch.stack([preprocess_image(record.image.load(), model.image_transform) for record in records])
        tokens = model.text_transform(texts)
        vectors: dict[str, list[Tensor]] = {"images": [], "captions": []}

        def encode_all() -> None:
            shutil.rmtree(given.out, ignore_errors=True)
            for number in range(encoder.job["shards"]):
                encoder.write(number)
            encoder.finish()

        def plain_loop() -> None:
            for parts in vectors.values():
                parts.clear()
            for start in range(0, len(records), batch):
                part = slice(start, start + batch)
                stack = torch.stack([preprocess_image(r.image.load(), model.image_transform) for r in records[part]])
                padded = torch.full((len(stack), model.context), model.text_transform.pad)  # [B, T]
                for row, ids in enumerate(model.text_transform(texts[part])):
                    padded[row, : len(ids)] = torch.from_numpy(ids)
                with model.inference():
                    vectors["images"].append(model.encode_images(stack).vectors)  # [B, D]
                    text = model.backbone.get_text_features(input_ids=padded).pooler_output
                    vectors["captions"].append(F.normalize(text, dim=-1))  # [B, D]

        ways: dict[str, Callable[[], object]] = {
            "encoder alone": lambda: (
                encode_pixels(model, pixels, batch=batch),
                encode_captions(model, tokens, batch=batch),
            ),
            "hnclip encode": encode_all,
            "plain loop": plain_loop,
        }
        timings = time_ways(ways, turns=options.turns)
        stored = open_embeddings(given.out, verify=True)
        pairs = [(stored.images, vectors["images"]), (stored.captions, vectors["captions"])]
        difference = max(np.abs(np.concatenate(own) - torch.cat(other).numpy()).max() for own, other in pairs)
        notes = [f"the vectors of the plain loop differ by {difference:.1e} at most"]
        about = machine()
    alone = timings["encoder alone"]
    rows = [
        {
            "way": way,
            "pairs/s": Quartiles.of(len(records) / taken for taken in timing.seconds),
            "of the encoder alone": alone.ratios(timing),
        }
        for way, timing in timings.items()
    ]
    return Report("encode", rows, about, notes)


Options = Preprocess | Cache | Encode
RUNS: dict[type, Callable[[Any], Report]] = {Preprocess: preprocess, Cache: cache, Encode: encode}


def run(options: Options) -> Report:
    return RUNS[type(options)](options)


if __name__ == "__main__":
    main(Options, run)
