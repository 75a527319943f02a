"""Runs: they learn, are reproducible, and continue after any interruption to the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import processes
import pytest
import torch
from small import Stop, assert_same_weights, config_for, options_for, scenes, stop_at, train_until, weights

from hnclip.config import AdaptConfig, ObjectiveConfig, RunOptions, TrainConfig, to_json
from hnclip.data.records import DataSet
from hnclip.models.load import load, models_of, save
from hnclip.training.checkpoint import load_checkpoint, only_writer, save_checkpoint
from hnclip.training.log import read_metrics
from hnclip.training.runs import resume, saved_options, train, train_or_continue
from hnclip.training.setup import choose_trainable
from hnclip.training.trainer import Trainer, TrainingDiverged


@pytest.fixture
def options(tmp_path: Path) -> RunOptions:
    return options_for(tmp_path / "run")


@pytest.fixture(scope="module")
def whole(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs with four steps each."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(config_for(model_directory), options_for(out), data=scenes())
    return out


def test_a_run_learns_and_writes_everything(model_directory: Path, options: RunOptions) -> None:
    result = train(config_for(model_directory, optim={"epochs": 6}), options, data=scenes())
    steps, evaluations = read_metrics(result.out, "step"), read_metrics(result.out, "evaluation")
    assert [entry["step"] for entry in steps] == list(range(1, 25))
    assert [entry["epoch"] for entry in evaluations] == list(range(7))
    first, last = (sum(entry["loss"] for entry in part) for part in (steps[:4], steps[-4:]))
    assert last < first
    for entry in steps:
        assert entry["loss"] == pytest.approx(entry["global"] + entry["token"])
        assert 0 <= entry["saturated"] <= 1
        assert entry["grad_norm"] > 0
        assert 1 <= entry["scale"] <= 100
    best = max(evaluations, key=lambda entry: entry["mean_R@1"])
    assert result.best == {"epoch": best["epoch"], "mean_R@1": best["mean_R@1"]}
    assert result.last["epoch"] == 6
    assert json.loads((result.out / "config.json").read_text())["optim"]["epochs"] == 6
    assert not list(result.out.glob(".*new*"))


LORA = AdaptConfig(method="lora", rank=2, dropout=0.1, projections=True)
CASES = {
    "batch lora": {"optim": {"negatives": "batch"}, "adapt": LORA},
    "memory clusters": {
        "optim": {"negatives": "memory", "memory": 20},
        "cluster": 3,
        "objective": ObjectiveConfig(margin_source="frozen"),
    },
    "dora": {"adapt": AdaptConfig(method="dora", rank=2, dropout=0.1, towers="text")},
    "frozen": {"adapt": AdaptConfig(freeze_image="all", freeze_text=1)},
}


@pytest.mark.parametrize("name", CASES)
def test_a_stopped_run_continues_to_the_same_weights(name: str, model_directory: Path, tmp_path: Path) -> None:
    """Dropout is on, so this needs the random state; the step at which a run stops is lost and repeated. The data have
    several captions per image."""
    data = DataSet("two", tuple(replace(r, captions=(*r.captions, str(r.short))) for r in scenes().records))
    config = config_for(model_directory, **CASES[name])  # type: ignore[arg-type]
    train(config, options_for(tmp_path / "whole"), data=data)
    out = tmp_path / "stopped"
    train_until(2, config, options_for(out), data)
    with pytest.raises(Stop):
        resume(out, data=data, on_step=stop_at(6))
    resume(out, data=data)
    assert_same_weights(tmp_path / "whole", out)
    numbers = [
        [{**entry, "pairs_per_second": 0, "waited": 0} for entry in read_metrics(run, "step")]
        for run in (tmp_path / "whole", out)
    ]
    assert numbers[0] == numbers[1]
    assert [entry["step"] for entry in numbers[0]] == list(range(1, 9))
    state = load_checkpoint(out)
    assert state is not None
    trained = sum(len(group["params"]) for group in state.optimizer["param_groups"])
    assert trained == len(state.model)  # what is frozen is not saved


def train_or_resume(model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    train_or_continue(config_for(model), options_for(out), data=scenes())


def test_a_killed_process_resumes_to_the_same_weights(model_directory: Path, whole: Path, tmp_path: Path) -> None:
    """SIGKILL a real process at several moments, until the run is finished."""
    killed, kills = tmp_path / "killed", 0
    for delay in (0.2, 0.5, 0.8, 1.1, 300):
        process = processes.FORKSERVER.Process(target=train_or_resume, args=(model_directory, killed))
        process.start()
        process.join(delay)
        kills += process.exitcode is None
        process.kill()
        process.join()
    assert kills >= 1
    assert (killed / "result.json").exists()
    assert_same_weights(whole, killed)
    assert [entry["step"] for entry in read_metrics(killed, "step")] == list(range(1, 9))


def test_models_are_written_after_the_checkpoint_or_on_resume(
    model_directory: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full when the models of epoch 1 are written: the error says so, and resuming writes them."""
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
            train(config_for(model_directory), options_for(out, save_minutes=60.0), data=scenes())
    state = load_checkpoint(out)
    assert state is not None
    assert (state.step, state.last["epoch"]) == (4, 1)
    assert models_of(str(out))[0][0].endswith("epoch 0)")  # the previous models are intact
    resume(out, data=scenes())
    assert_same_weights(whole, out)


