"""The recipe of the bundled model, in a few steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hnclip.train.pretrain as recipe
from hnclip.data.scenes import scene_records
from hnclip.models.load import load
from hnclip.train.log import read_metrics
from hnclip.train.pretrain import PretrainConfig, brief, pretrain


@pytest.fixture(autouse=True)
def small_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "scene_records", lambda style, split: scene_records(style, split, families=2))


@pytest.mark.slow
def test_a_stopped_recipe_goes_on_to_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped once in each stage, it ends with the weights and the log of a run that was never stopped."""
    whole, stopped = (brief(PretrainConfig(out=tmp_path / name), 4) for name in ("whole", "stopped"))
    model = load(pretrain(whole, report=lambda _: None))
    assert model.context == 248
    original = recipe.clamp_scale
    for limit in (3, 4):  # calls until the stop: in the short stage, then, resumed at step 2, in the long one
        calls = iter(range(limit))

        def failing(*arguments: object, calls: object = calls) -> None:
            if next(calls, None) is None:  # type: ignore[call-overload]
                raise KeyboardInterrupt
            original(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(recipe, "clamp_scale", failing)
        with pytest.raises(KeyboardInterrupt):
            pretrain(stopped, report=lambda _: None)
    monkeypatch.setattr(recipe, "clamp_scale", original)
    again = load(pretrain(stopped, report=lambda _: None))
    for (name, first), second in zip(model.state_dict().items(), again.state_dict().values()):
        assert torch.equal(first, second), name
    steps = [(stage, step) for stage in ("short", "long") for step in (1, 2, 3, 4)]
    for name in ("whole", "stopped"):
        log = read_metrics(tmp_path / name, "step")
        assert [(entry["stage"], entry["step"]) for entry in log] == steps
        assert {"park_R@1", "shelf_R@10"} <= log[-1].keys()


@pytest.mark.slow
def test_other_settings_in_the_same_place_are_refused(tmp_path: Path) -> None:
    config = brief(PretrainConfig(out=tmp_path), 2)
    pretrain(config, report=lambda _: None)
    with pytest.raises(ValueError, match="other settings"):
        pretrain(replace(config, seed=1), report=lambda _: None)


def test_a_trial_of_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="brief"):
        brief(PretrainConfig(), -1)


def test_the_stream_has_no_families_and_never_repeats() -> None:
    stage = PretrainConfig().long
    first, second = (recipe._stream_record(f"x/{number}", "park", stage) for number in (0, 1))
    assert first.captions != second.captions
    assert first.image.key != second.image.key
    assert recipe._stream_record("x/0", "park", stage) == first
