"""Speed of `hnclip index` as a share of its encoder's own: images per second from JPEG files to an index, and from
preprocessed images to vectors.

The images are JPEGs of 640 × 480 pixels, the model has random weights, by default in the shape of CLIP ViT-B/32. Both
ways take turns and encode batches of the same size. The time of `hnclip index` is that from listing what has changed to
the last commit, without opening the model. The same command then runs again with nothing to do: it reads no image.
"""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from synthetic_index import write_model, write_photos
from torch import Tensor

from hnclip.data.image_sources import FileImage
from hnclip.data.images import preprocess_image
from hnclip.measure import Report, Timing, machine, threads
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.search.indexer import build_index
from hnclip.search.render import IndexResult

log = logging.getLogger("hnclip.bench")

ENCODER, INDEX, AGAIN = "encoder alone, images preprocessed", "hnclip index", "hnclip index again, nothing to do"


@dataclass(frozen=True)
class Options:
    """Speed of `hnclip index`."""

    images: int = 512
    model: str | None = None
    """Any model that `hnclip index` takes; if not given, one of random weights, of `layers` and `width`."""
    layers: int = 12
    width: int = 768
    patch: int = 32
    """Side of a patch in pixels."""
    batch: int = 64
    workers: int = 0
    """Threads that read and decode; 0 for the number of CPUs."""
    turns: int = 3
    """Repetitions; the median counts."""
    threads: int = torch.get_num_threads()
    """Of the encoder."""


def run(options: Options) -> Report:
    taken: dict[str, list[float]] = {ENCODER: [], INDEX: [], AGAIN: []}
    with tempfile.TemporaryDirectory() as place, threads(options.threads):
        log.info(f"writing {options.images:,} images and the model")
        folder = Path(place)
        files = write_photos(folder / "photos", options.images)
        name = options.model or write_model(
            folder / "model",
            load().tokenizer,
            text={"layers": 1, "width": 64, "context": 77},  # no caption is encoded
            vision={"layers": options.layers, "width": options.width, "patch": options.patch},
        )
        model = load(name).eval()
        pixels = torch.stack([preprocess_image(FileImage(file).load(), model.image_transform) for file in files])
        for turn in range(options.turns + 1):
            log.info(f"turn {turn + 1} of {options.turns + 1}; the first one warms up")
            encoder = encode(model, pixels, options.batch)
            first, second = (index(folder / "photos", folder / f"{turn}.hnc", name, options) for _ in range(2))
            if (first.encoded, second.encoded) != (len(files), 0):
                raise RuntimeError(f"encoded {first.encoded} and {second.encoded} of {len(files)} images")
            if turn:
                for way, seconds in zip(taken, (encoder, first.working, second.working)):
                    taken[way].append(seconds)
        about = machine()
    timings = {way: Timing(tuple(seconds)) for way, seconds in taken.items()}
    rows = [
        {
            "way": way,
            "images": timing.per_second(options.images),
            "share": None if way == AGAIN else timings[ENCODER].ratios(timing),
            "seconds": timing,
        }
        for way, timing in timings.items()
    ]
    columns = {"way": "way", "images": "images/s", "share": "of the encoder alone"}
    notes = [f"{options.images:,} images in batches of {options.batch}, {options.threads} threads"]
    return Report("indexing", columns, rows, about, notes)


def encode(model: DualEncoder, pixels: Tensor, batch: int) -> float:
    """Seconds that the image tower takes for pixels [N, 3, S, S]."""
    start = time.perf_counter()
    with model.inference():
        for part in pixels.split(batch):
            model.encode_images(part)
    return time.perf_counter() - start


def index(photos: Path, out: Path, model: str, options: Options) -> IndexResult:
    return build_index(
        str(photos),
        out,
        model=model,
        text_encoder=False,
        batch=options.batch,
        workers=options.workers,
        threads=options.threads,
        device="cpu",
    )