def test_epoch_0_competes_for_best(model_directory: Path, tmp_path: Path) -> None:
    """A learning rate that changes nothing: no epoch is better than the model before training."""
    config = config_for(model_directory, optim={"epochs": 1, "lr": 1e-15})
    result = train(config, options_for(tmp_path / "run"), data=scenes())
    assert (result.best["epoch"], result.last["epoch"]) == (0, 1)
    before, best = load(model_directory).backbone.state_dict(), weights(tmp_path / "run", "best")
    assert all(torch.equal(value, before[name]) for name, value in best.items())
    assert [name.split("(")[1] for name, _ in models_of(str(result.out))] == ["best, epoch 0)", "last, epoch 1)"]


def test_a_run_is_moved_and_resumed_with_other_options(model_directory: Path, whole: Path, tmp_path: Path) -> None:
    """The weights are the same, and the seconds are those of all sessions."""
    train_until(3, config_for(model_directory), options_for(tmp_path / "before"))
    moved = (tmp_path / "before").rename(tmp_path / "after")
    state = load_checkpoint(moved)
    assert state is not None
    save_checkpoint(moved, replace(state, seconds=1000.0))
    device = "cpu" if torch.accelerator.is_available() else "auto"  # another device computes other bits
    other = options_for(tmp_path / "nowhere", evaluate_batch=3, device=device, tensorboard=True, save_minutes=60.0)
    result = resume(moved, other, data=scenes())
    assert result.out == moved
    assert 1000 < result.seconds < 1300
    assert_same_weights(whole, moved)
    assert saved_options(moved) == replace(other, out=moved)
    assert not (tmp_path / "before").exists()
    assert not (tmp_path / "nowhere").exists()


def test_a_finished_run_is_not_repeated(model_directory: Path, whole: Path, tmp_path: Path) -> None:
    stamp = (whole / "last" / "model.safetensors").stat().st_mtime_ns
    result = resume(whole)
    assert result == train_or_continue(config_for(model_directory), options_for(whole))
    assert result.steps == 8
    assert (whole / "last" / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="already holds a run"):
        train(config_for(model_directory), options_for(whole))
    with pytest.raises(ValueError, match="other settings"):
        train_or_continue(config_for(model_directory, seed=1), options_for(whole))
    with pytest.raises(ValueError, match="holds no run"):
        resume(tmp_path)


def test_a_loss_that_is_no_number_ends_the_run(model_directory: Path, options: RunOptions) -> None:
    """The weights on disk are those before it."""

    def on_step(step: int) -> None:
        if step == 3:  # of step 3 there is no checkpoint yet
            trainer.model.backbone.visual_projection.weight.data.fill_(float("nan"))
            trainer.options = replace(options, save_minutes=60.0)

    trainer = Trainer(config_for(model_directory), options, data=scenes(), on_step=on_step)
    with pytest.raises(TrainingDiverged, match=r"step 4.*checkpoint\.pt"):
        trainer.fit()
    state = load_checkpoint(options.out)
    assert state is not None
    assert state.step == 2
    assert all(torch.isfinite(value).all() for value in state.model.values())


class Trap:
    """Fails the test if it is unpickled."""

    def __reduce__(self) -> tuple:
        return pytest.fail, ("code of the file was executed",)


def trapped(content: bytes) -> bytes:
    file = BytesIO()
    torch.save({"format": 2, "step": Trap()}, file)
    return file.getvalue()


