"""Bulk encoding, pairs per second: `hnclip encode` against the encoder alone, two partitions, and a plain loop.

Images are JPEGs of 640 × 480 pixels, captions have lengths like those of DOCCI. "Encoder alone" has preprocessed images
and token ids in memory and writes nothing: the upper bound. The plain loop decodes a batch, pads its captions
to the model's context, encodes and continues. Model and data are opened before the clock starts, except by the two
partitions, which are processes of their own and start it together when both are ready.
"""

from __future__ import annotations

import csv
import json
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hnclip.data.images import preprocess_image
from hnclip.encode.embeddings import open_embeddings
from hnclip.encode.loop import encode_captions, encode_pixels
from hnclip.encode.shards import Encoder, EncodeSettings
from hnclip.measure import Report, machine, threads, time_ways
from hnclip.models.load import load

log = logging.getLogger("hnclip.bench")

SHARD = 64
WORDS = ("a", "the", "red", "house", "with", "small", "white", "tree", "in", "left", "corner", "stands")  # a token each


@dataclass(frozen=True)
class Options:
    """Speed of `hnclip encode`."""

    records: int = 128
    """Images, each with one caption; a multiple of 128 gives both partitions the same work."""
    model: str | None = None
    """Any model that `hnclip encode` takes; if not given, one of random weights, of `layers` and `width`."""
    layers: int = 6
    width: int = 384
    batch: int = 16
    turns: int = 3
    """Repetitions; the median counts."""
    threads: int = torch.get_num_threads()
    """Of one process; two partitions have half of them each."""


