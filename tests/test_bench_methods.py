"""`hnclip bench methods` and `method_runs` in miniature: every row is there, ratios are those of the times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from hnclip.bench import open_benchmark
from hnclip.objectives.registry import METHOD_CHOICES, METHODS


def test_methods_take_a_step_each() -> None:
    module = open_benchmark("methods")
    names = ("plain", "hn_clip", "finelip", "goal", "structxlip", "lora")
    options = module.Options(model="small", micro_batch=2, methods=names, turns=1, memory=False, images=1)
    found = json.loads(json.dumps(module.run(options).to_dict(), allow_nan=False))
    rows = {row["method"]: row for row in found["rows"]}
    assert tuple(rows) == names
    for row in rows.values():
        assert row["times"] == pytest.approx(row["seconds"]["median"] / rows["plain"]["seconds"]["median"])
        assert row["over"] == pytest.approx(row["seconds"]["median"] / rows["hn_clip"]["seconds"]["median"])
        assert row["images"] == pytest.approx(2 / row["seconds"]["median"])
    assert {name: row["official"] for name, row in rows.items() if row["official"]} == {"goal": 2.4, "structxlip": 5.4}
    inputs = {name: row["inputs"] for name, row in rows.items()}
    assert inputs["hn_clip"] == inputs["finelip"] == inputs["lora"] == "none"
    assert (inputs["goal"], inputs["structxlip"]) == ("1 image, 1 text", "3 images, 1 text")
    assert rows["structxlip"]["prepare"] > rows["goal"]["prepare"] > 0
    assert rows["hn_clip"]["prepare"] is None


def test_wrong_names_are_said() -> None:
    module = open_benchmark("methods")
    with pytest.raises(ValueError, match="there is no method 'gaol'"):
        module.run(module.Options(methods=("plain", "hn_clip", "gaol")))
    with pytest.raises(ValueError, match="the ratios need plain and hn_clip"):
        module.run(module.Options(methods=("plain", "goal")))
    with pytest.raises(ValueError, match="model must be one of"):
        module.run(module.Options(model="huge"))


def test_runs_differ_in_the_method_and_the_global_term_alone() -> None:
    module = open_benchmark("method_runs")
    made = module.configurations(module.Options(gamma=0.3, epochs=7, cluster=4))
    assert {name for name, _ in made} == {"plain", *METHOD_CHOICES}
    assert [term for name, term in made if name == "finelip"] == ["none", "infonce", "hn"]
    for (name, term), config in made.items():
        assert (config.objective.global_loss, config.optim.epochs, config.cluster) == (term, 7, 4)
        assert config.objective.gamma == 0.3
        assert config.objective.method == (name if name in METHODS else "hn_clip")
        assert ("hn" in dict.fromkeys(t for n, t in made if n == name)) is True


def test_two_runs_beside_their_start(model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(60):
        Image.new("RGB", (48, 48), (4 * number, 100, 255 - 4 * number)).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(f"a park with {number} trees and {60 - number} birds")
    module = open_benchmark("method_runs")
    options = module.Options(
        model=str(model_directory),
        data=str(images),
        methods=("plain",),
        epochs=1,
        cluster=0,
        runs=tmp_path / "runs",
        device="cpu",
    )
    found = module.run(options).to_dict()["rows"]
    assert [(row["method"], row["term"]) for row in found] == [
        ("before training", "–"),
        ("plain", "infonce"),
        ("plain", "hn"),
    ]
    assert all(0 <= row["validation_t2i"] <= 100 and 0 <= row["train_i2t"] <= 100 for row in found)
    assert "validation_t2i_change" not in found[0]
    assert found[1]["validation_t2i_change"].count("[") == 1
    caplog.set_level("INFO", logger="hnclip")
    module.run(options)
    assert sum("finished already" in line for line in caplog.messages) == 2