DAMAGES = {
    "a checkpoint with code": ("checkpoint.pt", trapped),
    "truncated checkpoint": ("checkpoint.pt", lambda content: content[: len(content) // 2]),
    "a flipped bit of a tensor": (
        "checkpoint.pt",
        lambda content: (
            content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]
        ),
    ),
    "truncated configuration": ("config.json", lambda content: content[:50]),
    "another configuration": ("config.json", lambda content: content.replace(b'"lr": 0.001', b'"lr": 0.002')),
    "truncated options": ("options.json", lambda content: content[:20]),
}


@pytest.fixture(scope="module")
def stopped(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stopped") / "run"
    train_until(3, config_for(model_directory), options_for(out))
    return out


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_of_a_run_are_named(name: str, stopped: Path) -> None:
    file, damage = DAMAGES[name]
    content = (stopped / file).read_bytes()
    assert damage(content) != content
    (stopped / file).write_bytes(damage(content))
    try:
        with pytest.raises(ValueError, match=file):
            resume(stopped, data=scenes())
    finally:
        (stopped / file).write_bytes(content)


def test_lost_metrics_are_reported(stopped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import shutil

    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    (run / "metrics.jsonl").write_text("{}\n")
    resume(run, data=scenes())
    assert any("metrics.jsonl" in line for line in caplog.messages)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1"):
        read_metrics(run, "step")
    for change in ({"best": {"epoch": 2}}, {"last": None}, {"steps": 8, "extra": 1}):
        content = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=r"result\.json"):
            resume(run)
        (run / "result.json").write_text(json.dumps(content))


def test_other_data_are_refused(stopped: Path) -> None:
    fewer = DataSet("scenes/park", scenes().records[1:])
    with pytest.raises(ValueError, match=r"32 pairs.*31 pairs"):
        resume(stopped, data=fewer)


def test_a_full_disk_keeps_the_old_checkpoint(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (stopped / "checkpoint.pt").read_bytes()
    state = load_checkpoint(stopped)
    assert state is not None

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"No space left.*intact"):
        save_checkpoint(stopped, replace(state, step=99))
    assert (stopped / "checkpoint.pt").read_bytes() == before
    assert not list(stopped.glob(".checkpoint*"))


def test_two_writers_are_refused(tmp_path: Path) -> None:
    held = "from hnclip.training.checkpoint import only_writer; from pathlib import Path; import sys, time\n"
    held += "with only_writer(Path(sys.argv[1])): print('held', flush=True); time.sleep(30)"
    other = subprocess.Popen([sys.executable, "-c", held, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another process"), only_writer(tmp_path):
            pass
    finally:
        other.kill()
        other.stdout.close()
        other.wait()
    with only_writer(tmp_path):  # the lock of a killed process is free
        pass


def test_a_run_that_cannot_start_writes_nothing(
    model_directory: Path, options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="image tower has 2 blocks"):
        train(config_for(model_directory, adapt=AdaptConfig(freeze_image=7)), options, data=scenes())
    assert not options.out.exists()
    with pytest.raises(ValueError, match="both towers are frozen"):
        AdaptConfig(freeze_image="all", freeze_text="all")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"hnclip\[track\]"):
        train(config_for(model_directory), replace(options, tensorboard=True), data=scenes())
    assert not options.out.exists()


def test_tensorboard_shows_every_metric_once(model_directory: Path, tmp_path: Path) -> None:
    """Also after a resume: the steps after the last checkpoint are hidden."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    options = options_for(out, tensorboard=True, save_minutes=60.0)
    train_until(7, config_for(model_directory), options)
    state = load_checkpoint(out)
    assert state is not None
    assert state.step == 4  # an epoch ends with a checkpoint, the other ones are by time
    resume(out, options, data=scenes())
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 9))
    logged = [event.value for event in events.Scalars("evaluation/text_to_image/R@1")]
    assert logged == [entry["text_to_image"]["R@1"] for entry in read_metrics(out, "evaluation")]
    assert not any("test_split" in tag for tag in events.Tags()["scalars"])


def test_bf16_is_close_and_its_weights_are_float32(model_directory: Path, whole: Path, options: RunOptions) -> None:
    result = train(config_for(model_directory, optim={"precision": "bf16", "epochs": 1}), options, data=scenes())
    assert all(value.dtype == torch.float32 for value in weights(result.out).values())
    half, full = (read_metrics(run, "step")[0]["loss"] for run in (result.out, whole))
    assert half != full
    assert half == pytest.approx(full, rel=0.02)


def test_frozen_margins_come_from_the_initial_encoder(model_directory: Path, tmp_path: Path) -> None:
    runs = {}
    for source in ("live", "frozen"):
        objective = ObjectiveConfig(margin_source=source, token_weight=0.0)  # type: ignore[arg-type]
        config = config_for(model_directory, objective=objective, optim={"lr": 1e-2})
        runs[source] = read_metrics(train(config, options_for(tmp_path / source), data=scenes()).out, "step")
    # Dropout makes the live margins of a step differ a little from those of the evaluation mode.
    assert runs["live"][0]["global"] == pytest.approx(runs["frozen"][0]["global"], rel=0.05)
    assert runs["live"][-1]["global"] != pytest.approx(runs["frozen"][-1]["global"], rel=1e-4)


def test_more_negatives_are_harder(model_directory: Path, tmp_path: Path) -> None:
    losses = {}
    for negatives, memory in (("micro", 0), ("batch", 0), ("memory", 1000)):
        config = config_for(model_directory, optim={"negatives": negatives, "memory": memory, "epochs": 1})
        result = train(config, options_for(tmp_path / negatives), data=scenes())
        losses[negatives] = read_metrics(result.out, "step")[0]["infonce"]
    assert losses["micro"] < losses["batch"] < losses["memory"]
    state = load_checkpoint(tmp_path / "memory")
    assert state is not None
    assert len(state.memory["slots"]) == 32  # all training pairs


def test_a_run_with_adapters_writes_adapters(model_directory: Path, tmp_path: Path) -> None:
    """The base does not change, and the adapted model is another one."""
    config = config_for(model_directory, adapt=LORA, optim={"epochs": 1, "scale_lr": 0.0})
    before = (model_directory / "model.safetensors").read_bytes()
    train(config, options_for(tmp_path / "run"), data=scenes())
    assert (model_directory / "model.safetensors").read_bytes() == before
    files = {file.name for file in (tmp_path / "run" / "last").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "hnclip.json"} <= files
    assert "model.safetensors" not in files
    texts = [record.captions[0] for record in scenes().records[:3]]
    vectors = [load(path).encode(texts) for path in (model_directory, tmp_path / "run" / "last")]
    assert abs(vectors[0] - vectors[1]).max() > 1e-3


@pytest.mark.parametrize("scale_lr", [0.0, 1e-2])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_initial_scale_can_be_chosen_and_fixed(method: str, scale_lr: float, model_directory: Path) -> None:
    model = load(model_directory)
    optim = {"scale": 20.0, "scale_lr": scale_lr}
    choose_trainable(config_for(model_directory, adapt=AdaptConfig(method=method), optim=optim), model)  # type: ignore[arg-type]
    assert model.scale.item() == pytest.approx(20.0)
    assert model.backbone.logit_scale.requires_grad == (scale_lr > 0)


def test_a_short_model_is_stretched_first(model_directory: Path, tmp_path: Path) -> None:
    from transformers import CLIPModel

    from hnclip.models.load import wrap

    short = load(model_directory)
    short.backbone.config.text_config.max_position_embeddings = 40
    save(wrap(CLIPModel(short.backbone.config), short.tokenizer), tmp_path / "short")
    config = config_for(tmp_path / "short", context=60, keep=10, ratio=2, optim={"epochs": 1})
    train(config, options_for(tmp_path / "run"), data=scenes())
    assert load(tmp_path / "run" / "last").context == 60


def test_joined_towers_are_trained_after_a_run(tmp_path: Path) -> None:
    from small_families import write_bert, write_dinov2

    name = f"{write_dinov2(tmp_path / 'image')}+{write_bert(tmp_path / 'text')}"
    assert load(name).untrained_projections
    train(config_for(Path(name), optim={"epochs": 1}), options_for(tmp_path / "run"), data=scenes())
    assert not load(tmp_path / "run" / "best").untrained_projections


def test_run_directories_are_models(whole: Path, stopped: Path, tmp_path: Path) -> None:
    """`models_of`: best and last epoch, one model if they are the same, and a plain model by its own name."""
    assert models_of(str(whole / "last")) == [(str(whole / "last"), str(whole / "last"))]
    found = models_of(str(whole))
    best = resume(whole).best["epoch"]
    names = (
        [f"{whole} (best and last, epoch 2)"]
        if best == 2
        else [f"{whole} (best, epoch {best})", f"{whole} (last, epoch 2)"]
    )
    assert [name for name, _ in found] == names
    assert "so far" in models_of(str(stopped))[0][0]
    (tmp_path / "config.json").write_text(to_json(TrainConfig()))
    with pytest.raises(ValueError, match="--resume"):
        models_of(str(tmp_path))
