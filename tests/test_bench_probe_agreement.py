"""`hnclip bench probe_agreement`: one tiny setting from the pictures to the row, and what is said of many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hnclip.analysis.head_probe import Change, Fit
from hnclip.analysis.heads import HeadLoss
from hnclip.bench import open_benchmark
from hnclip.config import ReadConfig, TrainConfig, from_json
from hnclip.evaluate.bootstrap import Estimate
from hnclip.evaluate.ranks import Ranks

UP, DOWN, FLAT = Estimate(2.0, 1.0, 3.0), Estimate(-1.0, -2.0, -0.5), Estimate(0.5, -0.5, 1.5)


def change(estimate: Estimate) -> Change:
    return Change(estimate, estimate, estimate)


def fit(estimate: Estimate) -> Fit:
    return Fit(HeadLoss(0.5), 0.1, 1, 50.0, {}, change(estimate))


def test_one_setting_is_probed_and_fine_tuned_once(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(84):
        Image.new("RGB", (48, 48), (3 * number, 100, 255 - 3 * number)).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text(f"a park with {number} trees and {84 - number} birds")
    module = open_benchmark("probe_agreement")
    options = module.Options(
        model=(str(model_directory),),
        data=(str(pictures),),
        negatives=("batch",),
        gammas=(0.5,),
        seeds=(3,),
        epochs=1,
        freeze_image="all",
        read=ReadConfig(validation_share=0.2),
        limit=64,
        runs=tmp_path / "runs",
        device="cpu",
    )
    caplog.set_level("INFO", logger="hnclip")
    report = module.run(options)
    (row,) = json.loads(json.dumps(report.to_dict(), allow_nan=False))["rows"]
    assert set(module.COLUMNS) <= set(row)
    assert (row["negatives"], row["gamma"]) == ("batch", 0.5)
    assert row["probe"]["pairs"] == 64
    assert row["probe"]["settings"]["negatives"] == "batch"
    assert row["probe"]["settings"]["seeds"] == [3]
    for name in ("last", "best"):
        difference = row["hn_recall"][name][0] - row["infonce_recall"][name][0]
        assert row[f"{name}_change"]["mean"]["mean"] == pytest.approx(difference)
    runs = sorted((tmp_path / "runs").iterdir())
    assert [run.name.rsplit("-", 1)[0] for run in runs] == ["hn-0.5-batch-seed-3", "infonce-batch-seed-3"]
    hard, plain = (from_json(TrainConfig, (run / "config.json").read_text()) for run in runs)
    assert (hard.objective.global_loss, hard.objective.gamma, hard.objective.token_weight) == ("hn", 0.5, 0.0)
    assert plain.objective.global_loss == "infonce"
    assert plain.optim == hard.optim
    assert (plain.adapt.freeze_image, plain.limit, plain.seed) == ("all", 64, 3)

    monkeypatch.setattr("hnclip.train.loop.train", lambda *_, **__: pytest.fail("a finished run was trained again"))
    again = module.run(options).to_dict()["rows"]
    assert again[0]["last_change"] == row["last_change"]
    assert any("is finished already" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("predicted", "measured", "said"),
    [
        (UP, UP, "agree"),
        (DOWN, DOWN, "agree"),
        (UP, DOWN, "differ"),
        (FLAT, UP, "probe unclear"),
        (UP, FLAT, "run unclear"),
        (FLAT, FLAT, "probe and run unclear"),
    ],
)
def test_signs(predicted: Estimate, measured: Estimate, said: str) -> None:
    module = open_benchmark("probe_agreement")
    row = module.row(fit(predicted), {"last": change(measured), "best": change(UP)})
    assert row["signs"] == said
    assert row["best"] == "+2.0 [+1.0, +3.0]"
    assert row["predicted_change"]["mean"] == predicted._asdict()


def test_agreement_over_settings() -> None:
    module = open_benchmark("probe_agreement")
    pairs = [(UP, UP), (UP, DOWN), (DOWN, DOWN), (FLAT, UP)]
    rows: list[dict[str, Any]] = [
        module.row(fit(predicted), {"last": change(measured), "best": change(FLAT)}) for predicted, measured in pairs
    ]
    last, best = module.notes(rows)
    # Errors 0, 3, 0, 1.5 of (2, 2), (2, -1), (-1, -1), (0.5, 2).
    assert last == (
        "last epoch: of 3 settings in which both intervals exclude 0 the signs agree in 2; of all 4 the estimates have "
        "the same sign in 3; mean absolute error 1.1 points; correlation +0.30"
    )
    assert "of 0 settings in which both intervals exclude 0 the signs agree in 0" in best
    assert best.endswith("correlation needs three settings that differ")
    assert module.notes(rows[:2])[0].endswith("correlation needs three settings that differ")


def test_mean_recall_is_of_both_directions() -> None:
    module = open_benchmark("probe_agreement")
    ranks = Ranks(torch.tensor([1, 1, 1, 2]), torch.tensor([1, 3]), torch.tensor([0, 0, 1, 1]))
    assert module.mean_recall(ranks) == pytest.approx((75 + 50) / 2)
    assert module.levels({"text_to_image": 40.0, "image_to_text": 50.0}, [ranks]) == {
        "zero_shot": 45.0,
        "infonce": 62.5,
    }
