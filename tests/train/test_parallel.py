"""Whole runs of two and four processes against one: metrics, evaluation, weights, and going on elsewhere.

Numbers are compared in float64 without dropout, where the order of sums is all that differs; what promises the same
bits is compared in float32 with dropout.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import together
import torch
from safetensors.torch import load_file
from small_runs import small_runs

import hnclip.train.distributed as distributed
import hnclip.train.loop as loop
import hnclip.train.lost as lost
import hnclip.train.run_data as run_data
from hnclip.config import AdaptConfig, ObjectiveConfig, OptimConfig, RunOptions, SpeedConfig, TrainConfig
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.train.checkpoint import load_state
from hnclip.train.distributed import process_group, rank, world_size
from hnclip.train.log import read_metrics
from hnclip.train.loop import resume, train

LIMIT = 27  # batches of 8, 8, 8 and 3: four processes cannot share the last one evenly
STEPS = 4


class Stop(Exception):
    """A run that ends here, in all processes."""


@functools.cache
def scenes(source: str) -> DataSet:
    train, validation = (
        scene_records("park", split, families=n, members=4) for split, n in (("train", 8), ("validation", 5))
    )
    return DataSet(source, (*train, *validation))


def plain(double: bool) -> pytest.MonkeyPatch:
    return small_runs(scenes, double=double)


def config_for(model: Path, **changes: object) -> TrainConfig:
    negatives = changes.pop("negatives", "micro")
    optim = OptimConfig(epochs=1, micro_batch=4, accumulate=2, lr=1e-3, negatives=negatives)  # type: ignore[arg-type]
    return replace(TrainConfig(model=str(model), optim=optim, limit=LIMIT), **changes)  # type: ignore[arg-type]


def options_for(out: Path, parallel: str = "ddp") -> RunOptions:
    return RunOptions(out=out, device="cpu", threads=1, save_every=1, speed=SpeedConfig(parallel=parallel))  # type: ignore[arg-type]


PLAIN = ObjectiveConfig()
FROZEN_MARGIN = ObjectiveConfig(margin_source="frozen", token_weight=0.0)
LORA = AdaptConfig(method="lora", rank=2, projections=True)
ONE_TOWER = AdaptConfig(freeze_image="all", freeze_text=1)
NO_BLOCK = AdaptConfig(freeze_image="all", freeze_text=2)  # only the norm, the projection and the temperature train
# By name: mode, negatives, what trains, objective, size of clusters.
RUNS = {
    "ddp micro": ("ddp", "micro", AdaptConfig(), PLAIN, 0),
    "ddp batch lora": ("ddp", "batch", LORA, PLAIN, 0),
    "ddp micro frozen": ("ddp", "micro", ONE_TOWER, FROZEN_MARGIN, 2),
    "fsdp micro": ("fsdp", "micro", AdaptConfig(), PLAIN, 0),
    "fsdp batch": ("fsdp", "batch", AdaptConfig(), FROZEN_MARGIN, 2),
    "fsdp batch lora": ("fsdp", "batch", LORA, PLAIN, 0),
    "fsdp micro frozen": ("fsdp", "micro", NO_BLOCK, PLAIN, 0),
}
NAMES = {2: tuple(RUNS), 4: ("ddp micro", "fsdp batch", "fsdp micro frozen")}


def run_named(name: str, model: Path, out: Path) -> None:
    mode, negatives, adapt, objective, cluster = RUNS[name]
    config = config_for(model, negatives=negatives, adapt=adapt, objective=objective, cluster=cluster)
    train(config, options_for(out, mode))


def until(step: int, go: object) -> None:
    """Run until a step is done and saved, and no further."""
    with pytest.MonkeyPatch.context() as patch:
        original = loop.Run._save

        def saving(self: loop.Run) -> None:
            original(self)
            if self.step == step:
                raise Stop

        patch.setattr(loop.Run, "_save", saving)
        with pytest.raises(Stop):
            go()  # type: ignore[operator]


def work(number: int, folder: Path, model: Path) -> dict[str, str]:
    world = int(os.environ["WORLD_SIZE"])
    distributed.GRACE = lost.GRACE = 0  # type: ignore[misc]
    with process_group("cpu"):
        patch = plain(double=True)
        for name in NAMES[world]:
            run_named(name, model, folder / f"{world} {name}")
        for name, mode in (("there", "fsdp"), ("back", "ddp")):  # begun by one process, then by two, then by four
            parallel = mode if world == 2 else {"fsdp": "ddp", "ddp": "fsdp"}[mode]
            other = options_for(folder / name, parallel)
            until(world // 2 + 1, lambda o=other: resume(o.out, o))
        errors = refusals(folder, model)
        patch.undo()
        patch = plain(double=False)
        if world == 2:
            for mode in ("ddp", "fsdp"):
                config = config_for(model, negatives="batch")
                train(config, options_for(folder / f"whole {mode}", mode))
                stopped = options_for(folder / f"stopped {mode}", mode)
                until(2, lambda c=config, o=stopped: train(c, o))
                resume(stopped.out)
        patch.undo()
    return errors


def refusals(folder: Path, model: Path) -> dict[str, str]:
    """Who says what if a run cannot begin."""

    world = world_size()
    config, refused = config_for(model), folder / f"refused {world}"

    def attempt(config: TrainConfig, out: Path = refused) -> str:
        try:
            train(config, options_for(out))
        except (ValueError, OSError) as error:
            return str(error)
        except SystemExit as exit:
            return f"silent {exit.code}"
        return "began"

    found = {"taken": attempt(config, folder / f"{world} ddp micro")}
    if world > 2:
        found["narrow"] = attempt(replace(config, optim=replace(config.optim, micro_batch=2)))
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(run_data, "open_data", lambda *_, **__: (_ for _ in ()).throw(OSError("no such disk")))
        found["lacking"] = attempt(config)
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            fewer = DataSet("fewer", scenes("scenes/park").records[1:])
            patch.setattr(run_data, "open_data", lambda *_, **__: fewer)
        found["other"] = attempt(config)
    found["left"] = str((refused / "config.json").exists())
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> dict[str, object]:
    """All runs: of one process, of two, of four; and two runs that go through all of them."""
    folder = tmp_path_factory.mktemp("runs")
    patch = plain(double=True)
    for name in RUNS:
        run_named(name, model_directory, folder / f"1 {name}")
    for name in ("there", "back"):
        until(1, lambda n=name: train(config_for(model_directory), options_for(folder / n)))
    found = {world: together.run(world, work, folder / f"found{world}", folder, model_directory) for world in (2, 4)}
    for name in ("there", "back"):
        resume(folder / name)
    patch.undo()
    return {"folder": folder, **{str(world): results for world, results in found.items()}}


def weights(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / "last").glob("*.safetensors")
    return load_file(file)


def assert_close_runs(found: Path, expected: Path) -> None:
    for kind in ("data", "step", "evaluation"):
        entries, others = read_metrics(found, kind), read_metrics(expected, kind)
        assert len(entries) == len(others) > 0
        for entry, other in zip(entries, others):
            for timing in ("pairs_per_second", "waited"):
                entry.pop(timing, None), other.pop(timing, None)
            assert entry.keys() == other.keys()
            for key, value in other.items():
                assert entry[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    mine, others = weights(found), weights(expected)
    assert mine.keys() == others.keys()
    for name, value in others.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    assert (found / "result.json").exists()


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in NAMES for name in NAMES[world]])
def test_a_run_of_many_is_a_run_of_one(runs: dict, name: str, world: int) -> None:
    """Every number that is logged, the evaluation, and the weights at the end; the last batch is uneven."""
    folder = runs["folder"]
    assert_close_runs(folder / f"{world} {name}", folder / f"1 {name}")
    assert len(read_metrics(folder / f"1 {name}", "step")) == STEPS


@pytest.mark.parametrize("name", ["there", "back"])
def test_a_run_goes_on_with_any_number_of_processes(runs: dict, name: str) -> None:
    """One, two, four and again one process, ddp → fsdp → ddp and the other way round."""
    assert_close_runs(runs["folder"] / name, runs["folder"] / "1 ddp micro")
    assert not (runs["folder"] / name / "checkpoint").exists()


def test_shards_are_files_of_their_processes(runs: dict) -> None:
    folder = runs["folder"]
    for world in (2, 4):
        files = {file.name for file in (folder / f"{world} fsdp batch" / "checkpoint").iterdir()}
        assert files == {"state.pt", *(f"shard-{n}-of-{world}.safetensors" for n in range(1, world + 1))}
        assert not (folder / f"{world} fsdp batch" / "checkpoint.pt").exists()
        sharded, whole = load_state(folder / f"{world} fsdp batch"), load_state(folder / "1 fsdp batch")
        assert sharded is not None
        assert whole is not None
        assert len(sharded.random) == world
        assert sharded.model.keys() == whole.model.keys()
        for name, tensor in whole.model.items():
            rows = sharded.model[name]
            found = rows[0 : rows.shape[0]] if tensor.ndim else rows
            torch.testing.assert_close(found, tensor, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_stopping_changes_no_bit(runs: dict, mode: str) -> None:
    """With as many processes as before, dropout included: every process finds its own random state."""
    whole, stopped = (runs["folder"] / f"{what} {mode}" for what in ("whole", "stopped"))
    for name, value in weights(whole).items():
        assert torch.equal(weights(stopped)[name], value), name
    numbers = [
        [{**e, "pairs_per_second": 0, "waited": 0} for e in read_metrics(run, "step")] for run in (whole, stopped)
    ]
    assert numbers[0] == numbers[1]
    states = load_state(whole).random  # type: ignore[union-attr]
    assert not torch.equal(states[0]["cpu"], states[1]["cpu"])


@pytest.mark.parametrize("world", ["2", "4"])
def test_what_is_wrong_is_said_once(runs: dict, world: str) -> None:
    messages = {key: [process[key] for process in runs[world]] for key in runs[world][0]}
    silent = ["silent 1"] * (int(world) - 1)
    assert "already holds a run" in messages["taken"][0]
    assert messages["taken"][1:] == silent
    if world == "4":
        assert "4 processes cannot share micro-batches of 2 pairs" in messages["narrow"][0]
    for key, text in (("lacking", "no such disk"), ("other", "process 1 sees other data than process 0")):
        spoken = messages[key].pop(1)
        assert text in spoken
        assert messages[key] == silent
    assert set(messages["left"]) == {"False"}
