"""Time of `hnclip search INDEX "…"` as a new process: text queries by onnxruntime or by torch.

One folder is indexed twice, with the text tower in the index and with `--no-text-encoder`, where torch encodes queries.
Both take turns with a process that only imports numpy, onnxruntime and tokenizers, the lower bound of the first. The
tower long-clip-l has the size of that of Long-CLIP-L and random weights. All files are in the page cache.
"""

from __future__ import annotations

import json
import logging
import random
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from synthetic_index import write_model

from hnclip.data.scenes import scene_records
from hnclip.measure import Report, machine, time_ways
from hnclip.models.preprocessing import train_tokenizer
from hnclip.search.indexer import build_index

log = logging.getLogger("hnclip.bench")

PEER, ONNX, TORCH = "imports only (peer)", "text tower in the index", "--no-text-encoder (torch)"
SIZES = {"layers": 12, "width": 768, "context": 248}  # of the text tower of Long-CLIP-L
VOCABULARY = 49_408
COLUMNS = {
    "way": "way",
    "seconds": "seconds",
    "share": "of torch's",
    "imported": "imported",
    "same_hits": "torch's hits",
    "difference": "largest difference of scores",
}
PROBE = """
import json, sys
from hnclip.cli import main
status = main(sys.argv[1:])
print(json.dumps([name for name in ("torch", "transformers") if name in sys.modules]))
sys.exit(status)
"""


@dataclass(frozen=True)
class Options:
    """Time of a search in a new process."""

    tower: Literal["bundled", "long-clip-l"] = "bundled"
    """bundled, or long-clip-l: 123 M parameters with random weights, and a small image tower."""
    images: int = 64
    turns: int = 5
    """Repetitions; the median counts."""


def run(options: Options) -> Report:
    records = scene_records("park", "test", families=options.images // 4 + 1, members=4)[: options.images]
    searches: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as place:
        images, model = Path(place) / "images", "bundled"
        images.mkdir()
        for number, record in enumerate(records):
            record.image.load().save(images / f"{number}.png")
        if options.tower != "bundled":
            model = write_long_clip(Path(place) / "model")
        for way, text_encoder in ((ONNX, True), (TORCH, False)):
            log.info(f"index with {way}")
            index = Path(place) / f"{text_encoder}.hnc"
            build_index(str(images), index, model=model, text_encoder=text_encoder, device="cpu")
            searches[way] = ["search", str(index), records[0].captions[0], "-k", "5", "--json"]
        # What a search prints and imports; these runs also bring the files into the page cache.
        probed = {way: [json.loads(line) for line in python("-c", PROBE, *search)] for way, search in searches.items()}
        commands = {PEER: ["-c", "import numpy, onnxruntime, tokenizers"]}
        commands |= {way: ["-m", "hnclip", *search] for way, search in searches.items()}
        log.info(f"{options.turns} turns")
        ways: dict[str, Callable[[], object]] = {way: partial(python, *command) for way, command in commands.items()}
        taken = time_ways(ways, turns=options.turns, warmup=0)
        rows: list[dict[str, Any]] = []
        right = probed[TORCH][0]["hits"]
        for way, timing in taken.items():
            rows.append({"way": way, "seconds": timing, "share": timing.ratios(taken[TORCH])})
            if way in probed:
                hits, imported = probed[way][0]["hits"], probed[way][1]
                rows[-1] |= {
                    "imported": ", ".join(imported) or "neither",
                    "same_hits": [hit["name"] for hit in hits] == [hit["name"] for hit in right],
                    "difference": max(abs(own["score"] - hit["score"]) for own, hit in zip(hits, right)),
                }
    about = {**machine(), "tower": options.tower, "images": options.images}
    return Report("cold_search", COLUMNS, rows, about)


def python(*arguments: str) -> list[str]:
    """The lines that a new process prints; RuntimeError if it fails."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"python {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.splitlines()


def write_long_clip(directory: Path) -> str:
    """A model whose text tower and vocabulary are as large as those of Long-CLIP-L; returns its path."""
    letters = random.Random(0)
    words = ("".join(letters.choices(string.ascii_lowercase, k=8)) for _ in range(60_000))
    captions = (record.captions[0] for record in scene_records("park", "train", families=50))
    tokenizer = train_tokenizer([*captions, *words], VOCABULARY)
    return write_model(directory, tokenizer, text=SIZES, vision={"layers": 1, "width": 64, "patch": 32}, width=768)
