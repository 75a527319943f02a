"""Bulk encoding, pictures with long captions per second: one process, two partitions, and a straightforward loop.

Pictures are JPEGs of 640 × 480 pixels, captions have lengths like those of DOCCI, and all ways write their vectors to
disk. The straightforward loop decodes a batch with Pillow, pads its captions to the model's context, encodes, and goes
on. Every way has processes of its own that have opened model and data before its turn; they take turns, and the clock
on the wall runs from the order to the last file.
"""

from __future__ import annotations

import csv
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hnclip.search.embeddings import open_embeddings
from hnclip.search.encode import Encoder
from hnclip.search.shards import claim
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from hnclip.config import ReadConfig
from hnclip.data.images import preprocess_image
from hnclip.measure import Report, gemm_rate, machine, threads, time_ways
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.options import Encode, Opening

log = logging.getLogger("hnclip.bench")

SHARD = 64
LOOP, ONE, HALF, TWO = "loop", "one", "half", "two"


@dataclass(frozen=True)
class Options:
    """Speed of `hnclip encode`."""

    records: int = 128
    """Pictures, each with one caption; a multiple of 128 gives both partitions the same work."""
    model: str | None = None
    """Any model that `hnclip encode` takes; when left out one of random weights, of `layers` and `width`."""
    layers: int = 6
    width: int = 384
    batch: int = 16
    turns: int = 3
    """Repetitions; the median counts."""
    threads: int = torch.get_num_threads()
    """Of one process; two partitions have half of them each."""


