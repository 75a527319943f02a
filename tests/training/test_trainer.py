"""Runs: they learn, are reproducible, and continue after any interruption to the same weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from small import FORKSERVER, assert_same_weights, config_for, options_for, scenes, steps, stop_at, train_scenes

from hnclip.config import AdaptConfig, ObjectiveConfig
from hnclip.data.records import DataSet
from hnclip.models.load import models_of
from hnclip.objectives.registry import METHODS, apply_method
from hnclip.training.checkpoint import load_checkpoint, only_writer, save_checkpoint
from hnclip.training.log import read_metrics
from hnclip.training.runs import resume, saved_options, train, train_or_continue
from hnclip.training.trainer import Trainer, TrainingDiverged


@pytest.fixture(scope="module")
def whole(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs with four steps each."""
    return train_scenes(config_for(model_directory), options_for(tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture(scope="module")
def stopped(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped in its third step."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    stop_at(3, train, config_for(model_directory), options_for(out))
    return out


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "copy"))


def state_of(run: Path) -> Any:
    state = load_checkpoint(run)
    assert state is not None
    return state


def test_a_run_learns_and_writes_everything(whole: Path) -> None:
    entries, evaluations = read_metrics(whole, "step"), read_metrics(whole, "evaluation")
    assert [(entry["step"], entry["epoch"]) for entry in entries] == [(n + 1, 1 + n // 4) for n in range(8)]
    assert sum(entry["loss"] for entry in entries[4:]) < sum(entry["loss"] for entry in entries[:4])
    assert all(entry["loss"] == pytest.approx(entry["global"] + entry["token"]) for entry in entries)
    assert [entry["epoch"] for entry in evaluations] == [0, 1, 2]  # epoch 0 competes for best
    best, result = max(evaluations, key=lambda entry: entry["mean_R@1"]), resume(whole)
    assert result.best == {"epoch": best["epoch"], "mean_R@1": best["mean_R@1"]}
    assert (result.last["epoch"], result.steps) == (2, 8)
    names = ["best and last, epoch 2"] if best["epoch"] == 2 else [f"best, epoch {best['epoch']}", "last, epoch 2"]
    assert [name for name, _ in models_of(str(whole))] == [f"{whole} ({name})" for name in names]


LORA = AdaptConfig(method="lora", rank=2, dropout=0.1, projections=True)
MEMORY = {"negatives": "memory", "memory": 100}
FROZEN = ObjectiveConfig(margin_source="frozen")
CASES: dict[str, dict[str, Any]] = {
    "batch lora": {"optim": {"negatives": "batch"}, "adapt": LORA},
    "memory clusters": {"optim": MEMORY, "cluster": 3, "objective": FROZEN},
    "frozen": {"adapt": AdaptConfig(freeze_image="all", freeze_text=1)},
    "finelip": {"optim": {"negatives": "batch"}},
    "goal": {"optim": MEMORY},
    "structxlip": {"optim": {"negatives": "batch"}},
}


@pytest.mark.parametrize("name", CASES)
def test_a_stopped_run_continues_to_the_same_weights(name: str, model_directory: Path, tmp_path: Path) -> None:
    """Dropout is on, so this needs the random state; the step in which a run stops is lost and repeated. The data have
    several captions per image."""
    data = DataSet("two", tuple(replace(r, captions=(*r.captions, str(r.short))) for r in scenes(4).records))
    config = config_for(model_directory, limit=15, **CASES[name])
    if name in METHODS:
        config = apply_method(config, name, "corrected")  # type: ignore[arg-type]
        config = replace(config, objective=replace(config.objective, global_loss="hn"))
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    train(config, options_for(whole), data=data)
    stop_at(2, train, config, options_for(out), data=data)
    stop_at(3, resume, out, data=data)
    resume(out, data=data)
    assert_same_weights(whole, out)
    assert steps(whole) == steps(out)
    assert name != "frozen" or not any("vision" in weight for weight in state_of(out).model)
    assert (out / "last" / "adapter_model.safetensors").exists() == (config.adapt.method == "lora")


def train_or_resume(model: Path, out: Path, last: int) -> None:
    """A run that kills its process in a step."""
    torch.set_num_threads(1)

    def on_step(step: int) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    train_or_continue(config_for(model), options_for(out), data=scenes(), on_step=on_step)


def test_a_killed_process_resumes_to_the_same_weights(model_directory: Path, whole: Path, tmp_path: Path) -> None:
    """SIGKILL a real process in a step, then one at another moment, until the run is finished."""
    out = tmp_path / "killed"
    for last, seconds, expected in ((3, 600, -9), (9, 0.7, None), (9, 600, 0)):
        process = FORKSERVER.Process(target=train_or_resume, args=(model_directory, out, last))
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
        assert expected in (None, process.exitcode)
    assert (out / "result.json").exists()
    assert_same_weights(whole, out)
    assert steps(out) == steps(whole)


def test_models_are_written_after_the_checkpoint_or_on_resume(
    model_directory: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the models of epoch 1 are written: the error says so, and resuming writes them."""
    from safetensors import SafetensorError
    from transformers import CLIPModel

    out, original = tmp_path / "run", CLIPModel.save_pretrained

    def full(self: CLIPModel, *arguments: object, **options: object) -> None:
        if (out / "checkpoint.pt").exists():
            raise SafetensorError("No space left on device")
        original(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CLIPModel, "save_pretrained", full)
        with pytest.raises(OSError, match=f"resume {out}"):
            train_scenes(config_for(model_directory), options_for(out, save_minutes=60.0))
    assert (state_of(out).step, state_of(out).last["epoch"]) == (4, 1)
    assert models_of(str(out))[0][0].endswith("epoch 0)")  # the previous models are intact
    resume(out, data=scenes())
    assert_same_weights(whole, out)


def test_a_run_is_moved_and_resumed_with_other_options(model_directory: Path, whole: Path, tmp_path: Path) -> None:
    """The weights are the same, the seconds are those of all sessions, and TensorBoard shows every step once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given = options_for(tmp_path / "before", tensorboard=True, save_minutes=60.0)
    stop_at(7, train, config_for(model_directory), given)
    moved = (tmp_path / "before").rename(tmp_path / "after")
    state = state_of(moved)
    assert state.step == 4  # an epoch ends with a checkpoint, the other ones are by time
    older = {name: value for name, value in json.loads(state.config).items() if name != "cluster"}
    save_checkpoint(moved, replace(state, seconds=1e6, config=json.dumps(older)))  # of a version without this option
    other = replace(given, out=tmp_path / "nowhere", evaluate_batch=3, save_minutes=50.0)
    result = resume(moved, other, data=scenes())
    assert 1e6 < result.seconds < 2e6
    assert_same_weights(whole, moved)
    assert saved_options(moved) == replace(other, out=moved)
    events = EventAccumulator(str(moved / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 9))
    logged = [event.value for event in events.Scalars("evaluation/text_to_image/R@1")]
    assert logged == [entry["text_to_image"]["R@1"] for entry in read_metrics(moved, "evaluation")]


def test_a_finished_run_is_not_repeated(model_directory: Path, whole: Path, tmp_path: Path) -> None:
    stamp = (whole / "last" / "model.safetensors").stat().st_mtime_ns
    assert resume(whole) == train_or_continue(config_for(model_directory), options_for(whole))
    assert (whole / "last" / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="already holds a run"):
        train(config_for(model_directory), options_for(whole))
    with pytest.raises(ValueError, match="other settings"):
        train_or_continue(config_for(model_directory, seed=1), options_for(whole))
    with pytest.raises(ValueError, match="holds no run"):
        resume(tmp_path)


def test_a_loss_that_is_not_a_number_ends_the_run(model_directory: Path, tmp_path: Path) -> None:
    """The weights on disk are those before it."""
    options = options_for(tmp_path / "run")

    def on_step(step: int) -> None:
        if step == 3:  # of which there is no checkpoint yet
            trainer.model.backbone.visual_projection.weight.data.fill_(float("nan"))
            trainer.options = replace(options, save_minutes=60.0)

    trainer = Trainer(config_for(model_directory), options, data=scenes(), on_step=on_step)
    with pytest.raises(TrainingDiverged, match=r"step 4.*checkpoint\.pt"):
        trainer.fit()
    state = state_of(options.out)
    assert state.step == 2
    assert all(torch.isfinite(value).all() for value in state.model.values())


class Trap:
    """Fails the test if it is unpickled."""

    def __reduce__(self) -> tuple:
        return pytest.fail, ("code of the file was executed",)


def with_code(content: bytes) -> bytes:
    file = BytesIO()
    torch.save({"format": 2, "step": Trap()}, file)
    return file.getvalue()


def flipped(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("checkpoint.pt", with_code),
        ("checkpoint.pt", flipped),
        ("config.json", lambda content: content.replace(b'"lr": 0.001', b'"lr": 0.002')),
        ("options.json", lambda content: content[:20]),
    ],
)
def test_damaged_or_changed_files_of_a_run_are_named(file: str, damage: Any, copy: Path) -> None:
    content = (copy / file).read_bytes()
    assert damage(content) != content
    (copy / file).write_bytes(damage(content))
    with pytest.raises(ValueError, match=file):
        resume(copy, data=scenes())


def test_other_data_a_second_writer_and_lost_metrics_are_reported(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"32 pairs.*31 pairs"):
        resume(copy, data=DataSet("scenes/park", scenes().records[1:]))
    with only_writer(copy), pytest.raises(ValueError, match="another process"):
        resume(copy, data=scenes())
    (copy / "metrics.jsonl").write_text("{}\n")
    resume(copy, data=scenes())
    assert "metrics.jsonl" in caplog.text
    content = json.loads((copy / "result.json").read_text())
    (copy / "result.json").write_text(json.dumps(content | {"last": None}))
    with pytest.raises(ValueError, match=r"result\.json"):
        resume(copy)
