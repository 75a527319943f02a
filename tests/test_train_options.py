"""The options of `hnclip train`: defaults, short names, methods and recipes; the command of a configuration."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hnclip import recipes
from hnclip.cli import main, positional_data
from hnclip.cli.train import Train
from hnclip.config import (
    AdaptConfig,
    ObjectiveConfig,
    OptimConfig,
    RunOptions,
    SpeedConfig,
    TrainConfig,
    to_json,
    train_command,
)
from hnclip.objectives.registry import METHOD_CHOICES, METHODS, apply_method

PAGE = next((Path(__file__).parents[1] / "docs").rglob("methods.md")).read_text(encoding="utf-8")


def options_of(*words: str) -> Train:
    return Train.parse(positional_data(words))


def config_of(*words: str) -> TrainConfig:
    return options_of(*words).config()


@pytest.mark.parametrize(
    ("words", "lr", "epochs"),
    [
        ([], 3e-4, 4),
        (["--model", "bundled"], 3e-4, 4),
        (["--model", "elsewhere"], 2e-6, 10),
        (["--model", "elsewhere", "--adapt.method", "lora"], 5e-5, 10),
        (["--adapt.method=dora"], 5e-5, 10),
        (["--model", "elsewhere", "--recipe", "demo", "--recipe", "lora"], 5e-5, 10),
        (["--model", "elsewhere", "--optim.lr", "1e-3"], 1e-3, 10),
        (["--model", "elsewhere", "--lr", "1e-3", "--epochs", "3"], 1e-3, 3),
        (["--lr", "1e-3", "--optim.lr", "1e-3"], 1e-3, 4),
    ],
)
def test_defaults_follow_the_model_and_short_names_are_those_of_the_sections(
    words: list[str], lr: float, epochs: int
) -> None:
    config = config_of(*words)
    assert (config.optim.lr, config.optim.epochs) == (lr, epochs)


def test_data_are_positional_or_an_option() -> None:
    spellings = [["x.csv", "--model", "m"], ["--model", "m", "--data", "x.csv"], ["--data=x.csv", "--model", "m"]]
    configs = [config_of(*words) for words in spellings]
    assert configs[0].data == "x.csv"
    assert configs[0] == configs[1] == configs[2]


@pytest.mark.parametrize("data", ["mine", "scenes/mine", "docci"])
def test_own_data_need_a_model(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if data != "docci":
        (tmp_path / data).mkdir(parents=True)
    assert main(["train", data, "--out", "run"]) == 2
    assert "--model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert config_of(data, "--model", "bundled").data == data


@pytest.mark.parametrize("method", METHOD_CHOICES)
def test_a_method_changes_nothing_else(method: Any) -> None:
    own = config_of("--method", method)
    assert own == apply_method(recipes.demo(), method)
    changed = config_of("--method", method, "--global-loss", "fixed_margin")
    assert changed.objective.global_loss == "fixed_margin"
    assert replace(changed, objective=replace(changed.objective, global_loss=own.objective.global_loss)) == own


def test_options_in_any_order_and_spelling() -> None:
    first = config_of("--method", "goal", "--global-loss", "hn", "--gamma", "0.2", "--recipe", "tiny")
    second = config_of("--recipe=tiny", "--objective.gamma=0.2", "--global_loss=hn", "--method=goal")
    assert first == second
    assert (first.objective.method, first.objective.global_loss, first.objective.gamma) == ("goal", "hn", 0.2)
    assert first.limit == recipes.tiny().limit


def test_a_variant_is_a_method_as_released_or_corrected(tmp_path: Path) -> None:
    official = config_of("--method", "structxlip", "--fidelity", "official")
    assert (official.objective.fidelity, official.optim.scale_max) == ("official", pytest.approx(33.115))
    assert config_of("--method", "structxlip").optim.scale_max == 100.0
    released = config_of("--recipe", "finelip")
    assert (released.objective.global_loss, released.optim.schedule) == ("none", "wrapped")
    corrected = config_of("--recipe", "finelip", "--fidelity", "corrected")
    assert (corrected.objective.global_loss, corrected.optim.schedule) == ("infonce", "cosine")
    chosen = config_of("--recipe", "finelip", "--fidelity", "corrected", "--global-loss", "hn")
    assert chosen.objective.global_loss == "hn"
    assert config_of("--recipe", "goal", "--method", "goal") == recipes.goal()

    own = replace(recipes.finelip(), optim=replace(recipes.finelip().optim, readout_lr=1e-3))
    (tmp_path / "config.json").write_text(to_json(own), encoding="utf-8")
    saved = ["--config", str(tmp_path / "config.json"), "--fidelity"]
    assert config_of(*saved, "official") == own
    found = config_of(*saved, "corrected")
    assert (found.optim.readout_lr, found.optim.schedule) == (1e-3, "cosine")


def test_what_belongs_to_another_global_loss_goes_with_it(tmp_path: Path) -> None:
    frozen = replace(recipes.demo(), objective=replace(recipes.demo().objective, margin_source="frozen"))
    rival = replace(frozen.objective, global_loss="hcl", margin_source="live", parameters={"beta": 0.5})
    for name, config in (("frozen", frozen), ("rival", replace(frozen, objective=rival))):
        (tmp_path / f"{name}.json").write_text(to_json(config), encoding="utf-8")
    saved = ["--config", str(tmp_path / "frozen.json")]
    assert config_of(*saved, "--global-loss", "infonce").objective.margin_source == "live"
    found = config_of(*saved, "--method", "goal", "--global-loss", "hn").objective
    assert (found.method, found.margin_source) == ("goal", "frozen")
    assert config_of("--config", str(tmp_path / "rival.json"), "--global-loss", "hn").objective.parameters == {}


@pytest.mark.parametrize(
    ("words", "keyword"),
    [
        (["--objective.token-weight", "0", "--global-loss", "none"], "terms of their own"),
        (["--method", "goal", "--objective.token-weight", "1"], "token_weight"),
        (["--objective.weights", "local", "1"], "weights"),
        (["--global-loss", "hn", "--objective.global-loss", "infonce"], "give one of them"),
        (["--method", "goal", "--fidelity", "official", "--objective.fidelity", "corrected"], "give one of them"),
        (["--lr", "1", "--optim.lr", "2"], "give one of them"),
        (["--fidelity", "official"], "no official and corrected variant"),
        (["--method", "lora", "--fidelity", "official"], "no official and corrected variant"),
        (["--method", "gaol"], "goal"),
        (["--objective.gamma", "-1"], "--objective.gamma: "),
        (["--gamma", "-1"], "gamma"),
        (["--seed", "-1"], "--seed: "),
        (["--optim.micro_batch", "1"], "--optim.micro-batch: "),
        (["--optim.warmup", "1.5"], "train: warmup must be"),
        (["--optim.lrr", "1"], "--optim.lr "),
        (["--optim.negatives", "memory", "--global-loss", "none", "--method", "goal"], "negatives memory"),
        (["--data"], "--data"),
        (["--config", "none.json"], "none.json"),
        (["--resume", "nowhere"], "no run"),
    ],
)
def test_wrong_options_are_named(words: list[str], keyword: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    printed = capsys.readouterr().err
    assert keyword in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    "words",
    [
        ["--optim.lr", "1"],
        ["--lr", "1"],
        ["--seed", "7"],
        ["--out", "elsewhere"],
        ["--recipe", "goal"],
        ["--method", "goal"],
        ["--global-loss", "hn"],
        ["--limit", "3"],
        ["--config", "config.json"],
    ],
)
def test_resuming_refuses_another_configuration(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(to_json(recipes.tiny()))
    assert main(["train", "--resume", ".", *words]) == 2
    assert "--resume continues with the run's own configuration" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_resuming_takes_options_of_execution(tmp_path: Path) -> None:
    """What is not given is as it was saved, except for the directory, which may have moved."""
    (tmp_path / "config.json").write_text(to_json(recipes.tiny()))
    (tmp_path / "options.json").write_text(to_json(RunOptions(out=Path("before"), threads=3, evaluate_batch=7)))
    words = ["--device", "cpu", "--speed.parallel", "fsdp", "--save-minutes", "3", "--tensorboard"]
    options = options_of("--resume", str(tmp_path), *words)
    speed = SpeedConfig(parallel="fsdp")
    assert options.config() == recipes.tiny()
    assert options.run_options() == RunOptions(
        out=tmp_path, device="cpu", threads=3, speed=speed, save_minutes=3.0, evaluate_batch=7, tensorboard=True
    )


CONFIGS = {
    "paper": recipes.paper(),
    "demo": recipes.demo("infonce"),
    "tiny": recipes.tiny(),
    "lora": recipes.lora(),
    "dora": recipes.dora(),
    "goal": recipes.goal(),
    "rival": TrainConfig(objective=ObjectiveConfig(global_loss="hn_nce", parameters={"beta": 0.5, "alpha": 0.9})),
    "mean": replace(recipes.paper(), objective=ObjectiveConfig(center="mean")),
    "frozen": replace(recipes.paper(), adapt=AdaptConfig(freeze_image="all", freeze_text=3), context=248, limit=100),
    "scale": replace(recipes.paper(), optim=OptimConfig(scale_lr=0.0, precision="bf16"), model="it's + here"),
    "probed": replace(recipes.paper(), probe_gradients=5, fraction=0.05),
    "projections": replace(recipes.paper(), adapt=AdaptConfig(method="lora", projections=True)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_command_of_a_configuration_parses_back_to_it(name: str) -> None:
    program, command, *words = shlex.split(train_command(CONFIGS[name]))
    assert (program, command) == ("hnclip", "train")
    assert config_of(*words) == CONFIGS[name]


def test_a_command_names_only_what_differs() -> None:
    assert train_command(recipes.paper()) == "hnclip train --recipe paper --model bundled"
    assert train_command(replace(recipes.paper(), seed=7)) == "hnclip train --recipe paper --model bundled --seed 7"


def test_the_page_names_every_method_and_term() -> None:
    for method in METHOD_CHOICES:
        assert f"`{method}`" in PAGE
    for spec in METHODS.values():
        for term, weight in spec.weights.items():
            assert f"`{term}`" in PAGE, term
            assert f"{weight:g}" in PAGE


@pytest.mark.parametrize("name", ["long_clip", "finelip", "goal", "smartclip", "structxlip"])
def test_the_table_of_recipes_is_the_recipes(name: str) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |") and "×" in line]
    config = recipes.RECIPES[name]()
    optim = config.optim
    assert [cell.strip() for cell in line.strip("|").split("|")][1:] == [
        f"{optim.lr:.0e}".replace("e-0", "e-"),
        "–" if optim.readout_lr is None else f"{optim.readout_lr:.0e}".replace("e-0", "e-"),
        f"{optim.weight_decay:g}",
        f"{optim.warmup:g} steps" if optim.warmup else "none",
        f"{optim.micro_batch} × {optim.accumulate}",
        str(optim.epochs),
        optim.negatives,
        str(config.seed),
    ]
    assert config.objective.fidelity == "official"
