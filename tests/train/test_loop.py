"""The training loop: it learns, it is reproducible, and a kill at any moment changes nothing."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hnclip.train.loop as loop
import hnclip.train.run_data as run_data
import hnclip.train.step as step
from hnclip.config import AdaptConfig, ObjectiveConfig, OptimConfig, RunOptions, TrainConfig, from_json, to_json
from hnclip.core import Batch, Record
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, save, wrap
from hnclip.models.parameters import describe_trainable
from hnclip.train.checkpoint import load_state, only_writer, save_state
from hnclip.train.log import read_metrics
from hnclip.train.loop import TrainingDiverged, resume, saved_config, saved_options, train
from hnclip.util.device import find_device


def small_scenes(source: str, read: object, splits: object) -> DataSet:
    """Eight families for training and five for validation are enough to see the loop work."""
    train, validation = (
        scene_records("park", split, families=n, members=4) for split, n in (("train", 8), ("validation", 5))
    )
    return DataSet(source, (*train, *validation))


@pytest.fixture(autouse=True)
def small_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_data, "open_data", small_scenes)


def config_for(model: Path, **changes: object) -> TrainConfig:
    optim = OptimConfig(epochs=2, micro_batch=4, accumulate=2, lr=1e-3)
    return replace(TrainConfig(model=str(model), optim=optim), **changes)  # type: ignore[arg-type]


def options_for(out: Path, **changes: object) -> RunOptions:
    return replace(RunOptions(out=out, device="cpu", threads=1, save_every=2), **changes)  # type: ignore[arg-type]


@pytest.fixture
def options(tmp_path: Path) -> RunOptions:
    return options_for(tmp_path / "run")


def weights(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / "last").glob("*.safetensors")
    return load_file(file)


def stop_at(step: int, config: TrainConfig, options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until a step is done, and no further."""
    original = loop.Run._step

    def failing(self: loop.Run, epoch: int, batch: Batch, **others: float) -> float:
        loss = original(self, epoch, batch, **others)
        if self.step == step:
            raise KeyboardInterrupt
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_step", failing)
        with pytest.raises(KeyboardInterrupt):
            train(config, options)


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_a_run_learns_and_leaves_everything_behind(model_directory: Path, options: RunOptions) -> None:
    config = config_for(model_directory)
    result = train(replace(config, optim=replace(config.optim, epochs=6)), options)
    steps, evaluations = read_metrics(result.out, "step"), read_metrics(result.out, "evaluation")
    assert result.steps == len(steps) == 6 * 4
    assert [entry["step"] for entry in steps] == list(range(1, 25))
    assert [entry["epoch"] for entry in evaluations] == list(range(7))
    first, last = (sum(entry["loss"] for entry in part) for part in (steps[:4], steps[-4:]))
    assert last < first
    for entry in steps:
        assert entry["loss"] == pytest.approx(entry["global"] + entry["token"])
        assert 0 <= entry["saturated"] <= 1
        assert entry["grad_norm"] > 0
        assert entry["waited"] >= 0
        assert 1 <= entry["scale"] <= 100
    best = max(evaluations[1:], key=lambda entry: entry["mean_R@1"])
    assert result.best == {"epoch": best["epoch"], "mean_R@1": best["mean_R@1"]}
    assert result.last["epoch"] == 6
    assert json.loads((result.out / "config.json").read_text())["optim"]["epochs"] == 6
    assert not list(result.out.glob(".*new*"))


