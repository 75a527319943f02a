"""What `--model` names: a model, or the best and the last of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import hnclip.train.loop as loop
import hnclip.train.run_data as run_data
from hnclip.config import OptimConfig, RunOptions, TrainConfig, to_json
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.models.load import load, models_of


def fake_run(run: Path, epochs: dict[str, int | None], *, finished: bool = True) -> str:
    """A run's directory as training leaves it, without weights."""
    run.mkdir()
    (run / "config.json").write_text(to_json(TrainConfig()))
    for name, epoch in epochs.items():
        (run / name).mkdir()
        if epoch is not None:
            training = {"base": "bundled", "data": "x", "objective": {}, "command": "hnclip train", "epoch": epoch}
            (run / name / "training.json").write_text(json.dumps(training))
    if finished:
        (run / "result.json").write_text("{}")
    return str(run)


def test_a_plain_model_is_itself(model_directory: Path, tmp_path: Path):
    for path in (str(model_directory), "bundled", "openai/clip-vit-large-patch14", str(tmp_path / "longclip-L.pt")):
        assert models_of(path) == [(path, path)]


def test_best_and_last(tmp_path: Path):
    run = fake_run(tmp_path / "run", {"best": 3, "last": 10})
    assert models_of(run + "/") == [
        (f"{run} (best, epoch 3)", f"{run}/best"),
        (f"{run} (last, epoch 10)", f"{run}/last"),
    ]


def test_the_best_may_be_the_last(tmp_path: Path):
    run = fake_run(tmp_path / "run", {"best": 10, "last": 10})
    assert models_of(run) == [(f"{run} (best and last, epoch 10)", f"{run}/best")]


def test_what_is_left_of_a_run(tmp_path: Path):
    one = fake_run(tmp_path / "one", {"last": 10})
    assert models_of(one) == [(f"{one} (last, epoch 10)", f"{one}/last")]
    silent = fake_run(tmp_path / "silent", {"best": None, "last": None})  # models that do not say their epoch
    assert [name for name, _ in models_of(silent)] == [f"{silent} (best)", f"{silent} (last)"]
    with pytest.raises(ValueError, match="run without a model"):
        models_of(fake_run(tmp_path / "gone", {}))


def test_a_run_without_an_epoch_says_how_to_go_on(tmp_path: Path):
    run = fake_run(tmp_path / "run", {}, finished=False)
    with pytest.raises(ValueError, match=rf"hnclip train --resume {run}"):
        models_of(run)


def test_a_damaged_configuration_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        models_of(str(tmp_path))


def test_a_real_run_before_and_after_its_end(model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stopped in the second of two epochs, then continued: the names follow what the directories hold."""
    parts = [scene_records("park", split, families=4, members=4) for split in ("train", "validation")]
    monkeypatch.setattr(run_data, "open_data", lambda source, *_, **__: DataSet(source, (*parts[0], *parts[1])))
    optim = OptimConfig(epochs=2, micro_batch=4, accumulate=1, lr=1e-3)
    config = TrainConfig(model=str(model_directory), optim=optim)
    options = RunOptions(out=tmp_path / "run", threads=1, device="cpu")
    step = loop.Run._step

    def stopped(self: loop.Run, *args: object, **others: object) -> dict:
        if self.step == 5:
            raise KeyboardInterrupt
        return step(self, *args, **others)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_step", stopped)
        with pytest.raises(KeyboardInterrupt):
            loop.train(config, options)
    run = str(options.out)
    assert models_of(run) == [(f"{run} (best and last so far, epoch 1)", f"{run}/best")]
    result = loop.resume(options.out)
    found = models_of(run)
    if result.best["epoch"] == 2:
        assert found == [(f"{run} (best and last, epoch 2)", f"{run}/best")]
    else:
        assert found == [(f"{run} (best, epoch 1)", f"{run}/best"), (f"{run} (last, epoch 2)", f"{run}/last")]
    assert all(load(path).context == 248 for _, path in found)
    shutil.rmtree(options.out / "best")
    assert models_of(run) == [(f"{run} (last, epoch 2)", f"{run}/last")]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_aligns_two_joined_towers(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The result is no longer marked as untrained; with adapters the base is joined again with the same projections."""
    from hnclip.config import AdaptConfig
    from small_families import write_bert, write_dinov2

    records = [
        record for split in ("train", "validation") for record in scene_records("park", split, families=4, members=4)
    ]
    monkeypatch.setattr(run_data, "open_data", lambda source, *_, **__: DataSet(source, tuple(records)))
    name = f"{write_dinov2(tmp_path / 'image')}+{write_bert(tmp_path / 'text')}"
    assert load(name).untrained_projections
    optim = OptimConfig(epochs=1, micro_batch=4, accumulate=1, lr=1e-3)
    config = TrainConfig(model=name, optim=optim, adapt=AdaptConfig(method=method))
    loop.train(config, RunOptions(out=tmp_path / "run"))
    model = load(tmp_path / "run" / "best")
    assert not model.untrained_projections
    assert model.encode(["a red house"]).shape == (1, 512)
