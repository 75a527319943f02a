"""The demo from end to end, with a small model and few pairs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import hnclip.demo as demo_module
import hnclip.train.loop as loop
from hnclip.config import TrainConfig
from hnclip.data.records import Record
from hnclip.data.scenes import scene_records
from hnclip.demo import HN, INFONCE, ZERO_SHOT, DemoResults, demo
from hnclip.evaluate import PairedDifference
from hnclip.recipes import demo as demo_recipe
from hnclip.recipes import tiny


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, model_directory: Path):
    sizes = {"train": 4, "validation": 3, "test": 6}

    def open_records(source: str, split: str) -> list[Record]:
        return scene_records("park", split, families=sizes[split])

    def recipe(global_loss: str, out: Path) -> TrainConfig:
        config = demo_recipe(global_loss, out)
        return replace(config, model=str(model_directory), threads=1, device="cpu", optim=tiny().optim)

    monkeypatch.setattr(loop, "open_records", open_records)
    monkeypatch.setattr(demo_module, "open_records", open_records)
    return recipe


def test_demo_measures_writes_and_can_be_repeated(small, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    found = demo(out, quiet=True, report=lambda _: None, recipe=small)
    assert list(found.metrics) == [ZERO_SHOT, INFONCE, HN]
    for metrics in found.metrics.values():
        low, high = metrics["text_to_image"]["R@1_interval"]
        assert low <= metrics["text_to_image"]["R@1"] <= high
    for direction, difference in found.differences.items():
        apart = found.metrics[HN][direction]["R@1"] - found.metrics[INFONCE][direction]["R@1"]
        assert difference.mean == pytest.approx(apart, abs=1e-6)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<img") == 3
    stored = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert stored["metrics"] == json.loads(json.dumps(found.metrics))
    assert sum(stored["counts"].values()) == 24

    stamp = (out / "hn-clip" / "result.json").stat().st_mtime_ns
    assert demo(out, quiet=True, report=lambda _: None, recipe=small).metrics == found.metrics
    assert (out / "hn-clip" / "result.json").stat().st_mtime_ns == stamp  # the finished runs were reused
    with pytest.raises(ValueError, match="other settings"):
        demo(out, seed=7, quiet=True, report=lambda _: None, recipe=small)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.0, 5.0, "HN-CLIP is better"), (-5.0, -1.0, "InfoNCE is better"), (-1.0, 2.0, "no clear difference")],
)
def test_a_difference_counts_only_beyond_its_interval(low: float, high: float, verdict: str) -> None:
    difference = PairedDifference(mean=(low + high) / 2, low=low, high=high, p_value=0.5)
    results = DemoResults(metrics={}, differences={"text_to_image": difference}, epochs={}, report=Path("x"))
    assert results.findings() == [
        f"text→image: HN-CLIP minus InfoNCE {(low + high) / 2:+.1f} points of R@1 [{low:+.1f}, {high:+.1f}]: {verdict}"
    ]
