"""Runs of every method: all terms are logged and learnt, and continue to the bit; two processes."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import torch
from small import ExactTrainer, assert_same, assert_same_weights, options_for, train_until, weights

from hnclip.config import OptimConfig, SpeedConfig, TrainConfig
from hnclip.core import Record
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.objectives.registry import METHODS, apply_method
from hnclip.training.checkpoint import load_checkpoint
from hnclip.training.distributed import process_group
from hnclip.training.log import read_metrics
from hnclip.training.runs import resume, train

LIMIT = 15  # batches of 8 and 7, micro-batches of 4, 4, 4 and 3
NAMES = tuple(name for name in METHODS if name != "hn_clip")
# By name: method, fidelity, global loss, mode, negatives.
RUNS = {
    "long_clip": ("long_clip", "corrected", "smoothed", "ddp", "batch"),
    "finelip": ("finelip", "official", "none", "ddp", "micro"),
    "finelip fsdp": ("finelip", "corrected", "hn", "fsdp", "batch"),
    "goal": ("goal", "corrected", "hn", "ddp", "memory"),
    "smartclip fsdp": ("smartclip", "corrected", "infonce", "fsdp", "micro"),
    "structxlip": ("structxlip", "corrected", "hn", "ddp", "micro"),
    "structxlip fsdp": ("structxlip", "official", "infonce", "fsdp", "batch"),
}


@functools.cache
def scenes() -> DataSet:
    train, validation = (
        scene_records("park", split, families=n, members=4) for split, n in (("train", 4), ("validation", 2))
    )
    return DataSet("scenes", (*(_with_fewer_regions(row, record) for row, record in enumerate(train)), *validation))


def _with_fewer_regions(row: int, record: Record) -> Record:
    """Some records without regions, some with a single one: views and parts are absent here and there."""
    return replace(record, regions=record.regions[: row % 4]) if row % 4 < 2 else record


def config_for(
    method: str, model: Path, fidelity: str = "corrected", global_loss: str = "hn", negatives: str = "micro"
) -> TrainConfig:
    memory = 6 if negatives == "memory" else 0
    optim = OptimConfig(
        epochs=1,
        micro_batch=4,
        accumulate=2,
        lr=1e-3,
        readout_lr=2e-3,
        negatives=negatives,
        memory=memory,  # type: ignore[arg-type]
    )
    optim = replace(optim, precision="fp32")
    base = apply_method(TrainConfig(model=str(model), optim=optim, limit=LIMIT), method, fidelity)  # type: ignore[arg-type]
    return replace(base, objective=replace(base.objective, global_loss=global_loss))  # type: ignore[arg-type]


def run_named(name: str, model: Path, out: Path) -> None:
    method, fidelity, global_loss, mode, negatives = RUNS[name]
    options = options_for(out, speed=SpeedConfig(parallel=mode), save_minutes=60.0)  # type: ignore[arg-type]
    ExactTrainer(config_for(method, model, fidelity, global_loss, negatives), options, data=scenes()).fit()


def work(number: int, folder: Path, model: Path) -> None:
    with process_group("cpu"):
        for name in RUNS:
            run_named(name, model, folder / f"2 {name}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Path:
    """Every run by one process and by two."""
    folder = tmp_path_factory.mktemp("methods")
    for name in RUNS:
        run_named(name, model_directory, folder / f"1 {name}")
    processes.run(2, work, folder / "found", folder, model_directory)
    return folder


def steps(run: Path) -> list[dict]:
    return [{**entry, "pairs_per_second": 0, "waited": 0} for entry in read_metrics(run, "step")]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_do_what_one_does(runs: Path, name: str) -> None:
    """Every logged number, the weights, and those of readouts, which are in the checkpoint alone."""
    found, expected = runs / f"2 {name}", runs / f"1 {name}"
    for entry, other in zip(steps(found), steps(expected), strict=True):
        assert entry == {k: pytest.approx(v, rel=1e-6, abs=1e-12) for k, v in other.items() if k != "kind"} | {
            "kind": "step"
        }
    assert_same(weights(found), weights(expected), atol=1e-8)
    states = [load_checkpoint(run) for run in (found, expected)]
    assert_same(*(state.model for state in states if state is not None), atol=1e-8)


@pytest.mark.parametrize("method", NAMES)
def test_a_method_trains_and_continues_to_the_bit(method: str, model_directory: Path, tmp_path: Path) -> None:
    """All terms are logged and not zero; dropout is on."""
    config = config_for(method, model_directory, negatives="batch" if method != "goal" else "memory")
    config = replace(config, optim=replace(config.optim, epochs=2))
    whole, stopped = (options_for(tmp_path / name) for name in ("whole", "stopped"))
    train(config, whole, data=scenes())
    train_until(3, config, stopped, scenes())
    resume(stopped.out, data=scenes())
    assert steps(whole.out) == steps(stopped.out)
    assert_same_weights(whole.out, stopped.out)
    terms = {"global", *METHODS[method].weights}  # type: ignore[index]
    for entry in steps(whole.out):
        assert entry["loss"] == pytest.approx(sum(entry[term] for term in terms))
    assert all(steps(whole.out)[-1][term] != 0 for term in terms)
    assert all(torch.isfinite(value).all() for value in weights(whole.out).values())


def test_a_long_warm_up_and_useless_settings_are_reported(
    model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hnclip")
    config = config_for("long_clip", model_directory)
    train(replace(config, optim=replace(config.optim, warmup=200)), options_for(tmp_path / "run"), data=scenes())
    for words in ("warm-up of 200 steps", "PCA_32 of 4", "short 1"):
        assert any(words in line for line in caplog.messages)
