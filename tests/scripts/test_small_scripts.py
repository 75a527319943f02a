from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import joined_captions
import pytest

from hnclip.config import ReadConfig
from hnclip.data.sources import open_data
from hnclip.models.load import load


def line(number: int) -> str:
    return json.dumps({"image": f"{number}.jpg", "captions": [f"One {number} .", "Two", " "], "karpathy_split": "test"})


def test_hnclip_reads_the_file_and_splits_depend_on_names_alone(tmp_path) -> None:
    rows = joined_captions.prepare([line(n) for n in range(10)], validation=3, test=2)
    assert rows == joined_captions.prepare([line(n) for n in reversed(range(10))], validation=3, test=2)
    assert {row["caption"] for row in rows} == {f"One {n}. Two." for n in range(10)}
    (tmp_path / "in.jsonl").write_text("\n".join(map(line, range(10))))
    joined_captions.main(tmp_path / "in.jsonl", tmp_path / "out.jsonl", validation=3, test=2)
    data = open_data(str(tmp_path / "out.jsonl"), ReadConfig(images=str(tmp_path)))
    assert data.splits() == {"test": 2, "validation": 3, "train": 5}
    with pytest.raises(ValueError, match="same image"):
        joined_captions.prepare([line(1), line(1)], validation=0, test=1)


@pytest.mark.slow
def test_pretraining_writes_a_long_model_and_its_log(tmp_path, monkeypatch) -> None:
    """One step of each stage."""
    script = Path(joined_captions.__file__).with_name("pretrain_bundled.py")
    monkeypatch.setattr(sys, "argv", [str(script), "--out", str(tmp_path), "--steps", "1"])
    runpy.run_path(str(script), run_name="__main__")
    assert load(str(tmp_path / "model")).context == 248
    log = [json.loads(line) for line in (tmp_path / "pretrain.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(entry["step"] == 1 and entry["loss"] > 0 for entry in log)
