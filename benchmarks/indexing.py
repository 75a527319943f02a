"""Speed of `hnclip index` beside its encoder alone: pictures per second from JPEG files to an index, and from ready
pixels to vectors.

The pictures are JPEGs of 640 × 480 pixels, the model has random weights, by default in the shape of CLIP ViT-B/32. Both
ways take turns and encode batches of the same size. Of `hnclip index` the time from the first look at the folder to the
last commit counts, not that for opening the model. Then the same command runs again, with nothing to do: it looks at
every file and reads none.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from hnclip.config import Opening, ReadConfig
from hnclip.data.image_cache import load_images
from hnclip.data.image_sources import FileImage
from hnclip.measure import Report, Timing, machine, threads
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.search.build import build_index
from hnclip.search.options import IndexOptions

log = logging.getLogger("hnclip.bench")


@dataclass(frozen=True)
class Options:
    """Speed of `hnclip index`."""

    pictures: int = 512
    model: str | None = None
    """Any model that `hnclip index` takes; when left out one of random weights, of `layers` and `width`."""
    layers: int = 12
    width: int = 768
    patch: int = 32
    """Side of a patch, in pixels."""
    batch: int = 64
    workers: int = 0
    """Threads that read and decode; 0 for as many as processors."""
    tokens: bool = False
    """Keep the vectors of all patches too."""
    turns: int = 3
    """Repetitions; the median counts."""
    threads: int = torch.get_num_threads()
    """Of the encoder."""


def run(options: Options) -> Report:
    with tempfile.TemporaryDirectory() as place, threads(options.threads):
        folder = Path(place)
        log.info(f"writing {options.pictures} images")
        files = make_pictures(folder / "pictures", options.pictures)
        log.info("making the model")
        name = options.model or make_model(folder / "model", options)
        model = load(name).eval()
        pixels = load_images([FileImage(file) for file in files], model.image_transform, cache=None).pixels
        decoding = decoding_time(files, model)
        taken: dict[str, list[float]] = {"encoder": [], "index": [], "again": []}
        for turn in range(options.turns + 1):
            log.info(f"turn {turn + 1} of {options.turns + 1}")
            seconds = one_turn(model, pixels[:], name, folder, folder / f"{turn}.hnc", options)
            if turn:  # the first one warms up
                for way, spent in seconds.items():
                    taken[way].append(spent)
        about = machine()
    timings = {way: Timing(tuple(values)) for way, values in taken.items()}
    titles = {
        "encoder": "the encoder alone, pixels ready",
        "index": "hnclip index, JPEG files",
        "again": "hnclip index again, nothing to do",
    }
    rows = [
        {
            "way": title,
            "pictures": timings[way].per_second(options.pictures),
            "share": timings["encoder"].ratios(timings[way]),
            "seconds": timings[way],
        }
        for way, title in titles.items()
    ]
    columns = {"way": "way", "pictures": "pictures/s", "share": "× the encoder alone"}
    notes = [
        f"{options.pictures:,} pictures in batches of {options.batch}; to read, hash, decode, resize one and to make "
        f"its thumbnail takes a thread {1000 * decoding:.1f} ms, the encoder "
        f"{1000 * timings['encoder'].median / options.pictures:.1f} ms with {options.threads} threads",
    ]
    return Report("indexing", columns, rows, about, notes)


def one_turn(
    model: DualEncoder, pixels: torch.Tensor, name: str, folder: Path, out: Path, options: Options
) -> dict[str, float]:
    """Seconds of every way."""
    start = time.perf_counter()
    with torch.no_grad():
        for part in pixels.split(options.batch):
            model.encode_images(part, tokens=options.tokens)
    encoder = time.perf_counter() - start
    given = IndexOptions(
        data=str(folder / "pictures"),
        out=out,
        opening=Opening(),
        read=ReadConfig(),
        model=name,
        batch=options.batch,
        workers=options.workers,
        threads=options.threads,
        tokens=options.tokens,
        device="cpu",
    )
    first, second = (build_index(given) for _ in range(2))
    if (first.counts.encoded, second.counts.encoded) != (len(pixels), 0):
        raise RuntimeError(f"encoded {first.counts.encoded} and {second.counts.encoded} of {len(pixels)} pictures")
    return {"encoder": encoder, "index": first.working, "again": second.working}


def decoding_time(files: Sequence[Path], model: DualEncoder) -> float:
    """Seconds that a thread needs for a picture before it can be encoded."""
    from hnclip.search.indexing.pictures import Pictures
    from hnclip.search.indexing.source import IndexSource

    some = files[:32]
    names = [file.name for file in some]
    source = IndexSource("pictures", some[0].parent, names, {}, (), ())
    pictures = Pictures(source, {}, set(), model.image_transform)
    with threads(1):
        pictures.look(0)
        start = time.perf_counter()
        for number in range(1, len(some)):
            pictures.look(number)
        return (time.perf_counter() - start) / max(1, len(some) - 1)


def make_pictures(folder: Path, count: int) -> list[Path]:
    """Smooth noise, as JPEG files of 640 × 480 pixels."""
    random = np.random.default_rng(0)
    folder.mkdir()
    files = [folder / f"{number:06}.jpg" for number in range(count)]
    for file in files:
        coarse = Image.fromarray(random.integers(0, 256, (60, 80, 3), dtype=np.uint8))
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(file, quality=90)
    return files


def make_model(directory: Path, options: Options) -> str:
    """A CLIP of random weights with the bundled tokenizer; its text tower is small, no caption is encoded."""
    from transformers import CLIPConfig, CLIPModel

    from hnclip.models.load import save, wrap

    tokenizer = load().tokenizer
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = CLIPConfig(
        projection_dim=512,
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 77,
            **special,
        },
        vision_config={
            "hidden_size": options.width,
            "intermediate_size": 4 * options.width,
            "num_hidden_layers": options.layers,
            "num_attention_heads": max(1, options.width // 64),
            "image_size": 224,
            "patch_size": options.patch,
        },
    )
    torch.manual_seed(0)
    save(wrap(CLIPModel(config), tokenizer), directory)
    return str(directory)
