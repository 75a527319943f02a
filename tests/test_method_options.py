"""`--objective`, `--global`, `--fidelity` and `--recipe` of `hnclip train`, and what docs/methods.md says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import hnclip.training.runs as loop
from hnclip import recipes
from hnclip.cli import main
from hnclip.config import RunOptions, TrainConfig, to_json
from hnclip.objectives.registry import METHOD_CHOICES, METHODS, apply_method

PAGE = (Path(__file__).parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")


class Caught(ValueError):
    """Instead of a run."""


@pytest.fixture
def config_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The configuration that a command line comes to, or what it says."""
    found: list[TrainConfig] = []

    def catch(config: TrainConfig, options: RunOptions) -> None:
        found.append(config)
        raise Caught("no run")

    monkeypatch.setattr(loop, "train", catch)

    def parse(*words: str) -> TrainConfig | str:
        found.clear()
        try:
            code = main(["train", *words])
        except SystemExit as error:  # the parser's own
            code = error.code
        assert code == (1 if found else code) != 0
        return found[0] if found else " ".join(capsys.readouterr().err.split())

    return parse


@pytest.mark.parametrize("plug", METHOD_CHOICES)
def test_a_method_changes_nothing_else(config_of, plug: str) -> None:
    assert config_of("--objective", plug) == apply_method(recipes.demo(), plug)  # type: ignore[arg-type]
    swapped = config_of("--objective", plug, "--global", "fixed_margin")
    assert swapped.objective.global_loss == "fixed_margin"
    own = config_of("--objective", plug)
    assert replace(swapped, objective=replace(swapped.objective, global_loss=own.objective.global_loss)) == own


def test_options_in_any_order_and_spelling(config_of) -> None:
    first = config_of("--objective", "goal", "--global", "hn", "--objective.gamma", "0.2", "--recipe", "tiny")
    second = config_of("--recipe=tiny", "--objective.gamma=0.2", "--global=hn", "--objective=goal")
    assert first == second
    assert (first.objective.method, first.objective.global_loss, first.objective.gamma) == ("goal", "hn", 0.2)
    assert first.limit == recipes.tiny().limit


def test_fidelity(config_of) -> None:
    official = config_of("--objective", "structxlip", "--fidelity", "official")
    assert official.objective.fidelity == "official"
    assert official.optim.scale_max == pytest.approx(33.115)
    assert config_of("--objective", "structxlip").optim.scale_max == 100.0
    mended = config_of("--recipe", "finelip", "--fidelity", "corrected")
    assert (mended.objective.global_loss, mended.optim.schedule) == ("infonce", "cosine")
    released = config_of("--recipe", "finelip")
    assert (released.objective.global_loss, released.optim.schedule) == ("none", "wrapped")
    kept = config_of("--recipe", "finelip", "--fidelity", "corrected", "--global", "hn")
    assert kept.objective.global_loss == "hn"


def test_a_saved_configuration_is_where_options_start(config_of, tmp_path: Path) -> None:
    saved = tmp_path / "config.json"
    saved.write_text(to_json(recipes.goal()), encoding="utf-8")
    found = config_of("--config", str(saved), "--global", "hn")
    expected = recipes.goal()
    assert found == replace(expected, objective=replace(expected.objective, global_loss="hn"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--objective.token-weight", "0", "--global", "none"), "none is for methods with terms of their own"),
        (("--objective", "goal", "--objective.token-weight", "1"), "token_weight belongs to hn_clip"),
        (("--objective.weights", "local", "1"), "weights is for methods other than hn_clip"),
    ],
)
def test_what_does_not_go_together_is_said(config_of, words: tuple[str, ...], said: str) -> None:
    assert said in config_of(*words)


