"""Runs that measure gradients on the way: what they write, and that nothing else is changed by a bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import together
import torch
from test_parallel import config_for, options_for, plain, until

import hnclip.train.loop as loop
from hnclip.config import AdaptConfig, ObjectiveConfig, TrainConfig, to_json
from hnclip.train.checkpoint import load_state
from hnclip.train.distributed import process_group
from hnclip.train.gradient_probe import GradientProbe
from hnclip.train.log import MetricsLog, read_metrics
from hnclip.train.loop import resume, train, train_or_continue

LIMIT = 19  # batches of 8, 8 and 3 pairs in micro-batches of 4: measured at steps 0 and 2
LORA = AdaptConfig(method="lora", rank=2, dropout=0.3)
# By name: negatives and what trains. Dropout is in all of them.
ALONE = {
    "micro": ("micro", AdaptConfig()),
    "batch": ("batch", AdaptConfig()),
    "lora": ("batch", LORA),
}
TOGETHER = {
    "ddp": ("micro", LORA),
    "fsdp": ("batch", AdaptConfig()),
}


def small(model: Path, **changes: Any) -> TrainConfig:
    return config_for(model, limit=LIMIT, **changes)


def probed(config: TrainConfig) -> TrainConfig:
    return replace(config, probe_gradients=2)


def steps(run: Path) -> list[dict[str, Any]]:
    return [{**entry, "pairs_per_second": 0, "waited": 0} for entry in read_metrics(run, "step")]


def tensors(tree: Any) -> list[Any]:
    """Every value of a checkpoint, in order."""
    if isinstance(tree, dict):
        return [value for key in tree for value in tensors(tree[key])]
    if isinstance(tree, list | tuple):
        return [value for part in tree for value in tensors(part)]
    if hasattr(tree, "pieces"):  # rows in files
        return [tree[0 : tree.shape[0]]]
    return [tree]


def assert_same_bits(plain: Path, measured: Path) -> None:
    """Weights, optimiser, random states of all processes, and every number of every step and evaluation."""
    states = [load_state(run) for run in (plain, measured)]
    for part in ("model", "optimizer", "random", "best", "last"):
        values, others = (tensors(getattr(state, part)) for state in states)
        assert len(values) == len(others) > 0
        for value, other in zip(values, others):
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, part
    assert steps(plain) == steps(measured)
    assert len(steps(plain)) == 3
    assert read_metrics(plain, "evaluation") == read_metrics(measured, "evaluation")
    assert not read_metrics(plain, "gradients")
    assert [entry["step"] for entry in read_metrics(measured, "gradients")] == [0, 2]


@pytest.fixture
def scenes() -> Any:
    patch = plain(double=False)
    yield
    patch.undo()


@pytest.mark.usefixtures("scenes")
@pytest.mark.parametrize("name", ALONE)
def test_measuring_changes_no_bit(name: str, model_directory: Path, tmp_path: Path) -> None:
    negatives, adapt = ALONE[name]
    config = small(model_directory, negatives=negatives, adapt=adapt)
    train(config, options_for(tmp_path / "plain"))
    train(probed(config), options_for(tmp_path / "probed"))
    assert_same_bits(tmp_path / "plain", tmp_path / "probed")
    for entry in read_metrics(tmp_path / "probed", "gradients"):
        assert (entry["epoch"], entry["negatives"], entry["gamma"]) == (1, negatives, 0.5)
        assert entry["hn"] > entry["infonce"] > 0  # margins of captions that are alike
        assert -1 <= entry["cosine"] <= 1
        assert entry["ratio"] == entry["hn_norm"] / entry["infonce_norm"]


@pytest.mark.usefixtures("scenes")
@pytest.mark.parametrize("stop", [1, 2])
def test_a_stopped_run_measures_the_same(stop: int, model_directory: Path, tmp_path: Path) -> None:
    """Between two measurements, and just before one; the log is the same line by line."""
    config = probed(small(model_directory))
    whole, stopped = options_for(tmp_path / "whole"), options_for(tmp_path / "stopped")
    train(config, replace(whole, save_every=100))  # saving reads what a step found, and so orders the log by itself
    until(stop, lambda: train(config, stopped))
    resume(stopped.out)
    logs = [
        [{**json.loads(line), "pairs_per_second": 0, "waited": 0} for line in text.splitlines()]
        for text in ((run / "metrics.jsonl").read_text() for run in (whole.out, stopped.out))
    ]
    assert logs[0] == logs[1]
    kinds = [entry["kind"] for entry in logs[0] if entry["kind"] in ("step", "gradients")]
    assert kinds == ["gradients", "step", "step", "gradients", "step"]


def work(number: int, folder: Path, model: Path) -> None:
    with process_group("cpu"):
        for double in (False, True):
            patch = plain(double=double)
            for mode, (negatives, adapt) in TOGETHER.items():
                out = folder / f"2 {mode} {double}"
                config = small(model, negatives=negatives, adapt=without_dropout(adapt, double))
                if not double:
                    train(config, options_for(out, mode))
                train(probed(config), options_for(out.with_name(f"{out.name} probed"), mode))
            patch.undo()


def without_dropout(adapt: AdaptConfig, really: bool) -> AdaptConfig:
    return replace(adapt, dropout=0.0) if really else adapt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Path:
    """Runs of two processes: with dropout measured and not, and in float64 measured as one process does."""
    folder = tmp_path_factory.mktemp("together")
    together.run(2, work, folder / "found", folder, model_directory)
    patch = plain(double=True)
    for mode, (negatives, adapt) in TOGETHER.items():
        config = small(model_directory, negatives=negatives, adapt=without_dropout(adapt, True))
        train(probed(config), options_for(folder / f"1 {mode} probed"))
    patch.undo()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mode", TOGETHER)
def test_measuring_changes_no_bit_of_several_processes(folder: Path, mode: str) -> None:
    assert_same_bits(folder / f"2 {mode} False", folder / f"2 {mode} False probed")


@pytest.mark.parametrize("mode", TOGETHER)
def test_several_processes_measure_what_one_does(folder: Path, mode: str) -> None:
    found, expected = (read_metrics(folder / f"{name} probed", "gradients") for name in (f"2 {mode} True", f"1 {mode}"))
    assert len(found) == len(expected) == 2
    for entry, other in zip(found, expected):
        assert other["dtype"] == "float64"
        assert entry == {k: pytest.approx(v, rel=1e-6) if isinstance(v, float) else v for k, v in other.items()}


@pytest.mark.usefixtures("scenes")
@pytest.mark.parametrize(
    ("objective", "gamma"),
    [(ObjectiveConfig(gamma=0.8), 0.8), (ObjectiveConfig(global_loss="infonce", gamma=0.8, token_weight=0.0), 0.5)],
)
def test_gamma_is_the_runs_own_where_it_has_one(
    objective: ObjectiveConfig, gamma: float, model_directory: Path, tmp_path: Path
) -> None:
    config = small(model_directory, objective=objective, probe_gradients=3)
    out = train(config, options_for(tmp_path / "run")).out
    (entry,) = read_metrics(out, "gradients")
    assert (entry["gamma"], entry["step"]) == (gamma, 0)
    first = read_metrics(out, "step")[0]
    name = "hn" if objective.global_loss == "hn" else "infonce"
    assert entry[name] == first["global"]
    if not objective.token_weight:
        assert entry["infonce_norm"] == pytest.approx(first["grad_norm"], rel=1e-5)


@pytest.mark.usefixtures("scenes")
def test_numbers_that_are_none_are_not_written(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the step after it found the same, the run would end with a message; here it does not."""
    nan = {"infonce_norm": float("nan"), "hn_norm": 1.0}
    monkeypatch.setattr(GradientProbe, "probe", lambda *_: nan)
    result = train(probed(small(model_directory)), options_for(tmp_path / "run"))
    assert not read_metrics(result.out, "gradients")


def test_what_is_missing_is_no_event(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, tensorboard=True)
    log.write({"kind": "gradients", "step": 0, "cosine": None, "dtype": "float32", "hn": 2.0})
    log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["gradients/hn"]
    assert read_metrics(tmp_path, "gradients")[0]["cosine"] is None


@pytest.mark.usefixtures("scenes")
def test_a_run_is_begun_continued_or_used(
    model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, options = small(model_directory), options_for(tmp_path / "run")
    until(2, lambda: train_or_continue(config, options))
    caplog.set_level("INFO", logger="hnclip")
    result = train_or_continue(config, options)
    assert any("resuming at step 2 of 3" in line for line in caplog.messages)
    assert train_or_continue(config, options) == result
    with pytest.raises(ValueError, match="holds a run with other settings"):
        train_or_continue(replace(config, seed=1), options)
    older = json.loads(to_json(config))  # of a version without these options
    del older["probe_gradients"], older["fraction"]
    (options.out / loop.CONFIG).write_text(json.dumps(older))
    assert train_or_continue(config, options) == result
