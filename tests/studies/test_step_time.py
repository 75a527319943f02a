"""Measured training steps: what stands in for what, scaling, and that nothing is left behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hnclip.studies.step_time as step_time
from hnclip.config import RunOptions, TrainConfig
from hnclip.core import Record
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.measure import Timing, threads
from hnclip.models.load import load
from hnclip.objectives.registry import METHOD_CHOICES, apply_method, build_objective
from hnclip.recipes import miniature
from hnclip.studies import identity
from hnclip.studies.step_time import Shape, StepTime, measure_step, measure_steps


def records() -> list[Record]:
    return scene_records("park", "train", families=3, members=4)


@pytest.fixture
def config(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A run of a narrow model on twelve scenes, whatever its data are called, but for `nowhere`."""

    def open_data(source: str, read: object, splits: object) -> DataSet:
        if source == "nowhere":
            raise ValueError("data 'nowhere' is not known. Data are something else")
        return DataSet(source, tuple(records()))

    monkeypatch.setattr(identity, "open_data", open_data)
    return replace(miniature(), model=str(model_directory))


def test_the_bundled_model_is_timed_and_nothing_is_left_behind(picture_cache: Path) -> None:
    torch.manual_seed(7)
    random, before = torch.get_rng_state(), set(picture_cache.rglob("*"))
    found = measure_step(miniature(), RunOptions(device="cpu"), pairs=8, turns=1)
    assert found.pairs_per_second > 0
    assert found.seconds_per_step > 0
    assert found.source == "real data"
    assert (found.measured_pairs, found.step_pairs, found.is_scaled) == (8, 32, True)
    assert torch.equal(torch.get_rng_state(), random)
    assert set(picture_cache.rglob("*")) == before


def test_a_run_is_timed_with_its_own_threads_which_are_not_kept(config: TrainConfig) -> None:
    with threads(2):
        found = measure_step(config, RunOptions(device="cpu", threads=1), pairs=2, turns=1)
        assert torch.get_num_threads() == 2
    assert found.machine["threads"] == 1


def test_a_time_goes_to_json_and_back(config: TrainConfig) -> None:
    found = measure_step(config, pairs=4, turns=2)
    assert len(found.turns) == 2
    assert StepTime.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_fewer_pairs_are_scaled_but_the_update_counts_once(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 s for 4 of 32 pairs, of which the update takes 2 s: 8 × 8 s + 2 s."""
    taken = iter([Timing((10.0, 12.0, 10.0)), Timing((2.0, 2.0, 2.0))])
    monkeypatch.setattr(step_time, "time_ways", lambda ways, **options: dict.fromkeys(ways, next(taken)))
    found = measure_step(config, pairs=4)
    assert found.turns == (66.0, 82.0, 66.0)
    assert found.seconds_per_step == 66
    assert found.pairs_per_second == pytest.approx(32 / 66)


def test_a_whole_step_is_not_scaled(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([Timing((10.0,)), Timing((2.0,))])
    monkeypatch.setattr(step_time, "time_ways", lambda ways, **options: dict.fromkeys(ways, next(taken)))
    small = replace(config, optim=replace(config.optim, micro_batch=3, accumulate=2))
    found = measure_step(small)
    assert (found.measured_pairs, found.turns) == (6, (10.0,))
    assert not found.is_scaled


def test_the_ratio_of_two_times_is_by_pair_and_turn() -> None:
    one = StepTime(4.0, 32, 32, (4.0, 5.0, 40.0), "fp32", None, "real data", {})
    two = StepTime(1.0, 16, 16, (1.0, 1.0, 10.0), "fp32", None, "real data", {})
    assert one.times(two) == 2
    assert two.times(one) == 0.5


@pytest.mark.parametrize("plug", METHOD_CHOICES)
def test_every_method_can_be_timed_without_data(
    config: TrainConfig, plug: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hnclip")
    elsewhere = replace(apply_method(config, plug), data="nowhere")  # type: ignore[arg-type]
    found = measure_step(elsewhere, pairs=4, turns=1)
    assert found.source == "synthetic batch"
    assert caplog.messages == [
        "data 'nowhere' is not known; random pixels and captions of 248 tokens stand in for the data"
    ]
    assert found.pairs_per_second > 0


def test_a_synthetic_batch_has_all_views_and_captions_of_full_length(config: TrainConfig) -> None:
    model = load(config.model)
    objective = build_objective(apply_method(config, "structxlip").objective)
    batch = step_time._synthetic_batch(model, objective, 3)
    assert set(batch.images) == set(objective.image_views)
    assert set(batch.texts) == set(objective.text_views)
    assert batch.texts["caption"].lengths.tolist() == [248] * 3
    assert len({tuple(row) for row in batch.texts["caption"].ids.tolist()}) == 3
    assert batch.parts["filtered"].shape == (3, step_time.CHUNKS, 2)
    goal = step_time._synthetic_batch(model, build_objective(apply_method(config, "goal").objective), 2)
    assert goal.texts["sentence"].lengths.tolist() == [step_time.SENTENCE] * 2
    assert goal.parts["full"].any(-1).all()


def test_frozen_similarities_are_timed_too(config: TrainConfig) -> None:
    frozen = replace(config, objective=replace(config.objective, margin_source="frozen"))
    assert measure_step(frozen, pairs=4, turns=1).source == "real data"


def test_long_clip_l_that_is_not_here_is_one_of_random_weights(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = Shape((32, 2, 2), (16, 1, 2), picture=28, patch=14, joint=16, context=248, words=49_408)
    monkeypatch.setattr(step_time, "LONG_CLIP_L", small)
    caplog.set_level("INFO", logger="hnclip")
    elsewhere = replace(config, model="/nowhere/longclip-L.pt")
    found = measure_step(elsewhere, pairs=4, turns=1)
    assert found.source == "random weights, synthetic batch"
    (sentence,) = caplog.messages
    assert "random weights" in sentence
    with pytest.raises(ValueError, match="no such file or directory"):
        measure_step(replace(config, model="/nowhere/other.pt"), pairs=4)


def test_the_shape_of_long_clip_l_is_that_of_vit_l_14() -> None:
    """428 million parameters: CLIP ViT-L/14 with 248 instead of 77 positions."""
    from transformers import CLIPModel

    settings = step_time._settings(step_time.LONG_CLIP_L, load("bundled").tokenizer)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in CLIPModel(settings).parameters())
    assert count == 427_616_513 + (248 - 77) * 768


def test_what_does_not_fit_together_is_measured_one_after_the_other(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[list[str]] = []
    timed = step_time._timed

    def watched(ways, turns):  # type: ignore[no-untyped-def]
        groups.append(list(ways))
        return timed(ways, turns)

    monkeypatch.setattr(step_time, "_timed", watched)
    configs = dict.fromkeys("abc", config)
    assert list(measure_steps(configs, pairs=2, turns=1)) == ["a", "b", "c"]
    size = 16 * sum(weight.numel() for weight in load(config.model).parameters())
    monkeypatch.setattr(step_time, "TOGETHER", 2 * size)
    measure_steps(configs, pairs=2, turns=1)
    assert groups == [["a", "b", "c"], ["a", "b"], ["c"]]


def test_one_pair_is_no_step(config: TrainConfig) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        measure_step(config, pairs=1)