def test_unknown_names_list_the_known(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert main(["train", "--objective", "goal", "--objective.weights", "lokal", "1", *out]) == 1
    assert "GOAL has no term 'lokal'; it has local, patch, text" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main(["train", "--objective", "gaol"])
    assert done.value.code == 2
    assert not (tmp_path / "run" / "config.json").exists()


def test_the_page_names_every_method_and_term() -> None:
    for plug in METHOD_CHOICES:
        assert f"`{plug}`" in PAGE
    for spec in METHODS.values():
        for term, weight in spec.weights.items():
            assert f"`{term}`" in PAGE, term
            assert f"{weight:g}" in PAGE


@pytest.mark.parametrize("name", ["long_clip", "finelip", "goal", "smartclip", "structxlip"])
def test_the_table_of_recipes_is_the_recipes(name: str) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |") and "×" in line]
    config = recipes.RECIPES[name]()
    optim = config.optim
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    rate = "–" if optim.readout_lr is None else f"{optim.readout_lr:.0e}".replace("e-0", "e-")
    warmup = f"{optim.warmup:g} steps" if optim.warmup else "none"
    assert cells == [
        f"{optim.lr:.0e}".replace("e-0", "e-"),
        rate,
        f"{optim.weight_decay:g}",
        warmup,
        f"{optim.micro_batch} × {optim.accumulate}",
        str(optim.epochs),
        optim.negatives,
        str(config.seed),
    ]
    assert config.objective.fidelity == "official"


@pytest.mark.parametrize("flag", ["--recipe", "--config", "--objective", "--global", "--fidelity"])
def test_a_resumed_run_keeps_its_configuration(flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = {"--recipe": "goal", "--objective": "goal", "--global": "hn", "--fidelity": "official"}
    saved = tmp_path / "config.json"
    saved.write_text(to_json(recipes.goal()), encoding="utf-8")
    words = [flag, values.get(flag, str(saved))]
    if flag == "--fidelity":
        words += ["--objective", "goal"]
    assert main(["train", "--resume", str(tmp_path), *words]) == 1
    assert "--resume continues with the run's own configuration" in capsys.readouterr().err


def test_short_and_long_spelling_together_are_refused(config_of) -> None:
    assert "are the same: give one" in config_of("--global", "hn", "--objective.global-loss", "infonce")
    assert "are the same: give one" in config_of(
        "--objective", "goal", "--fidelity", "official", "--objective.fidelity", "corrected"
    )


def test_fidelity_is_refused_where_there_is_none(config_of) -> None:
    assert "no official and corrected variant" in config_of("--fidelity", "official")
    assert "no official and corrected variant" in config_of("--objective", "lora", "--fidelity", "official")


def test_settings_of_ones_own_outlive_a_change_of_fidelity(config_of, tmp_path: Path) -> None:
    own = recipes.finelip()
    own = replace(own, optim=replace(own.optim, readout_lr=1e-3))
    saved = tmp_path / "config.json"
    saved.write_text(to_json(own), encoding="utf-8")
    found = config_of("--config", str(saved), "--fidelity", "corrected")
    assert (found.optim.readout_lr, found.optim.schedule) == (1e-3, "cosine")
    assert config_of("--config", str(saved), "--fidelity", "official") == own


def test_a_recipe_stays_what_it_is(config_of) -> None:
    assert config_of("--recipe", "goal", "--objective", "goal") == recipes.goal()


def test_what_belongs_to_another_global_term_goes_with_it(config_of, tmp_path: Path) -> None:
    frozen = recipes.demo()
    frozen = replace(frozen, objective=replace(frozen.objective, margin_source="frozen"))
    rival = replace(frozen.objective, global_loss="hcl", margin_source="live", parameters={"beta": 0.5})
    for name, config in (("frozen", frozen), ("rival", replace(frozen, objective=rival))):
        (tmp_path / f"{name}.json").write_text(to_json(config), encoding="utf-8")
    found = config_of("--config", str(tmp_path / "frozen.json"), "--global", "infonce")
    assert found.objective.margin_source == "live"
    found = config_of("--config", str(tmp_path / "frozen.json"), "--objective", "goal", "--global", "hn")
    assert (found.objective.method, found.objective.margin_source) == ("goal", "frozen")
    found = config_of("--config", str(tmp_path / "rival.json"), "--global", "hn")
    assert found.objective.parameters == {}
