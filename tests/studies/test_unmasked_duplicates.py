"""The first step of a run in which duplicates are negatives of each other, against the formula of the paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from study_data import write_pairs

from hnclip.config import ObjectiveConfig, OptimConfig, RunOptions, TrainConfig
from hnclip.models.load import load
from hnclip.training.log import read_metrics
from hnclip.training.runs import train


def test_unmasked_duplicates_are_negatives(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "data", counts={"train": 8, "validation": 8})
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    for row in rows[1:4]:
        row["caption"] = rows[0]["caption"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    model, rows = load("bundled").eval(), rows[:8]
    with torch.no_grad():
        images = model.preprocess_images([Image.open(data.parent / row["image"]) for row in rows])
        image = model.encode_images(images).vectors.double()
        text = model.encode_texts(model.tokenize([row["caption"] for row in rows])).vectors.double()
    boost = 0.5 * (text @ text.T).fill_diagonal_(0)
    logits = [float(model.scale.detach()) * (scores + boost) for scores in (image @ text.T, text @ image.T)]
    expected = sum(-one.log_softmax(1).diagonal().mean().item() for one in logits) / 2
    losses = []
    for mask in (False, True):
        objective = ObjectiveConfig(token_weight=0.0, gamma=0.5, mask_duplicates=mask)
        optim = OptimConfig(epochs=1, micro_batch=8, accumulate=1, precision="fp32")
        options = RunOptions(out=tmp_path / str(mask), threads=1, device="cpu")
        run = train(TrainConfig(data=str(data), objective=objective, optim=optim), options)
        losses.append(read_metrics(run.out, "step")[0]["loss"])
    assert losses[0] == pytest.approx(expected, rel=1e-3)
    assert losses[1] != pytest.approx(expected, rel=1e-3)
