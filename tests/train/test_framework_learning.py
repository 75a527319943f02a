"""Each framework teaches the bundled model something in seconds, with its own global term and with L_HN: the pairs that
it was trained on are found better than before. What they learn about pairs that they have not seen takes minutes, and
is in docs/frameworks.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import hnclip.train.run_data as run_data
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.frameworks import PLUGS, plugged
from hnclip.recipes import demo
from hnclip.train.loop import train

PAIRS = 24


@pytest.mark.parametrize("term", ["own", "hn"])
@pytest.mark.parametrize("framework", PLUGS)
def test_training_pairs_are_found_better(
    framework: str, term: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = scene_records("park", "train", families=PAIRS // 4)
    known = tuple(
        replace(record, split=split, id=f"{split} {record.id}")
        for split in ("train", "validation")
        for record in records
    )
    monkeypatch.setattr(run_data, "open_data", lambda source, read, splits: DataSet(source, known))
    base = demo("infonce", out=tmp_path / "run")
    rates = {"lr": 3e-4, "readout_lr": 1e-3, "warmup": 0.0}
    base = replace(base, optim=replace(base.optim, epochs=5, micro_batch=PAIRS, accumulate=1, **rates), threads=1)
    config = plugged(base, framework)  # type: ignore[arg-type]
    if term == "hn":
        config = replace(config, objective=replace(config.objective, global_loss="hn"))
    said: list[str] = []
    result = train(config, quiet=True, report=said.append)
    (before,) = [line for line in said if line.startswith("before training")]
    recalls = [float(word.strip(",")) for word in before.split() if word.strip(",").replace(".", "").isdigit()]
    zero_shot = sum(recalls) / 2
    print(framework, term, zero_shot, result.last["mean_R@1"], result.best["mean_R@1"], result.seconds)
    assert result.last["mean_R@1"] > zero_shot
