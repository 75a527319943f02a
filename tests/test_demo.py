"""The demo from end to end, with a small model and few pairs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import hnclip.demo as demo_module
import hnclip.training.data as run_data
from hnclip.config import TrainConfig
from hnclip.core import Record
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.demo import HN, INFONCE, ZERO_SHOT, demo
from hnclip.recipes import demo as demo_recipe
from hnclip.recipes import tiny


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, model_directory: Path):
    sizes = {"train": 4, "validation": 3, "test": 6}

    def open_records(source: str, split: str) -> list[Record]:
        return scene_records("park", split, families=sizes[split], members=4)

    def open_data(source: str, read: object, splits: object) -> DataSet:
        return DataSet(source, tuple(record for split in sizes for record in open_records(source, split)))

    def recipe(global_loss: str) -> TrainConfig:
        return replace(demo_recipe(global_loss), model=str(model_directory), optim=tiny().optim)

    monkeypatch.setattr(run_data, "open_data", open_data)
    monkeypatch.setattr(demo_module, "open_records", open_records)
    return recipe


def test_demo_measures_writes_and_can_be_repeated(small, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    found = demo(out, recipe=small).data
    assert list(found["metrics"]) == [ZERO_SHOT, INFONCE, HN]
    for metrics in found["metrics"].values():
        low, high = metrics["text_to_image"]["R@1_interval"]
        assert low <= metrics["text_to_image"]["R@1"] <= high
    assert [one["direction"] for one in found["comparisons"]] == ["text_to_image", "image_to_text"]
    for one in found["comparisons"]:
        a, b = (found["metrics"][name][one["direction"]]["R@1"] for name in (HN, INFONCE))
        assert (one["recall_a"], one["recall_b"]) == (a, b)
        assert one["difference"]["mean"] == pytest.approx(a - b, abs=1e-6)
    assert (out / "report.html").read_text(encoding="utf-8").count("<img") == 3
    assert len(list(out.glob("*.png"))) == 3
    assert json.loads((out / "report.json").read_text(encoding="utf-8")) == json.loads(json.dumps(found))
    assert sum(found["counts"].values()) == 24

    stamp = (out / "hn-clip" / "result.json").stat().st_mtime_ns
    assert demo(out, recipe=small).data == found
    assert (out / "hn-clip" / "result.json").stat().st_mtime_ns == stamp  # the finished runs were reused
    with pytest.raises(ValueError, match="other settings"):
        demo(out, seed=7, recipe=small)
