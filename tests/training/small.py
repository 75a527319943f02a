"""Small models, batches, data, runs, and real processes (gloo) for the tests of training."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing import start_processes

from hnclip.config import OptimConfig, RunOptions, TrainConfig
from hnclip.core import NegativePairs, Record
from hnclip.data.batching import prepare
from hnclip.data.images import ImageTransform
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.data.texts import TextTransform
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, wrap
from hnclip.models.preprocessing import train_tokenizer
from hnclip.training.distributed import process_group
from hnclip.training.log import read_metrics
from hnclip.training.memory import PairMemory
from hnclip.training.runs import train
from hnclip.training.trainer import Trainer, TrainResult

PAIRS = 11
# Rows 0 and 5 have one image, rows 2 and 9 one caption.
DUPLICATES = torch.tensor([[i if i != 5 else 0, i if i != 9 else 2] for i in range(PAIRS)])


def small_batch():
    """Eleven scenes, shortest caption first, with frozen caption embeddings, and a tokenizer of their captions."""
    records = sorted(scene_records("park", "train", families=3, members=4)[:PAIRS], key=lambda r: len(r.captions[0]))
    tokenizer = train_tokenizer([record.captions[0] for record in records], 700)
    data = prepare(records, TextTransform(tokenizer, 200), ImageTransform(16))
    margins = F.normalize(torch.randn(PAIRS, 6, generator=torch.Generator().manual_seed(3)).double(), dim=1)
    return replace(replace(data, margin_text=margins).batch(range(PAIRS)), ids=DUPLICATES), tokenizer


def small_encoder(tokenizer, *, dropout=0.0, dtype=torch.float64):
    """A two-layer CLIP, always with the same weights, in training mode."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 200,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = CLIPConfig(
        projection_dim=16,
        text_config={**tower, **words, "attention_dropout": dropout},
        vision_config={**tower, "image_size": 16, "patch_size": 8, "attention_dropout": dropout},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        clip = CLIPModel(config)
        for parameter in clip.parameters():  # the usual weights are so small that a wrong gradient would hide
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.2)
    return wrap(clip, tokenizer, ImageTransform(16, mean=(0.5,) * 3, std=(0.3,) * 3)).to(dtype).train()


def small_memory(batch, size, count):
    """A memory with the first `count` pairs of the batch, as another encoder sees them, and its vectors."""
    g = torch.Generator().manual_seed(9)
    image, text = (F.normalize(torch.randn(count, 16, generator=g).double(), dim=1) for _ in range(2))
    pairs = NegativePairs(image, text, batch.ids[:count], batch.margin_text[:count])
    return PairMemory(size, pairs, torch.arange(count)), image, text


def gradients(model, step):
    """What `step` leaves in every parameter, and what it returns."""
    model.zero_grad(set_to_none=True)
    result = step()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}, result


def assert_same(found, expected, atol=1e-12):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


# Processes ----------------------------------------------------------------------------------------------------

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["transformers.models.clip.modeling_clip", "hnclip.training.runs", "peft"])


def run_processes(world: int, work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """The results of `work(rank, *arguments)` in `world` processes with the environment of torchrun. If one of them
    fails, the others are killed."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    start_processes(_one, (shared, work, folder, arguments), nprocs=world, start_method="forkserver")
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world)]


def _one(rank: int, shared: dict[str, str], work: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    os.environ.update({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    (folder / str(rank)).write_bytes(pickle.dumps(work(rank, *arguments)))


# Runs ---------------------------------------------------------------------------------------------------------


@cache
def scenes(families: int = 8) -> DataSet:
    """Pairs of `families` families of four for training, some without regions, some with one; 20 for validation."""
    train, validation = (
        scene_records("park", split, families=n, members=4) for split, n in (("train", families), ("validation", 5))
    )

    def with_fewer_regions(row: int, record: Record) -> Record:
        return replace(record, regions=record.regions[: row % 4]) if row % 4 < 2 else record

    return DataSet("scenes/park", (*(with_fewer_regions(*found) for found in enumerate(train)), *validation))


def config_for(model: Path | str, *, optim: dict | None = None, **changes: object) -> TrainConfig:
    chosen = {"epochs": 2, "micro_batch": 4, "accumulate": 2, "lr": 1e-3, "precision": "fp32", **(optim or {})}
    return replace(TrainConfig(model=str(model), optim=OptimConfig(**chosen)), **changes)  # type: ignore[arg-type]


def options_for(out: Path, **changes: object) -> RunOptions:
    """A checkpoint after every step."""
    return replace(RunOptions(out=out, device="cpu", threads=1, save_minutes=0.0), **changes)  # type: ignore[arg-type]


class Stop(Exception):
    """A run that ends here."""


def stop_at(step: int, run: Callable[..., Any], *arguments: Any, **others: Any) -> None:
    """End the run in this step, before its checkpoint is written."""

    def on_step(done: int) -> None:
        if done == step:
            raise Stop

    with pytest.raises(Stop):
        run(*arguments, **{"data": scenes(), **others}, on_step=on_step)


class ExactTrainer(Trainer):
    """In float64 and without dropout: between numbers of processes only the order of sums differs."""

    def load_model(self) -> DualEncoder:
        model = load(**asdict(self.base)).double()
        for module in model.modules():
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        return model


def train_exactly(config: TrainConfig, options: RunOptions, **others: Any) -> TrainResult:
    with process_group("cpu"):
        return ExactTrainer(config, options, **{"data": scenes(), **others}).fit()


def train_scenes(config: TrainConfig, options: RunOptions, **others: Any) -> Path:
    return train(config, options, **{"data": scenes(), **others}).out


def steps(run: Path) -> list[dict[str, Any]]:
    """What is logged of every step, without times."""
    return [{**entry, "pairs_per_second": 0, "waited": 0} for entry in read_metrics(run, "step")]


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    (file,) = (run / name).glob("*.safetensors")
    return load_file(file)


def assert_same_weights(a: Path, b: Path) -> None:
    assert_same(weights(a), weights(b), atol=0)