def run(options: Options) -> Report:
    with tempfile.TemporaryDirectory() as place, ExitStack() as open_processes:
        folder = Path(place)
        data = make_data(folder / "data", options.records)
        log.info("making the model")
        name = options.model or make_model(folder / "model", options)
        given = {"data": str(data), "model": name, "batch": options.batch, "threads": options.threads}
        half = {**given, "threads": max(1, options.threads // 2)}
        plans = {
            LOOP: [{**given, "way": "loop"}],
            ONE: [given],
            HALF: [half],
            TWO: [{**half, "partition": f"{number}/2"} for number in range(2)],
        }
        log.info("opening model and data in 5 processes")
        processes = {way: [Worker(plan) for plan in parts] for way, parts in plans.items()}
        for workers in processes.values():
            for worker in workers:
                open_processes.callback(worker.close)
                worker.wait()
        turn = 0

        def begin() -> None:
            nonlocal turn
            turn += 1
            log.info(f"turn {turn} of {options.turns + 1}")

        def work(way: str) -> None:
            together(processes[way], folder / f"{way}-{turn}")

        ways = {way: partial(work, way) for way in processes}
        taken = time_ways(ways, turns=options.turns, warmup=1, prepare=begin)
        same = compare(folder, turn)
        model = load(name)
        lengths = [len(row) for row in model.text_transform(captions(data))]
        with threads(options.threads):
            rate = gemm_rate()
            flops = needed_flops(model, lengths)
            about = machine()
    titles = {
        LOOP: f"straightforward loop, {options.threads} threads",
        ONE: f"hnclip encode, 1 process of {options.threads} threads",
        HALF: f"hnclip encode, 1 process of {half['threads']} threads",
        TWO: f"hnclip encode, 2 partitions of {half['threads']} threads",
    }
    rows = [
        {
            "way": title,
            "pairs": taken[way].per_second(options.records),
            "loop": taken[LOOP].ratios(taken[way]),
            "one": taken[ONE].ratios(taken[way]),
            "share": flops / taken[way].median / rate,
            "seconds": taken[way],
        }
        for way, title in titles.items()
    ]
    columns = {"way": "way", "pairs": "pairs/s", "loop": "× loop", "one": "× one process", "share": "of GEMM rate"}
    efficiency = taken[HALF].ratio(taken[TWO]) / 2
    tokens = sum(lengths)
    ordered, as_given = (padded_places(lengths, options.batch, ordered=way) / tokens for way in (True, False))
    notes = [
        f"two partitions do {efficiency:.0%} of twice the work of one process with as many threads as each of them",
        f"places in padded batches per token: {ordered:.2f} by length, {as_given:.2f} as captions come, "
        f"{model.context * len(lengths) / tokens:.2f} at the context; captions have {tokens / len(lengths):.0f} tokens",
        f"GEMM rate {rate / 1e9:.0f} Gflop/s; a pair needs {flops / options.records / 1e9:.1f} Gflop, without pads",
        f"partitions and one process wrote {'the same bytes' if same.bytes else 'DIFFERENT bytes'}; the loop's vectors "
        f"differ by {same.largest:.1e} at most",
    ]
    return Report("encode", columns, rows, about, notes)


class Worker:
    """A process that has opened everything and makes its part of the work whenever it is told where to write."""

    def __init__(self, plan: dict[str, Any]) -> None:
        command = [sys.executable, __file__, json.dumps(plan)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def order(self, out: Path) -> None:
        assert self._process.stdin is not None
        print(out, file=self._process.stdin, flush=True)

    def wait(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError("a process of the benchmark failed, see above")

    def close(self) -> None:
        self._process.communicate()


def together(workers: Sequence[Worker], out: Path) -> None:
    for worker in workers:
        worker.order(out)
    for worker in workers:
        worker.wait()


def serve(plan: dict[str, Any]) -> None:
    """The life of a worker: "done" for every line that it was given, and once when it is ready."""
    torch.set_num_threads(plan["threads"])
    given = Encode(
        data=plan["data"],
        out=Path(),
        opening=Opening(),
        read=ReadConfig(),
        model=plan["model"],
        batch=plan["batch"],
        shard_size=SHARD,
        partition=plan.get("partition", "0/1"),
        device="cpu",
    )
    encoder = Encoder(given)
    print("done", flush=True)
    for line in sys.stdin:
        encoder.options = replace(given, out=Path(line.strip()))
        if plan.get("way") == "loop":
            straightforward_loop(encoder)
        else:
            part, parts = given.part
            claim(encoder.options.out, encoder.job)
            for number in range(part, encoder.job.shards, parts):
                encoder.make(number, lambda count: None)
            encoder.finish()
        print("done", flush=True)


def straightforward_loop(encoder: Encoder) -> None:
    """What one writes in five minutes."""
    model, records, batch = encoder.model, encoder.data.records, encoder.options.batch
    images, texts = [], []
    with torch.no_grad():
        for start in range(0, len(records), batch):
            part = records[start : start + batch]
            pixels = torch.stack([preprocess_image(record.image.load(), model.image_transform) for record in part])
            images.append(model.encode_images(pixels).vectors)  # [B, D]
            ids = model.text_transform([record.captions[0] for record in part])
            padded = torch.full((len(part), model.context), model.text_transform.pad)  # [B, T]
            for row, tokens in enumerate(ids):
                padded[row, : len(tokens)] = torch.tensor(tokens)
            found = model.backbone.get_text_features(input_ids=padded)
            texts.append(torch.nn.functional.normalize(getattr(found, "pooler_output", found), dim=-1))  # [B, D]
    encoder.options.out.mkdir()
    np.save(encoder.options.out / "images.npy", torch.cat(images).numpy())
    np.save(encoder.options.out / "captions.npy", torch.cat(texts).numpy())


@dataclass(frozen=True)
class Same:
    bytes: bool
    largest: float


def compare(folder: Path, turn: int) -> Same:
    """Whether the last turn of all ways gave the same."""
    one, two, half = (open_embeddings(folder / f"{way}-{turn}", check=True) for way in (ONE, TWO, HALF))
    assert one.images is not None
    assert one.captions is not None
    found = {"images.npy": one.images[:], "captions.npy": one.captions[:]}
    loop = {name: np.load(folder / f"{LOOP}-{turn}" / name) for name in found}
    return Same(
        two.manifest["shards"] == half.manifest["shards"],  # with the checksums of all files
        float(max(np.abs(loop[name] - found[name]).max() for name in found)),
    )


def make_data(folder: Path, records: int) -> Path:
    """Smooth noise as pictures, and captions of 20 to 200 words, 123 in the middle, as in DOCCI."""
    random = np.random.default_rng(0)
    folder.mkdir()
    words = [
        "a",
        "the",
        "red",
        "house",
        "with",
        "small",
        "white",
        "tree",
        "in",
        "left",
        "corner",
        "stands",
    ]  # a token each
    with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "caption"])
        for number in range(records):
            coarse = Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8))
            coarse.resize((640, 480), Image.Resampling.BICUBIC).save(folder / f"{number:05}.jpg", quality=90)
            length = int(np.clip(np.exp(random.normal(np.log(123), 0.35)), 20, 200))
            rows.writerow([f"{number:05}.jpg", f"{number} {' '.join(random.choice(words, length))}"])
    return folder / "pairs.csv"


def captions(data: Path) -> list[str]:
    with data.open(newline="", encoding="utf-8") as file:
        return [row["caption"] for row in csv.DictReader(file)]


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


def padded_places(lengths: Sequence[int], batch: int, *, ordered: bool) -> int:
    """Places in batches that are padded to their longest caption; no batch reaches over a shard."""
    shards = [lengths[start : start + SHARD] for start in range(0, len(lengths), SHARD)]
    shards = [sorted(shard) for shard in shards] if ordered else shards
    parts = [shard[start : start + batch] for shard in shards for start in range(0, len(shard), batch)]
    return sum(max(part) * len(part) for part in parts)


def needed_flops(model: DualEncoder, lengths: Sequence[int]) -> float:
    """Multiplications and additions for the pictures and for the tokens there are, by counting a picture and two
    captions; in between they grow nearly evenly with the length."""

    def count(work: Callable[[], object]) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            work()
        return counter.get_total_flops()

    pixels = torch.zeros((1, 3, model.image_size, model.image_size), dtype=torch.uint8)
    ends = [min(lengths), max(lengths)]
    texts = ["photo " * (length - 2) for length in ends]
    tokenized = [model.tokenize([text]) for text in texts]
    costs = [count(partial(model.encode_texts, text)) for text in tokenized]
    found = [text.ids.shape[1] for text in tokenized]
    return len(lengths) * count(lambda: model.encode_images(pixels)) + float(np.interp(lengths, found, costs).sum())


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