def run(options: Options) -> Report:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack, threads(options.threads):
        folder = Path(place)
        name = options.model or make_model(folder / "model", options)
        plan = {"data": str(make_data(folder / "data", options.records)), "model": name, "batch": options.batch}
        half = {**plan, "threads": max(1, options.threads // 2)}
        log.info("opening model and data")
        partitions = [stack.enter_context(Worker({**half, "partition": (part, 2)})) for part in range(2)]
        encoder = open_encoder(plan, folder / "one")
        ways: dict[str, Callable[[], object]] = {
            "encoder alone": encoder_alone(encoder),
            "hnclip encode": lambda: encode_part(encoder, folder / "one"),
            f"hnclip encode, 2 partitions of {half['threads']} threads": lambda: together(partitions, folder / "two"),
            "plain loop": lambda: plain_loop(encoder, folder / "loop"),
        }
        taken = time_ways(ways, turns=options.turns, warmup=1)
        one, two = (open_embeddings(folder / out, verify=True) for out in ("one", "two"))
        same = [shard["files"] for shard in one.manifests] == [shard["files"] for shard in two.manifests]
        loop = {out: np.load(folder / "loop" / f"{out}.npy") for out in ("images", "captions")}
        largest = max(
            np.abs(loop["images"] - np.concatenate(one.images)).max(),
            np.abs(loop["captions"] - np.concatenate(one.captions)).max(),
        )
        about = machine()
    alone = taken["encoder alone"]
    rows = [
        {"way": way, "pairs": found.per_second(options.records), "share": alone.ratios(found), "seconds": found}
        for way, found in taken.items()
    ]
    notes = [f"the vectors of the plain loop differ by {largest:.1e} at most"]
    if half["threads"] == options.threads:
        notes.append(f"two partitions and one process wrote {'the same' if same else 'DIFFERENT'} bytes")
    columns = {"way": "way", "pairs": "pairs/s", "share": "of the encoder alone"}
    return Report("encode", columns, rows, about, notes)


def open_encoder(plan: dict[str, Any], out: Path) -> Encoder:
    return Encoder(
        EncodeSettings(plan["data"], out, plan["model"], batch=plan["batch"], shard_size=SHARD, device="cpu")
    )


def encode_part(encoder: Encoder, out: Path, part: int = 0, parts: int = 1) -> None:
    """The shards of a partition, into an empty directory unless another partition writes there."""
    if parts == 1:
        shutil.rmtree(out, ignore_errors=True)
    encoder.out, encoder.settings = out, replace(encoder.settings, out=out)
    for number in range(part, encoder.job["shards"], parts):
        encoder.write(number)
    encoder.finish()


def encoder_alone(encoder: Encoder) -> Callable[[], object]:
    model, batch = encoder.model, encoder.settings.batch
    pixels = torch.stack([preprocess_image(row.image.load(), model.image_transform) for row in encoder.data.records])
    tokens = model.text_transform([record.captions[0] for record in encoder.data.records])
    return lambda: (encode_pixels(model, pixels, batch=batch), encode_captions(model, tokens, batch=batch))


def plain_loop(encoder: Encoder, out: Path) -> None:
    """What one writes in five minutes."""
    model, records, batch = encoder.model, encoder.data.records, encoder.settings.batch
    images, texts = [], []
    with model.inference():
        for start in range(0, len(records), batch):
            part = records[start : start + batch]
            pixels = torch.stack([preprocess_image(record.image.load(), model.image_transform) for record in part])
            images.append(model.encode_images(pixels).vectors)  # [B, D]
            padded = torch.full((len(part), model.context), model.text_transform.pad)  # [B, T]
            for row, tokens in enumerate(model.text_transform([record.captions[0] for record in part])):
                padded[row, : len(tokens)] = torch.from_numpy(tokens)
            found = model.backbone.get_text_features(input_ids=padded).pooler_output
            texts.append(torch.nn.functional.normalize(found, dim=-1))  # [B, D]
    out.mkdir(exist_ok=True)
    np.save(out / "images.npy", torch.cat(images).numpy())
    np.save(out / "captions.npy", torch.cat(texts).numpy())


class Worker:
    """A process that has opened everything and encodes its partition whenever it is told where to write."""

    def __init__(self, plan: dict[str, Any]) -> None:
        command = [sys.executable, __file__, json.dumps(plan)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Worker:
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def order(self, out: Path) -> None:
        assert self._process.stdin is not None
        print(out, file=self._process.stdin, flush=True)

    def wait(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError("a process of the benchmark failed, see above")


def together(workers: list[Worker], out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    for worker in workers:
        worker.order(out)
    for worker in workers:
        worker.wait()


def serve(plan: dict[str, Any]) -> None:
    """A worker: prints "done" when it is ready, and after every directory that it has written to."""
    torch.set_num_threads(plan["threads"])
    with tempfile.TemporaryDirectory() as place:
        encoder = open_encoder(plan, Path(place) / "out")
        print("done", flush=True)
        for line in sys.stdin:
            encode_part(encoder, Path(line.strip()), *plan["partition"])
            print("done", flush=True)


def make_data(folder: Path, records: int) -> Path:
    """Smooth noise as images, and captions of 20 to 200 words, 123 in the middle, as in DOCCI."""
    random = np.random.default_rng(0)
    folder.mkdir()
    with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "caption"])
        for number in range(records):
            coarse = Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8))
            coarse.resize((640, 480), Image.Resampling.BICUBIC).save(folder / f"{number:05}.jpg", quality=90)
            length = int(np.clip(np.exp(random.normal(np.log(123), 0.35)), 20, 200))
            rows.writerow([f"{number:05}.jpg", f"{number} {' '.join(random.choice(WORDS, length))}"])
    return folder / "pairs.csv"


def make_model(directory: Path, options: Options) -> str:
    """A CLIP of random weights with patches of 32 pixels and the bundled tokenizer, 248 tokens long."""
    from transformers import CLIPConfig, CLIPModel

    from hnclip.models.load import save, wrap

    tokenizer = load().tokenizer
    tower = {
        "hidden_size": options.width,
        "intermediate_size": 4 * options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.width // 64,
    }
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = CLIPConfig(
        projection_dim=512,
        text_config={**tower, **special, "vocab_size": len(tokenizer), "max_position_embeddings": 248},
        vision_config={**tower, "image_size": 224, "patch_size": 32},
    )
    torch.manual_seed(0)
    save(wrap(CLIPModel(config), tokenizer), directory)
    return str(directory)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