def test_same_seed_same_weights_other_seed_others(model_directory: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(config_for(model_directory, seed=seed), options_for(tmp_path / name))
    assert_same_weights(tmp_path / "a", tmp_path / "b")
    assert any(not torch.equal(value, weights(tmp_path / "c")[name]) for name, value in weights(tmp_path / "a").items())


@pytest.mark.parametrize("negatives", [pytest.param("micro", marks=pytest.mark.slow), "batch"])
def test_stopping_at_any_step_changes_nothing(
    negatives: str, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout is on, so this needs the random state too; stops fall before, at and after checkpoints."""
    optim = replace(config_for(model_directory).optim, negatives=negatives)
    config = config_for(model_directory, optim=optim)
    train(config, options_for(tmp_path / "whole"))
    for stop in (1, 2, 3, 5, 8):
        out = tmp_path / f"stopped{stop}"
        stop_at(stop, config, options_for(out), monkeypatch)
        resume(out)
        assert_same_weights(tmp_path / "whole", out)
        assert [entry["step"] for entry in read_metrics(out, "step")] == list(range(1, 9))


def test_a_killed_process_resumes_to_the_same_weights(model_directory: Path, tmp_path: Path) -> None:
    """SIGKILL a real process again and again, at moments nobody chose, until the run is through."""
    script = (
        "import sys; from pathlib import Path; from dataclasses import replace;"
        "import hnclip.train.loop as loop, hnclip.train.run_data as run_data;"
        "from hnclip.data.records import DataSet; from hnclip.data.scenes import scene_records;"
        "from hnclip.config import RunOptions, TrainConfig, from_json;"
        "records = scene_records('park', 'train', families=8, members=4);"
        "records += scene_records('park', 'validation', families=5);"
        "run_data.open_data = lambda source, read, splits: DataSet(source, tuple(records));"
        "out = Path(sys.argv[1]);"
        "started = (out / 'config.json').exists();"
        "go = (lambda: loop.resume(out)) if started else "
        "(lambda: loop.train(from_json(TrainConfig, Path(sys.argv[2]).read_text()), "
        "from_json(RunOptions, Path(sys.argv[3]).read_text())));"
        "print('go', flush=True); go()"
    )
    config, options = config_for(model_directory), options_for(tmp_path / "whole", save_every=1)
    train(config, options)
    killed = tmp_path / "killed"
    files = tmp_path / "settings.json", tmp_path / "options.json"
    for file, content in zip(files, (config, replace(options, out=killed))):
        file.write_text(to_json(content))
    kills = 0
    for delay in (0.15, 1.0, 300):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(killed), *map(str, files)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        process.stdout.readline()  # imports are done; the delay counts from here
        deadline = time.monotonic() + delay
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.stdout.close()
        process.wait()
        if (killed / "result.json").exists():
            break
    assert kills >= 1
    assert_same_weights(tmp_path / "whole", killed)
    assert [entry["step"] for entry in read_metrics(killed, "step")] == list(range(1, 9))


def test_options_are_written_and_reread(model_directory: Path, options: RunOptions) -> None:
    config = config_for(model_directory)
    train(config, options)
    assert from_json(RunOptions, (options.out / "options.json").read_text()) == options
    assert saved_options(options.out) == options
    saved = saved_config(options.out)
    assert saved.optim.precision in ("fp32", "bf16")  # auto is resolved once
    assert replace(saved, optim=config.optim) == config
    (options.out / "options.json").unlink()  # the defaults, where there are none
    assert saved_options(options.out) == RunOptions(out=options.out)


def test_a_moved_run_is_resumed_where_it_is(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(model_directory)
    train(config, options_for(tmp_path / "whole"))
    stop_at(3, config, options_for(tmp_path / "before"), monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "before").rename(tmp_path / "elsewhere" / "after")
    assert resume(moved).out == moved
    assert_same_weights(tmp_path / "whole", moved)
    assert saved_options(moved) == options_for(moved)
    assert from_json(RunOptions, (moved / "options.json").read_text()).out == moved
    assert not (tmp_path / "before").exists()


@pytest.mark.parametrize(
    "changes",
    [{"save_every": 1}, {"evaluate_batch": 3}, {"device": "auto"}, {"tensorboard": True}],
    ids=lambda changes: next(iter(changes)),
)
def test_other_options_end_in_the_same_weights(
    changes: dict[str, object], model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where and how a run is executed may change when it is resumed, and is saved with it."""
    config = config_for(model_directory)
    if changes.get("device") == "auto" and find_device("auto").type != "cpu":
        pytest.skip("another device computes other bits")
    train(config, options_for(tmp_path / "whole"))
    stop_at(3, config, options_for(tmp_path / "stopped"), monkeypatch)
    other = options_for(tmp_path / "nowhere", **changes)
    resume(tmp_path / "stopped", other)
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")
    assert [entry["step"] for entry in read_metrics(tmp_path / "stopped", "step")] == list(range(1, 9))
    assert saved_options(tmp_path / "stopped") == replace(other, out=tmp_path / "stopped")
    assert not (tmp_path / "nowhere").exists()


def test_a_finished_run_is_left_alone(model_directory: Path, tmp_path: Path) -> None:
    config, options = config_for(model_directory), options_for(tmp_path / "run")
    first = train(config, options)
    stamp = (tmp_path / "run" / "last" / "model.safetensors").stat().st_mtime_ns
    assert resume(tmp_path / "run") == first
    assert (tmp_path / "run" / "last" / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="already holds a run"):
        train(config, options)


def test_nan_stops_the_run_and_names_the_last_good_state(
    model_directory: Path, options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = step.BACKWARD["micro"]

    def poisoned(model: torch.nn.Module, *arguments: object, **others: object) -> object:
        result = original(model, *arguments, **others)
        if (options.out / "checkpoint.pt").exists():
            result.terms["global"].fill_(float("nan"))
        return result

    monkeypatch.setitem(step.BACKWARD, "micro", poisoned)
    with pytest.raises(TrainingDiverged, match=r"step 3: .*global nan.*checkpoint\.pt"):
        train(config_for(model_directory), options)
    state = load_state(options.out)
    assert state is not None
    assert state.step == 2
    assert all(torch.isfinite(value).all() for value in state.model.values())


def test_frozen_margins_come_from_the_initial_encoder(model_directory: Path, tmp_path: Path) -> None:
    """Live and frozen margins agree in the first step of a run and part afterwards."""
    runs = {}
    for source in ("live", "frozen"):
        objective = ObjectiveConfig(margin_source=source, token_weight=0.0)  # type: ignore[arg-type]
        result = train(config_for(model_directory, objective=objective), options_for(tmp_path / source))
        runs[source] = [entry["global"] for entry in read_metrics(result.out, "step")]
    # Dropout makes the live margins of a step differ a little from those of the evaluation mode.
    assert runs["live"][0] == pytest.approx(runs["frozen"][0], rel=0.05)
    assert runs["live"][-1] != pytest.approx(runs["frozen"][-1], rel=1e-4)


def test_cut_captions_are_counted_and_said(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def long_ones(source: str, read: object, splits: object) -> DataSet:
        records: list[Record] = []
        for split in ("train", "validation"):
            first, *others = scene_records("park", split, families=2, members=4)
            records += [replace(first, captions=("a red house " * 200,)), *others]
        return DataSet(source, tuple(records))

    monkeypatch.setattr(run_data, "open_data", long_ones)
    caplog.set_level("INFO", logger="hnclip")
    base = config_for(model_directory)
    train(replace(base, optim=replace(base.optim, epochs=1)), options_for(tmp_path / "run"))
    assert "1 of 8 training texts (caption) are truncated at 248 tokens" in caplog.messages
    assert "1 of 8 validation captions are truncated at 248 tokens" in caplog.messages
    (entry,) = read_metrics(tmp_path / "run", "data")
    assert entry["truncated"] == {"caption": 1}
    assert entry["validation_truncated"] == 1


def test_micro_and_batch_negatives_differ(model_directory: Path, tmp_path: Path) -> None:
    losses = {}
    for negatives in ("micro", "batch"):
        base = config_for(model_directory)
        config = replace(base, optim=replace(base.optim, negatives=negatives))
        result = train(config, options_for(tmp_path / negatives))
        losses[negatives] = read_metrics(result.out, "step")[0]["infonce"]
    assert losses["batch"] > losses["micro"]  # 7 negatives are harder than 3


def test_a_full_disk_keeps_the_old_checkpoint(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config_for(model_directory), options_for(tmp_path / "run"))
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    state = load_state(tmp_path / "run")
    assert state is not None

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"No space left.*intact"):
        save_state(tmp_path / "run", replace(state, step=99))
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before
    assert not list((tmp_path / "run").glob(".checkpoint*"))


def test_two_writers_are_refused(tmp_path: Path) -> None:
    held = "from hnclip.train.checkpoint import only_writer; from pathlib import Path; import sys, time\n"
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
    with only_writer(tmp_path):  # a killed holder holds nothing
        pass


def test_damaged_checkpoints_are_named(model_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"checkpoint\.pt .*damaged"):
        load_state(tmp_path)
    assert load_state(tmp_path / "nowhere") is None
    with pytest.raises(ValueError, match="holds no run"):
        resume(tmp_path / "nowhere")


def test_unknown_device_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="device 'warp'"):
        find_device("warp")
    assert find_device("cpu") == torch.device("cpu")


def test_bf16_trains(model_directory: Path, options: RunOptions) -> None:
    base = config_for(model_directory)
    config = replace(base, optim=replace(base.optim, precision="bf16", epochs=1))
    result = train(config, options)
    assert result.steps == 4
    assert all(value.dtype == torch.float32 for value in weights(result.out).values())


def test_tensorboard_events_are_written(model_directory: Path, tmp_path: Path) -> None:
    base = config_for(model_directory)
    train(replace(base, optim=replace(base.optim, epochs=1)), options_for(tmp_path / "run", tensorboard=True))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    logged = [event.value for event in events.Scalars("step/loss")]
    assert logged == pytest.approx([entry["loss"] for entry in read_metrics(tmp_path / "run", "step")], rel=1e-6)


ADAPTED = {
    "lora": AdaptConfig(method="lora", rank=2, dropout=0.1, projections=True),
    "dora": AdaptConfig(method="dora", rank=2, dropout=0.1, towers="text"),
    "frozen": AdaptConfig(freeze_image="all", freeze_text=1),
}


def base_weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(("name", "negatives"), [("lora", "batch"), ("dora", "micro"), ("frozen", "batch")])
def test_stopping_changes_nothing_when_only_a_part_trains(
    name: str, negatives: str, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds that part alone; dropout is on, in the adapters too, and the temperature trains."""
    optim = replace(config_for(model_directory).optim, negatives=negatives)
    config = config_for(model_directory, optim=optim, adapt=ADAPTED[name])
    train(config, options_for(tmp_path / "whole"))
    stop_at(3, config, options_for(tmp_path / "stopped"), monkeypatch)
    resume(tmp_path / "stopped")
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")
    state = load_state(tmp_path / "whole")
    assert state is not None
    scale = "logit_scale"
    assert sum(map(len, (group["params"] for group in state.optimizer["param_groups"]))) == len(state.model)
    if name == "frozen":
        start, end = base_weights(model_directory), weights(tmp_path / "whole")
        moved = {key for key in start if not torch.equal(start[key], end[key])}
        text = "text_model.encoder.layers.1.", "text_model.final_layer_norm.", "text_projection.", scale
        assert moved == {key for key in start if key.startswith(text)}
        assert {key.removeprefix("backbone.") for key in state.model} == moved
    else:
        kept = {key.removeprefix("backbone.").replace(".default", "") for key in state.model}
        kept = {key.replace(".modules_to_save", "").replace("vector.weight", "vector") for key in kept}
        assert kept == {*weights(tmp_path / "whole"), f"base_model.model.{scale}"}
        scales = [json.loads((tmp_path / run / "last" / "hnclip.json").read_text()) for run in ("whole", "stopped")]
        assert scales[0] == scales[1]
        settings = json.loads((tmp_path / "whole" / "last" / "adapter_config.json").read_text())
        chosen = [settings[key] for key in ("r", "lora_alpha", "lora_dropout", "use_dora")]
        assert chosen == [2, 32.0, 0.1, name == "dora"]
        parts = {"vision_model", "text_model", "visual_projection", "text_projection"}
        assert {key.split(".")[2] for key in weights(tmp_path / "whole")} == (
            {"text_model"} if name == "dora" else parts
        )


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_run_with_adapters_leaves_adapters(
    method: str, model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The base does not move, and what is on disk, opened again, is the model that was trained."""
    models: list[DualEncoder] = []
    caplog.set_level("INFO", logger="hnclip")
    base = config_for(model_directory, adapt=AdaptConfig(method=method, rank=2))  # type: ignore[arg-type]
    config = replace(base, optim=replace(base.optim, epochs=1, scale_lr=0.0))
    with pytest.MonkeyPatch.context() as patch:
        original = loop.Run._save_model
        patch.setattr(loop.Run, "_save_model", lambda run, *rest: (models.append(run.model), original(run, *rest)))
        train(config, options_for(tmp_path / "run"))
    assert caplog.messages[0].startswith("model: CLIP with patches of 16, 2 + 2 layers")
    assert caplog.messages[1] == describe_trainable(models[0])
    assert caplog.messages[1].endswith("temperature fixed at 14.3")
    for name in ("best", "last"):
        files = {file.name for file in (tmp_path / "run" / name).iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json", "hnclip.json"} <= files
        assert "model.safetensors" not in files
    trained = {
        key.replace(".base_layer", ""): value for key, value in models[0].backbone.get_base_model().state_dict().items()
    }
    for key, value in base_weights(model_directory).items():
        assert torch.equal(trained[key], value), key

    texts = models[0].tokenize([record.captions[0] for record in scene_records("park", "test", families=1)])
    vectors = [model.eval().encode_texts(texts).vectors for model in (models[0], load(tmp_path / "run" / "last"))]
    torch.testing.assert_close(*vectors, rtol=0, atol=1e-5)
    assert (vectors[0] - load(model_directory).eval().encode_texts(texts).vectors).abs().max() > 1e-3


def test_a_checkpoint_of_other_parts_is_refused_by_name(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(model_directory, adapt=ADAPTED["frozen"])
    stop_at(3, config, options_for(tmp_path / "run"), monkeypatch)
    changed = replace(config, adapt=AdaptConfig(freeze_image="all"))
    (tmp_path / "run" / "config.json").write_text(to_json(changed))
    with pytest.raises(ValueError, match=r"tensor backbone\.text_model\.embeddings\."):
        resume(tmp_path / "run")


def test_a_run_that_cannot_start_leaves_nothing_in_the_way(model_directory: Path, options: RunOptions) -> None:
    base = config_for(model_directory)
    fixed = replace(base.optim, scale_lr=0.0)
    for config, message in (
        (replace(base, adapt=AdaptConfig(freeze_image=7)), "image tower has 2 blocks"),
        (
            replace(base, adapt=AdaptConfig(freeze_image="all", freeze_text="all"), optim=fixed),
            "nothing is left to train",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            train(config, options)
        assert not (options.out / "config.json").exists()
        assert not (options.out / "options.json").exists()


@pytest.mark.parametrize("bias_trains", [False, True])
def test_a_parameter_without_gradient_is_in_nobodys_way(
    bias_trains: bool, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SigLIP's bias is frozen, because nothing reads it; the run would not mind if it were not."""
    from transformers import SiglipConfig, SiglipModel

    tokenizer = load(model_directory).tokenizer
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    torch.manual_seed(0)
    backbone = SiglipModel(SiglipConfig(text_config=text, vision_config={**tower, "image_size": 32, "patch_size": 16}))
    save(wrap(backbone, tokenizer), tmp_path / "siglip")
    if bias_trains:
        monkeypatch.setattr(loop, "freeze", lambda model, **_: None)
    config = config_for(tmp_path / "siglip")
    train(config, options_for(tmp_path / "whole"))
    stop_at(3, config, options_for(tmp_path / "stopped"), monkeypatch)
    resume(tmp_path / "stopped")
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")
    state = load_state(tmp_path / "whole")
    assert state is not None
    assert ("backbone.logit_bias" in state.model) == bias_trains
    assert torch.equal(weights(tmp_path / "whole")["logit_bias"], base_weights(tmp_path / "siglip")["logit_bias"])


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_short_model_is_stretched_before_it_is_trained(
    method: str, model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import CLIPModel

    short = load(model_directory)
    short.backbone.config.text_config.max_position_embeddings = 40
    save(wrap(CLIPModel(short.backbone.config), short.tokenizer), tmp_path / "short")
    caplog.set_level("INFO", logger="hnclip")
    base = config_for(tmp_path / "short", context=60, keep=10, ratio=2, adapt=AdaptConfig(method=method))  # type: ignore[arg-type]
    train(replace(base, optim=replace(base.optim, epochs=1)), options_for(tmp_path / "run"))
    assert "stretched from 40 to 60 tokens (keep 10, ratio 2)" in caplog.messages[0]
    assert load(tmp_path / "run" / "last").context == 60


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_scale_of_the_start_can_be_chosen_and_kept(method: str, model_directory: Path, tmp_path: Path) -> None:
    base = config_for(model_directory, adapt=AdaptConfig(method=method))  # type: ignore[arg-type]
    optim = replace(base.optim, epochs=1, lr=1e-2, scale=20.0)
    kept, trained = replace(optim, scale_lr=0.0), replace(optim, scale_lr=1e-2)
    for name, chosen in (("kept", kept), ("trained", trained)):
        train(replace(base, optim=chosen), options_for(tmp_path / name))
    scales = {name: [entry["scale"] for entry in read_metrics(tmp_path / name, "step")] for name in ("kept", "trained")}
    assert scales["kept"] == pytest.approx([20.0] * 4)
    assert load(str(tmp_path / "kept" / "last")).scale.item() == pytest.approx(20.0)
    assert scales["trained"][0] == pytest.approx(20.0, rel=0.05)
    assert len({*scales["trained"]}) == 4


@pytest.mark.parametrize(("changes", "warned"), [({}, True), ({"scale_max": 200.0}, False), ({"scale_lr": 0.0}, False)])
def test_a_temperature_beyond_the_clamp_is_announced(
    changes: dict[str, float], warned: bool, model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(model_directory)
    with torch.no_grad():
        model.backbone.logit_scale.fill_(math.log(150))
    save(model, tmp_path / "sharp")
    base = config_for(tmp_path / "sharp")
    caplog.set_level("INFO", logger="hnclip")
    config = replace(base, optim=replace(base.optim, epochs=1, **changes))  # type: ignore[arg-type]
    train(config, options_for(tmp_path / "run"))
    assert any("inverse temperature 150.0 will be clamped to 100" in line for line in caplog.messages) == warned
