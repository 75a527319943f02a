"""Training options that studies brought along: what is watched, and duplicates that are negatives."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from study_data import write_pairs

from hnclip.config import ObjectiveConfig, OptimConfig, RunOptions, TrainConfig
from hnclip.models.load import load
from hnclip.training.log import read_metrics
from hnclip.training.runs import train

INFONCE = ObjectiveConfig(global_loss="infonce", token_weight=0.0)
COUNTS = {"train": 8, "validation": 8, "test": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("watched") / "data", counts=COUNTS)


def trained(data: Path, out: Path, **changes: object) -> Path:
    optim = OptimConfig(epochs=2, micro_batch=8, accumulate=1, lr=1e-3, precision="fp32")
    config = replace(TrainConfig(data=str(data), objective=INFONCE, optim=optim), **changes)  # type: ignore[arg-type]
    return train(config, RunOptions(out=out, threads=1, device="cpu")).out


def weights(run: Path) -> bytes:
    return (run / "best/model.safetensors").read_bytes() + (run / "last/model.safetensors").read_bytes()


def test_watching_logs_every_epoch_and_changes_nothing(data: Path, tmp_path: Path) -> None:
    plain, watching = trained(data, tmp_path / "plain"), trained(data, tmp_path / "watching", watch=str(data))
    assert weights(plain) == weights(watching)
    assert not read_metrics(plain, "watched")
    watched = read_metrics(watching, "watched")
    assert [entry["epoch"] for entry in watched] == [0, 1, 2]
    assert all(entry["data"] == str(data) for entry in watched)
    assert all(entry["text_to_image"]["queries"] == COUNTS["test"] for entry in watched)
    results = [json.loads((run / "result.json").read_text(encoding="utf-8")) for run in (plain, watching)]
    assert results[0]["best"] == results[1]["best"]


def test_without_doubles_masking_changes_no_bit(data: Path, tmp_path: Path) -> None:
    literal = replace(INFONCE, mask_duplicates=False)
    assert weights(trained(data, tmp_path / "masked")) == weights(trained(data, tmp_path / "all", objective=literal))


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_unmasked_duplicates_are_negatives(data: Path, tmp_path: Path, gamma: float) -> None:
    """The first step is the loss that the paper writes, with the copies of a caption among the negatives."""
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    for row in rows[1:4]:
        row["caption"] = rows[0]["caption"]
    doubled = data.parent / f"doubled-{gamma}.jsonl"
    doubled.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    objective = ObjectiveConfig(token_weight=0.0, gamma=gamma, mask_duplicates=False)
    run = trained(doubled, tmp_path / "run", objective=objective)
    first = read_metrics(run, "step")[0]

    from PIL import Image

    model = load("bundled").eval()
    pictures = [Image.open(data.parent / row["image"]) for row in rows[:8]]
    with torch.no_grad():
        image = model.encode_images(model.preprocess_images(pictures)).vectors.double()
        text = model.encode_texts(model.tokenize([row["caption"] for row in rows[:8]])).vectors.double()
    scale, alike = float(model.scale.detach()), text @ text.T
    total = 0.0
    for scores in (image @ text.T, text @ image.T):
        for i in range(8):
            boosted = [float(scores[i, j]) + (gamma * float(alike[i, j]) if i != j else 0.0) for j in range(8)]
            total += math.log(sum(math.exp(scale * (value - max(boosted))) for value in boosted))
            total += scale * (max(boosted) - boosted[i])
    assert first["loss"] == pytest.approx(total / 16, rel=1e-3)
    assert len(read_metrics(run, "step")) == 2  # one batch an epoch: copies share it

    masked = trained(doubled, tmp_path / "masked", objective=replace(objective, mask_duplicates=True))
    assert read_metrics(masked, "step")[0]["loss"] != pytest.approx(first["loss"], rel=1e-3)
