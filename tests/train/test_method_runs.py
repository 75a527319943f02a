"""Whole runs of every method: one process and two, both kinds of negatives, stopped and continued, half precision.

Some records lack regions, so that views and parts are absent here and there. As in test_parallel.py, numbers of several
processes are compared in float64 without dropout; what promises the same bits, in float32 with dropout.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import together
import torch
from safetensors.torch import load_file
from small_runs import small_runs

import hnclip.train.loop as loop
import hnclip.train.run_data as run_data
from hnclip.config import OptimConfig, RunOptions, SpeedConfig, TrainConfig
from hnclip.core import Record
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.models.load import load
from hnclip.objectives.registry import METHODS, apply_method, build_objective
from hnclip.train.checkpoint import load_state
from hnclip.train.distributed import process_group
from hnclip.train.log import read_metrics
from hnclip.train.loop import resume, train

LIMIT = 15  # batches of 8 and 7, micro-batches of 4, 4, 4 and 3
NAMES = tuple(name for name in METHODS if name != "hn_clip")
# By name: method, fidelity, global term, mode, negatives.
RUNS = {
    "long_clip": ("long_clip", "corrected", "smoothed", "ddp", "batch"),
    "finelip": ("finelip", "official", "none", "ddp", "micro"),
    "finelip fsdp": ("finelip", "corrected", "hn", "fsdp", "batch"),
    "goal": ("goal", "corrected", "hn", "ddp", "micro"),
    "goal batch": ("goal", "official", "infonce", "ddp", "batch"),
    "smartclip": ("smartclip", "corrected", "hn", "ddp", "batch"),
    "smartclip fsdp": ("smartclip", "corrected", "infonce", "fsdp", "micro"),
    "structxlip": ("structxlip", "corrected", "hn", "ddp", "micro"),
    "structxlip fsdp": ("structxlip", "official", "infonce", "fsdp", "batch"),
}


class Stop(Exception):
    """A run that ends here."""


@functools.cache
def scenes(source: str) -> DataSet:
    train, validation = (
        scene_records("park", split, families=n, members=4) for split, n in (("train", 4), ("validation", 2))
    )
    return DataSet(source, (*(_poorer(row, record) for row, record in enumerate(train)), *validation))


def _poorer(row: int, record: Record) -> Record:
    """Some records without regions, some with a single one, one with a region that is not in its caption."""
    if row % 4 == 0:
        return replace(record, regions=())
    if row % 4 == 1:
        return replace(record, regions=record.regions[:1])
    return record


def small(double: bool) -> pytest.MonkeyPatch:
    return small_runs(scenes, double=double)


def config_for(
    method: str,
    model: Path,
    *,
    fidelity: str = "corrected",
    global_loss: str | None = None,
    negatives: str = "micro",
) -> TrainConfig:
    optim = OptimConfig(epochs=2, micro_batch=4, accumulate=2, lr=1e-3, readout_lr=2e-3, negatives=negatives)  # type: ignore[arg-type]
    base = apply_method(TrainConfig(model=str(model), optim=optim, limit=LIMIT), method, fidelity)  # type: ignore[arg-type]
    if global_loss is None:
        return base
    return replace(base, objective=replace(base.objective, global_loss=global_loss))  # type: ignore[arg-type]


def options_for(out: Path, parallel: str = "ddp") -> RunOptions:
    return RunOptions(out=out, device="cpu", threads=1, save_every=1, speed=SpeedConfig(parallel=parallel))  # type: ignore[arg-type]


def run_named(name: str, model: Path, out: Path) -> None:
    method, fidelity, global_loss, mode, negatives = RUNS[name]
    config = config_for(method, model, fidelity=fidelity, global_loss=global_loss, negatives=negatives)
    train(config, options_for(out, mode))


def work(number: int, folder: Path, model: Path) -> None:
    with process_group("cpu"):
        patch = small(double=True)
        for name in RUNS:
            run_named(name, model, folder / f"2 {name}")
        patch.undo()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Path:
    """Every run by one process and by two."""
    folder = tmp_path_factory.mktemp("methods")
    patch = small(double=True)
    for name in RUNS:
        run_named(name, model_directory, folder / f"1 {name}")
    patch.undo()
    together.run(2, work, folder / "found", folder, model_directory)
    return folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / "last").glob("*.safetensors")
    return load_file(file)


def steps(run: Path) -> list[dict]:
    return [{**entry, "pairs_per_second": 0, "waited": 0} for entry in read_metrics(run, "step")]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_do_what_one_does(runs: Path, name: str) -> None:
    """Every logged number, the weights, and those of readouts, which are in the checkpoint alone."""
    found, expected = runs / f"2 {name}", runs / f"1 {name}"
    for entry, other in zip(steps(found), steps(expected), strict=True):
        assert entry.keys() == other.keys()
        for key, value in other.items():
            assert entry[key] == (pytest.approx(value, rel=1e-6, abs=1e-12) if isinstance(value, float) else value), key
    mine, others = weights(found), weights(expected)
    assert mine.keys() == others.keys()
    for key, value in others.items():
        torch.testing.assert_close(mine[key], value, rtol=0, atol=1e-8, msg=lambda m, n=key: f"{n}: {m}")
    states = [load_state(run) for run in (found, expected)]
    readouts = [name for name in states[1].model if name.startswith("readouts.")]  # type: ignore[union-attr]
    assert bool(readouts) == (RUNS[name][0] in ("finelip", "smartclip"))
    for key in readouts:
        rows = states[0].model[key]  # type: ignore[union-attr]
        whole = rows if isinstance(rows, torch.Tensor) else rows[0 : rows.shape[0]]
        torch.testing.assert_close(whole, states[1].model[key], rtol=0, atol=1e-8)  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_term_is_logged_and_learnt(runs: Path, name: str) -> None:
    method, _, global_loss, *_ = RUNS[name]
    terms = {*METHODS[method].weights, *(() if global_loss == "none" else ("global",))}
    for entry in steps(runs / f"1 {name}"):
        assert terms <= entry.keys()
        assert entry["loss"] == pytest.approx(sum(entry[term] for term in terms))
    last = steps(runs / f"1 {name}")[-1]
    assert all(last[term] != 0 for term in terms)
    assert all(torch.isfinite(value).all() for value in weights(runs / f"1 {name}").values())


@pytest.mark.parametrize("negatives", [pytest.param("micro", marks=pytest.mark.slow), "batch"])
@pytest.mark.parametrize("method", NAMES)
def test_stopping_changes_no_bit(
    method: str, negatives: str, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = small(double=False)
    config = config_for(method, model_directory, global_loss="hn", negatives=negatives)
    whole, stopped = options_for(tmp_path / "whole"), options_for(tmp_path / "stopped")
    train(config, whole)
    original = loop.Run._save

    def saving(self: loop.Run) -> None:
        original(self)
        if self.step == 3:
            raise Stop

    with monkeypatch.context() as stopping:
        stopping.setattr(loop.Run, "_save", saving)
        with pytest.raises(Stop):
            train(config, stopped)
    resume(stopped.out)
    patch.undo()
    assert steps(whole.out) == steps(stopped.out)
    for name, value in weights(whole.out).items():
        assert torch.equal(weights(stopped.out)[name], value), name


@pytest.mark.parametrize("method", NAMES)
def test_the_global_term_is_all_that_a_swap_changes(method: str, model_directory: Path, tmp_path: Path) -> None:
    """Of the first step, whose weights are the same: the other terms to the bit."""
    patch = small(double=False)
    entries = {}
    for name in ("infonce", "hn"):
        config = config_for(method, model_directory, global_loss=name)
        result = train(replace(config, optim=replace(config.optim, epochs=1)), options_for(tmp_path / name))
        entries[name] = steps(result.out)[0]
    patch.undo()
    for term in METHODS[method].weights:  # type: ignore[index]
        assert entries["hn"][term] == entries["infonce"][term]
    assert entries["hn"]["global"] != entries["infonce"]["global"]


@pytest.mark.parametrize("method", NAMES)
def test_half_precision(method: str, model_directory: Path, tmp_path: Path) -> None:
    patch = small(double=False)
    found = {}
    for precision in ("fp32", "bf16"):
        config = config_for(method, model_directory, global_loss="hn")
        config = replace(config, optim=replace(config.optim, epochs=1, precision=precision))  # type: ignore[arg-type]
        result = train(config, options_for(tmp_path / precision))
        found[precision] = steps(result.out)[0]
    patch.undo()
    assert found["bf16"]["loss"] != found["fp32"]["loss"]
    for term in ("global", *METHODS[method].weights):  # type: ignore[index]
        assert found["bf16"][term] == pytest.approx(found["fp32"][term], rel=0.1, abs=2e-3), term


def test_views_are_part_of_what_a_run_has_seen(model_directory: Path, monkeypatch) -> None:
    """Other short or filtered captions between stopping and resuming are other data."""
    config = config_for("structxlip", model_directory)
    marks = set()
    for change in ({}, {"short": "another"}, {"filtered": ("other words",)}):
        changed = [replace(record, **change) for record in scenes("a").records]
        monkeypatch.setattr(run_data, "open_data", lambda *_, changed=changed, **__: DataSet("b", tuple(changed)))
        objective = build_objective(config.objective)
        data = run_data.open_run_data(config, load(str(model_directory)), objective)
        marks.add(data.fingerprint())
    assert len(marks) == 3


def test_a_warm_up_as_long_as_the_run_is_said(
    model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patch = small(double=False)
    config = config_for("long_clip", model_directory)
    caplog.set_level("INFO", logger="hnclip")
    train(replace(config, optim=replace(config.optim, epochs=1, warmup=200)), options_for(tmp_path / "run"))
    patch.undo()
    assert any("warm-up of 200 steps is as long as the run of 2" in line for line in caplog.messages)
    assert any("Long-CLIP" in line and "smoothed" in line and "short 1" in line for line in caplog.messages)
    assert any("PCA_32 of 4" in line for line in caplog.messages)  # PCA of 4 pairs changes nothing


def test_probing_gradients_changes_no_bit(model_directory: Path, tmp_path: Path) -> None:
    """Of a method with parts and absent views: the probe looks at whole pictures and captions alone."""
    patch = small(double=False)
    config = config_for("goal", model_directory, global_loss="hn")
    config = replace(config, optim=replace(config.optim, epochs=1))
    plain = train(config, options_for(tmp_path / "plain"))
    probed = train(replace(config, probe_gradients=1), options_for(tmp_path / "probed"))
    patch.undo()
    assert steps(plain.out) == steps(probed.out)
    assert len(read_metrics(probed.out, "gradients")) == len(steps(probed.out))
    for name, value in weights(plain.out).items():
        assert torch.equal(weights(probed.out)[name], value), name
