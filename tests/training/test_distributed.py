"""Two and four real processes (gloo) against one: gathers, gradients of a step, and whole runs as ddp and fsdp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import (
    assert_same,
    assert_same_weights,
    config_for,
    options_for,
    run_processes,
    scenes,
    small_batch,
    small_encoder,
    small_memory,
    stop_at,
    train_exactly,
    train_scenes,
    weights,
)

from hnclip.config import AdaptConfig, ObjectiveConfig, OptimConfig, RunOptions, SpeedConfig, TrainConfig
from hnclip.losses import hard_negative_loss
from hnclip.objectives.base import GlobalTerm
from hnclip.objectives.hn_clip import HNClip
from hnclip.objectives.registry import METHODS, apply_method
from hnclip.training.checkpoint import load_checkpoint
from hnclip.training.distributed import (
    clip_gradients,
    distribute,
    gather_tensors,
    is_distributed,
    process_group,
    rank,
    world_size,
)
from hnclip.training.log import read_metrics
from hnclip.training.runs import resume, train
from hnclip.training.step import backward, split_batch

OBJECTIVE = HNClip(GlobalTerm(hard_negative_loss, frozen=True), {"token": 0.5})
# Pairs in the batch and in a micro-batch: uneven, and fewer pairs than four processes.
SIZES = ((11, 4), (3, 4))
NEGATIVES = ("micro", "batch", "memory")
STEPS = [("ddp", negatives, *size) for negatives in NEGATIVES for size in SIZES]
STEPS += [("fsdp", negatives, 11, 4) for negatives in NEGATIVES]


def one_step(batch, tokenizer, mode, negatives, pairs, micro):
    """Gradients and losses of the first pairs of a batch, of which this process encodes its share."""
    model = small_encoder(tokenizer)
    distribute(model, mode)
    optim = OptimConfig(micro_batch=micro, negatives=negatives, precision="fp32")
    rows, groups = split_batch(range(pairs), optim, rank=rank(), world=world_size())
    memory = small_memory(batch, 7, 5)[0] if negatives == "memory" else None
    result = backward(model, rows_of(batch, rows), OBJECTIVE, optim, groups, memory)

    def collect():
        found = {name: p.grad for name, p in model.named_parameters()}
        return {name: grad.clone() for name, grad in gather_tensors(found).items()}

    found = {"grads": collect(), "norm": clip_gradients(model, 0.01), "clipped": collect()}
    kept = None if memory is None else memory.negatives().text
    return {**found, "terms": result.terms, "infonce": result.infonce, "memory": kept}


def rows_of(batch, rows):
    """Any rows of a batch."""
    chosen, texts = torch.tensor(rows), batch.texts["caption"]
    text = replace(texts, ids=texts.ids[chosen], lengths=texts.lengths[chosen])[0 : len(rows)]
    images = {"full": batch.images["full"][chosen]}
    return replace(
        batch, images=images, texts={"caption": text}, ids=batch.ids[chosen], margin_text=batch.margin_text[chosen]
    )


def work(number, batch, tokenizer, folder, model):
    """The steps in every process; runs with two of them."""
    with process_group("cpu"):
        found = {step: one_step(batch, tokenizer, *step) for step in STEPS}
        if world_size() == 2:
            runs_of_two(folder, model)
    assert not is_distributed()
    return found


@pytest.fixture(scope="module")
def batch_and_tokenizer():
    """The shortest captions come first, so the processes have different lengths."""
    return small_batch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, batch_and_tokenizer, folder, model_directory):
    """What two and four real processes found."""
    if request.param == 2:
        begin_runs(folder, model_directory)
    return run_processes(request.param, work, folder / "found", *batch_and_tokenizer, folder, model_directory)


@pytest.fixture(scope="module")
def alone(batch_and_tokenizer):
    """What one process finds, by (negatives, pairs, micro-batch)."""
    cases = [(negatives, *size) for negatives in NEGATIVES for size in SIZES]
    return {case: one_step(*batch_and_tokenizer, "ddp", *case) for case in cases}


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_many_processes_compute_the_step_of_one(ranks, alone, step):
    """Terms, InfoNCE, the memory, and every gradient, that of the scale included; clipped by the norm of all."""
    mode, *case = step
    expected = alone[tuple(case)]
    norm = torch.stack([grad.norm() for grad in expected["grads"].values()]).norm()
    for number, process in enumerate(ranks):
        found = process[step]
        if mode == "ddp" or number == 0:  # whole tensors of a sharded model are gathered on rank 0
            assert_same(found["grads"], expected["grads"])
            assert_same(found["clipped"], {k: grad * 0.01 / (norm + 1e-6) for k, grad in expected["grads"].items()})
        assert_same(found["terms"], expected["terms"])
        torch.testing.assert_close(found["infonce"], expected["infonce"])
        torch.testing.assert_close(found["norm"], norm)
        torch.testing.assert_close(found["memory"], expected["memory"])


# Runs ---------------------------------------------------------------------------------------------------------

LIMIT = 19  # batches of 8, 8 and 3 pairs
FROZEN_MARGIN = ObjectiveConfig(margin_source="frozen", token_weight=0.0)
LORA = AdaptConfig(method="lora", rank=2, projections=True)
MEMORY = {"negatives": "memory", "memory": 16}
# By name, which begins with the mode and ends with a method or an adapter.
RUNS: dict[str, dict[str, Any]] = {
    "ddp micro": {"probe_gradients": 2},
    "ddp memory goal": {"optim": MEMORY, "cluster": 2},
    "fsdp batch lora": {"optim": {"negatives": "batch"}, "adapt": LORA, "objective": FROZEN_MARGIN},
    "fsdp batch structxlip": {"optim": {"negatives": "batch", "readout_lr": 2e-3}},
}


def run_of(name: str, model: Path, out: Path, mode: str | None = None) -> tuple[TrainConfig, RunOptions]:
    options = options_for(out, speed=SpeedConfig(parallel=mode or name.split()[0]))  # type: ignore[arg-type]
    config = config_for(model, limit=LIMIT, **{**RUNS[name], "optim": {"epochs": 1, **RUNS[name].get("optim", {})}})
    if (method := name.split()[-1]) in METHODS:
        config = apply_method(config, method, "corrected")  # type: ignore[arg-type]
    return config, options


def begin_runs(folder: Path, model: Path) -> None:
    """Runs of one process, which two processes repeat or continue."""
    for name in RUNS:
        train_exactly(*run_of(name, model, folder / f"1 {name}"))
    for mode in ("ddp", "fsdp"):
        stop_at(2, train_exactly, *run_of("ddp micro", model, folder / f"via {mode}"))


def runs_of_two(folder: Path, model: Path) -> None:
    for name in RUNS:
        train_exactly(*run_of(name, model, folder / f"2 {name}"))
    for mode in ("ddp", "fsdp"):
        stop_at(3, train_exactly, *run_of("ddp micro", model, folder / f"via {mode}", mode))
        # With dropout, in float32: stopped and continued by the same number of processes.
        train_scenes(*run_of("ddp micro", model, folder / f"whole {mode}", mode))
        stop_at(2, train, *run_of("ddp micro", model, folder / f"stopped {mode}", mode))
        resume(folder / f"stopped {mode}", data=scenes())


def assert_close_runs(found: Path, expected: Path) -> None:
    """Every number that is logged, the evaluation, the weights, and those of readouts in the checkpoint."""
    for kind in ("data", "step", "evaluation", "gradients"):
        entries, others = read_metrics(found, kind), read_metrics(expected, kind)
        assert len(entries) == len(others)
        for entry, other in zip(entries, others):
            assert entry.keys() == other.keys()
            for key, value in other.items():
                if key not in ("pairs_per_second", "waited"):
                    close = pytest.approx(value, rel=1e-6, abs=1e-12) if isinstance(value, float) else value
                    assert entry[key] == close, key
    assert_same(weights(found), weights(expected), atol=1e-8)
    states = [load_checkpoint(run) for run in (found, expected)]
    assert_same(*(state.model for state in states if state is not None), atol=1e-8)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_two_processes_is_a_run_of_one(ranks, folder: Path, name: str) -> None:
    assert_close_runs(folder / f"2 {name}", folder / f"1 {name}")


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_run_continues_with_another_number_of_processes(
    ranks, folder: Path, mode: str, model_directory: Path
) -> None:
    """Begun by one process, continued by two, finished by one."""
    train_exactly(*run_of("ddp micro", model_directory, folder / f"via {mode}"))
    assert_close_runs(folder / f"via {mode}", folder / "1 ddp micro")


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_stopped_run_of_two_processes_continues_to_the_same_bits(ranks, folder: Path, mode: str) -> None:
    """Dropout included: every rank restores its own random state."""
    assert_same_weights(folder / f"stopped {mode}", folder / f"whole {mode}")
    state = load_checkpoint(folder / f"whole {mode}")
    assert state is not None
    assert not torch.equal(state.random[0]["cpu"], state.random[1]["cpu"])
