"""The script that makes the bundled model, in one step of each stage."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from hnclip.models.load import load

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_bundled.py"


@pytest.mark.slow
def test_the_script_writes_a_long_model_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path), "--steps", "1"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    model = load(str(tmp_path / "model"))
    assert model.context == 248
    assert model.scale.item() == pytest.approx(100, abs=0.01)
    log = [json.loads(line) for line in (tmp_path / "pretrain.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(entry["step"] == 1 and entry["loss"] > 0 for entry in log)
    assert {"park_R@1", "shelf_hardest"} <= log[-1].keys()
