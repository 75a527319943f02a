"""Two and four real processes (gloo) against one: gathers, gradients of a step, and whole runs as ddp and fsdp."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import processes
import pytest
import torch
from small import (
    ExactTrainer,
    Stop,
    assert_same,
    config_for,
    options_for,
    scenes,
    small_batch,
    small_encoder,
    small_memory,
    stop_at,
    train_exactly,
    weights,
)

from hnclip.config import AdaptConfig, ObjectiveConfig, OptimConfig, RunOptions, SpeedConfig, TrainConfig
from hnclip.core import Embeddings, ViewEmbeddings
from hnclip.data.records import DataSet
from hnclip.losses import hard_negative_loss
from hnclip.objectives.base import GlobalTerm
from hnclip.objectives.hn_clip import HNClip
from hnclip.training.checkpoint import load_checkpoint
from hnclip.training.distributed import (
    broadcast_object,
    clip_gradients,
    distribute,
    encode_shared,
    gather_embeddings,
    gather_rows,
    gather_tensors,
    is_distributed,
    process_group,
    rank,
    rank_seed,
    sum_gradients,
    world_size,
)
from hnclip.training.log import read_metrics
from hnclip.training.runs import resume, train
from hnclip.training.step import backward, split_batch

OBJECTIVE = HNClip(GlobalTerm(hard_negative_loss, frozen=True), {"token": 0.5})
# Pairs in the batch and in a micro-batch: even, uneven, and fewer pairs than four processes.
SIZES = ((8, 4), (11, 4), (3, 4))
STEPS = [
    (mode, negatives, *size)
    for mode, sizes in (("ddp", SIZES), ("fsdp", SIZES[1:]))
    for negatives in ("micro", "batch", "memory")
    for size in sizes
]


def optim(micro: int, negatives: str) -> OptimConfig:
    return OptimConfig(micro_batch=micro, negatives=negatives, precision="fp32")  # type: ignore[arg-type]


def one_step(batch, tokenizer, mode, negatives, pairs, micro):
    """Gradients and losses of the first pairs of a batch, of which this process encodes its share."""
    model = small_encoder(tokenizer)
    distribute(model, mode)
    rows, groups = split_batch(range(pairs), optim(micro, negatives), rank=rank(), world=world_size())
    memory = small_memory(batch, 7, 5)[0] if negatives == "memory" else None
    result = backward(model, rows_of(batch, rows), OBJECTIVE, optim(micro, negatives), groups, memory)

    def collect():
        found = {name: p.grad for name, p in model.named_parameters()}
        return {name: grad.clone() for name, grad in gather_tensors(found).items()}

    grads = collect()
    norm = clip_gradients(model, 0.01)
    kept = None if memory is None else memory.negatives().text
    return {
        "grads": grads,
        "terms": result.terms,
        "infonce": result.infonce,
        "norm": norm,
        "clipped": collect(),
        "memory": kept,
    }


def rows_of(batch, rows):
    """Any rows of a batch."""
    chosen, texts = torch.tensor(rows), batch.texts["caption"]
    text = replace(texts, ids=texts.ids[chosen], lengths=texts.lengths[chosen])[0 : len(rows)]
    images = {"full": batch.images["full"][chosen]}
    return replace(
        batch, images=images, texts={"caption": text}, ids=batch.ids[chosen], margin_text=batch.margin_text[chosen]
    )


def gathered_views(number):
    """Two image views, one without tokens. Process n has n + 1 pairs, the last one none."""
    last = number == world_size() - 1
    count = 1 if last else number + 1
    full, crop = torch.full((count, 3), float(number)), torch.full((count, 3), 20.0 + number)
    tokens = torch.full((count, 2 + number, 3), 10.0 + number)
    view = ViewEmbeddings(full, tokens, torch.ones(count, 2 + number, dtype=torch.bool))
    ids = torch.full((count, 1), number)
    here = Embeddings({"full": view, "crop": ViewEmbeddings(crop)}, {"caption": view}, torch.tensor(2.0), ids)
    every, offset = gather_embeddings(here, 0 if last else count)
    image = every.images["full"]
    return image.vectors[:, 0], image.tokens[..., 0], image.mask, every.images["crop"], every.ids.flatten(), offset


def sparse_gradients(number):
    """Parameters of two dtypes: used by all processes, by process 0 only, by none, and frozen."""
    model = torch.nn.ParameterList(torch.ones(2, dtype=dtype) for dtype in (torch.float64, torch.float32) * 2)
    model[3].requires_grad_(False)
    model[0].grad = torch.tensor([1.0, 2.0], dtype=torch.float64) * (number + 1)
    if number == 0:
        model[1].grad = torch.full((2,), 4.0)
    sum_gradients(model)
    return [parameter.grad for parameter in model]


def work_on_steps(number, batch, tokenizer):
    with process_group("cpu"):
        assert rank() == number
        linear = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(linear.weight, float(number))
        distribute(linear, "ddp")  # type: ignore[arg-type]
        found = {
            "views": gathered_views(number),
            "sparse": sparse_gradients(number),
            "rows": gather_rows(torch.tensor([[number]])).flatten().tolist(),
            "shared": encode_shared(lambda rows: torch.tensor(rows)[:, None], 5).flatten().tolist(),
            "object": broadcast_object(f"from {number}"),
            "weight": linear.weight.unique().tolist(),
            "seed": rank_seed(1, 2),
            "steps": {step: one_step(batch, tokenizer, *step) for step in STEPS},
        }
    assert not is_distributed()
    return found


@pytest.fixture(scope="module")
def batch_and_tokenizer():
    """The shortest captions come first, so the processes have different lengths."""
    return small_batch()


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, batch_and_tokenizer, tmp_path_factory):
    """What two and four real processes found."""
    return processes.run(request.param, work_on_steps, tmp_path_factory.mktemp("ranks"), *batch_and_tokenizer)


@pytest.fixture(scope="module")
def alone(batch_and_tokenizer):
    """What one process finds, by (negatives, pairs, micro-batch)."""
    return {
        (negatives, *size): one_step(*batch_and_tokenizer, "ddp", negatives, *size)
        for negatives in ("micro", "batch", "memory")
        for size in SIZES
    }


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_many_processes_compute_the_step_of_one(ranks, alone, step):
    """Terms, InfoNCE, the memory, and every gradient, that of the scale included; clipped by the norm of all."""
    mode, *case = step
    expected = alone[tuple(case)]
    norm = torch.stack([grad.norm() for grad in expected["grads"].values()]).norm()
    for number, process in enumerate(ranks):
        found = process["steps"][step]
        if mode == "ddp" or number == 0:  # whole tensors of a sharded model are gathered on rank 0
            assert_same(found["grads"], expected["grads"])
            assert_same(found["clipped"], {k: grad * 0.01 / (norm + 1e-6) for k, grad in expected["grads"].items()})
        assert_same(found["terms"], expected["terms"])
        torch.testing.assert_close(found["infonce"], expected["infonce"])
        torch.testing.assert_close(found["norm"], norm)
        torch.testing.assert_close(found["memory"], expected["memory"])


def test_gathered_embeddings(ranks):
    owners = [number for number in range(len(ranks) - 1) for _ in range(number + 1)]
    longest = 1 + len(ranks)  # the filler of the last process counts nowhere, but its length does
    for number, process in enumerate(ranks):
        vectors, tokens, mask, crop, ids, offset = process["views"]
        assert vectors.tolist() == ids.tolist() == owners
        assert tokens.tolist() == [[10 + o] * (2 + o) + [0] * (longest - 2 - o) for o in owners]
        assert mask.tolist() == [[True] * (2 + o) + [False] * (longest - 2 - o) for o in owners]
        assert crop.vectors[:, 0].tolist() == [20 + o for o in owners]
        assert crop.tokens is None
        assert offset == (len(owners) if number == len(ranks) - 1 else owners.index(number))


def test_gradients_are_summed_over_the_processes_that_have_one(ranks):
    total = sum(range(1, len(ranks) + 1))
    for process in ranks:
        everywhere, once, nowhere, frozen = process["sparse"]
        torch.testing.assert_close(everywhere, torch.tensor([1.0, 2.0], dtype=torch.float64) * total)
        torch.testing.assert_close(once, torch.full((2,), 4.0))
        assert nowhere is None
        assert frozen is None


def test_values_of_all_processes(ranks):
    for process in ranks:
        assert process["rows"] == list(range(len(ranks)))
        assert process["shared"] == list(range(5))
        assert process["object"] == "from 0"
        assert process["weight"] == [0]
    assert len({process["seed"] for process in ranks}) == len(ranks)


# Runs ---------------------------------------------------------------------------------------------------------

LIMIT = 27  # batches of 8, 8, 8 and 3: four processes cannot share the last one evenly
LORA = AdaptConfig(method="lora", rank=2, projections=True)
NO_BLOCK = AdaptConfig(freeze_image="all", freeze_text=2)  # only the norm, the projection and the scale train
FROZEN_MARGIN = ObjectiveConfig(margin_source="frozen", token_weight=0.0)
# By name: mode and configuration.
RUNS = {
    "ddp micro": ("ddp", {"probe_gradients": 2}),
    "ddp memory": ("ddp", {"optim": {"negatives": "memory", "memory": 16}, "objective": FROZEN_MARGIN, "cluster": 2}),
    "fsdp batch lora": ("fsdp", {"optim": {"negatives": "batch"}, "adapt": LORA, "probe_gradients": 2}),
    "fsdp micro frozen": ("fsdp", {"adapt": NO_BLOCK}),
}


def run_of(name: str, model: Path, out: Path) -> tuple[TrainConfig, RunOptions]:
    mode, changes = RUNS[name]
    optim = {"epochs": 1, **changes.get("optim", {})}  # type: ignore[attr-defined]
    config = config_for(model, limit=LIMIT, **{**changes, "optim": optim})  # type: ignore[dict-item]
    return config, options_for(out, speed=SpeedConfig(parallel=mode))  # type: ignore[arg-type]


def until(step: int, run) -> None:
    with pytest.raises(Stop):
        run(on_step=stop_at(step))


def work_on_runs(number: int, folder: Path, model: Path) -> dict[str, str]:
    world = int(os.environ["WORLD_SIZE"])
    with process_group("cpu"):
        for name in RUNS:
            train_exactly(*run_of(name, model, folder / f"2 {name}"))
        # Begun by one process, continued by two in either mode, and finished by one.
        for mode in ("ddp", "fsdp"):
            config, options = run_of("ddp micro", model, folder / f"via {mode}")
            options = replace(options, speed=SpeedConfig(parallel=mode))  # type: ignore[arg-type]
            until(3, partial(train_exactly, config, options))
        # With dropout, in float32: stopped and continued by the same number of processes.
        for mode in ("ddp", "fsdp"):
            config = config_for(model, optim={"epochs": 1, "negatives": "batch"}, limit=LIMIT)
            whole, stopped = (
                options_for(folder / f"{what} {mode}", speed=SpeedConfig(parallel=mode))  # type: ignore[arg-type]
                for what in ("whole", "stopped")
            )
            train(config, whole, data=scenes())
            until(3, partial(train, config, stopped, data=scenes()))
            resume(stopped.out, data=scenes())
        errors = {}
        cases = {
            "taken": (run_of("ddp micro", model, folder / f"{world} ddp micro"), scenes()),
            "other data": (
                run_of("ddp micro", model, folder / "refused"),
                DataSet("fewer", scenes().records[1:]) if number else scenes(),
            ),
        }
        for name, (run, data) in cases.items():
            try:
                train(*run, data=data)
            except ValueError as error:
                errors[name] = str(error)
    return errors


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("runs")
    for name in RUNS:
        train_exactly(*run_of(name, model_directory, folder / f"1 {name}"))
    for mode in ("ddp", "fsdp"):
        until(2, partial(train_exactly, *run_of("ddp micro", model_directory, folder / f"via {mode}")))
    errors = processes.run(2, work_on_runs, folder / "found", folder, model_directory)
    for mode in ("ddp", "fsdp"):
        train_exactly(*run_of("ddp micro", model_directory, folder / f"via {mode}"))
    return folder, errors


def assert_close_runs(found: Path, expected: Path) -> None:
    """Every number that is logged, the evaluation, and the weights at the end."""
    for kind in ("data", "step", "evaluation", "gradients"):
        entries, others = read_metrics(found, kind), read_metrics(expected, kind)
        assert len(entries) == len(others)
        for entry, other in zip(entries, others):
            assert entry.keys() == other.keys()
            for key, value in other.items():
                if key not in ("pairs_per_second", "waited"):
                    assert entry[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    assert_same(weights(found), weights(expected), atol=1e-9)
    assert (found / "result.json").exists()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_two_processes_is_a_run_of_one(runs, name: str) -> None:
    folder, _ = runs
    assert_close_runs(folder / f"2 {name}", folder / f"1 {name}")
    assert len(read_metrics(folder / f"1 {name}", "step")) == 4


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_run_continues_with_another_number_of_processes(runs, mode: str) -> None:
    folder, _ = runs
    assert_close_runs(folder / f"via {mode}", folder / "1 ddp micro")


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_stopped_run_of_two_processes_continues_to_the_bit(runs, mode: str) -> None:
    """Dropout included: every rank restores its own random state."""
    folder, _ = runs
    whole, stopped = folder / f"whole {mode}", folder / f"stopped {mode}"
    for name, value in weights(whole).items():
        assert torch.equal(weights(stopped)[name], value), name
    states = load_checkpoint(whole)
    assert states is not None
    assert not torch.equal(states.random[0]["cpu"], states.random[1]["cpu"])


def test_what_cannot_start_is_refused(runs, model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, errors = runs
    assert all("already holds a run" in error["taken"] for error in errors)
    assert all("different data" in error["other data"] for error in errors)
    assert not (folder / "refused" / "config.json").exists()
    monkeypatch.setattr("hnclip.training.setup.world_size", lambda: 8)
    with pytest.raises(ValueError, match="8 processes cannot share micro-batches of 4"):
        ExactTrainer(*run_of("ddp micro", model_directory, folder / "narrow"))
