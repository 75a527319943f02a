"""Two and four real processes (gloo) against one: what is gathered, shared, averaged and agreed on."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import together
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from test_grad_cache import DUPLICATES, assert_same, gradients, small_data, small_encoder, whole_batch

import hnclip.train.distributed as distributed
import hnclip.train.run_data as run_data
from hnclip.config import OptimConfig
from hnclip.core import Embeddings, ViewEmbeddings
from hnclip.losses import hard_negative_loss
from hnclip.objectives.base import GlobalTerm
from hnclip.objectives.hn_clip import HNClip
from hnclip.train.distributed import (
    agreement,
    copy_from_first,
    gather_embeddings,
    gather_rows,
    is_distributed,
    mean_over_processes,
    process_group,
    rank,
    seed_of_process,
    tell_everybody,
    world_size,
)
from hnclip.train.grad_cache import BACKWARD, cached_backward, micro_backward
from hnclip.train.gradients import GradientMean
from hnclip.train.parallel import Replicated, Sharded, whole_tensor
from hnclip.train.run_data import own_share

WORLDS = (2, 4)
OBJECTIVE = HNClip(GlobalTerm(hard_negative_loss, frozen=True), {"token": 0.5})
# Pairs in the batch and in a micro-batch: even, uneven, and fewer pairs than four processes.
SIZES = ((8, 4), (11, 5), (11, 4), (3, 4), (2, 2))
STEPS = [
    (mode, negatives, *size)
    for mode, sizes in (("ddp", SIZES), ("fsdp", SIZES[2:4]))
    for negatives in BACKWARD
    for size in sizes
]


def work(number, batch, tokenizer):
    distributed.GRACE = 0
    with process_group("cpu"):
        assert is_distributed()
        assert rank() == number
        found = {
            "gathered": gathered_views(number),
            "sparse": sparse_gradients(number),
            "agreed": agreed(number),
            "values": values(number),
            "steps": {step: one_step(batch, tokenizer, *step) for step in STEPS},
            "alone": local_negatives(batch, tokenizer),
        }
    assert not is_distributed()
    return found


def one_step(batch, tokenizer, mode, negatives, pairs, micro):
    """Gradients and numbers of the share that this process has of the first pairs of the batch, and what was sent."""
    model = small_encoder(tokenizer)
    parallel = (Replicated if mode == "ddp" else Sharded)(model)
    share = own_share(list(range(pairs)), OptimConfig(micro_batch=micro, negatives=negatives))
    local = rows_of(batch, share.rows)
    with counting() as calls:
        result = BACKWARD[negatives](
            model, local, OBJECTIVE, chunk=1, gather=parallel.gather, sync=parallel.sync, share=share
        )
        parallel.finish()
    grads = {name: None if p.grad is None else whole_tensor(p.grad).clone() for name, p in model.named_parameters()}
    norm = parallel.clip(0.01)
    clipped = {name: whole_tensor(p.grad).clone() for name, p in model.named_parameters()}
    terms = dict(zip(result.terms, mean_over_processes(torch.stack(list(result.terms.values())))))
    infonce = mean_over_processes(result.infonce)
    return {"grads": grads, "terms": terms, "infonce": infonce, "norm": norm, "clipped": clipped, "calls": calls}


def rows_of(batch, rows):
    """Any rows of a batch, as the data would make them."""
    texts = batch.texts["caption"]
    chosen = torch.tensor(rows)
    text = replace(texts, ids=texts.ids[chosen], lengths=texts.lengths[chosen])
    return replace(
        batch,
        images={name: view[chosen] for name, view in batch.images.items()},
        texts={"caption": text[0 : len(rows)]},
        ids=batch.ids[chosen],
        margin_text=batch.margin_text[chosen],
    )


@contextmanager
def counting():
    """Counts the collectives that carry gradients: those of `GradientMean`, which do not wait, and FSDP's."""
    calls = {"mean": 0, "fsdp": 0}

    def counted(name, original, **needed):
        def call(*arguments, **options):
            calls[name] += needed.items() <= options.items()
            return original(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted("mean", dist.all_reduce, async_op=True))
        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(dist, name):
                patch.setattr(dist, name, counted("fsdp", getattr(dist, name)))
        yield calls


def local_negatives(batch, tokenizer):
    """The control: without gathering, each process has only its own negatives."""
    model = small_encoder(tokenizer)
    half = 8 // world_size()
    local = batch[rank() * half : (rank() + 1) * half]
    mean = GradientMean(model.parameters())
    grads, _ = gradients(model, lambda: (cached_backward(model, local, OBJECTIVE, chunk=2), mean.finish()))
    return grads


def gathered_views(number):
    """Two image views, one without tokens; what arrives where, and whose gradient comes back. Process n has n + 1
    pairs, the last one none."""
    last = number == world_size() - 1
    count = 1 if last else number + 1
    full = torch.full((count, 3), float(number), dtype=torch.float64, requires_grad=True)
    tokens = torch.full((count, 2 + number, 3), 10.0 + number, dtype=torch.float64, requires_grad=True)
    crop = torch.full((count, 3), 20.0 + number, dtype=torch.float32)
    view = ViewEmbeddings(full, tokens, torch.ones(count, 2 + number, dtype=torch.bool))
    scale = torch.tensor(2.0, requires_grad=True)
    ids = torch.full((count, 1), number)
    here = Embeddings({"full": view, "crop": ViewEmbeddings(crop)}, {"caption": view}, scale, ids)
    every = gather_embeddings(replace(here, rows=0) if last else here)
    assert every.scale is scale
    assert every.images["crop"].tokens is None
    assert not every.images["crop"].vectors.requires_grad
    image = every.images["full"]
    ((1 + number) * image.vectors.sum() + image.tokens[0].sum()).backward()
    return {
        "vectors": image.vectors.detach(),
        "tokens": image.tokens.detach()[..., 0],
        "mask": image.mask,
        "crop": every.images["crop"].vectors,
        "ids": every.ids,
        "rows": (every.offset, every.rows),
        "vector grad": full.grad,
        "token grad": tokens.grad[..., 0],
    }


def sparse_gradients(number):
    """Six parameters of two dtypes: used by all, by process 0 only, by nobody, frozen, and one that gets its gradient
    before the last backward pass; buckets of a few bytes, so that there are several."""
    kinds = (torch.float64, torch.float32, torch.float64, torch.float32, torch.float64, torch.float32)
    parameters = [torch.nn.Parameter(torch.ones(2, 2, dtype=dtype)) for dtype in kinds]
    everybody, one, _, frozen, early, twice = parameters
    frozen.requires_grad_(False)
    mean = GradientMean(parameters, bucket=8)
    for step in range(2):  # nothing is left over from the first
        for parameter in parameters:
            parameter.grad = None
        with mean.exchange(False):
            (early.sum() * (number + 1) + twice.sum()).backward()
        with mean.exchange(True):
            loss = (everybody * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum() * (number + step) + 3 * twice.sum()
            (loss + 4 * one.sum() if number == 0 else loss).backward()
        mean.finish()
    return [parameter.grad for parameter in parameters]


def agreed(number):
    """How a block ends if nobody fails, if the last process does, and if all do."""
    ends = []
    for failing in ((), (world_size() - 1,), range(world_size())):
        for patient in (False, True):
            try:
                with agreement(patient=patient):
                    if number in failing:
                        raise ValueError(f"from {number}")
                ends.append("well")
            except ValueError as error:
                ends.append(str(error))
            except SystemExit as exit:
                ends.append(f"silent {exit.code}")
    return ends


def values(number):
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(number)
    copy_from_first(model)
    return {
        "mean": mean_over_processes(torch.tensor([number, 2.0 * number])).tolist(),
        "rows": gather_rows(torch.tensor([[number]])).tolist(),
        "told": tell_everybody(f"from {number}"),
        "weight": model.weight.unique().tolist(),
        "seed": seed_of_process(1, 2),
    }


@pytest.fixture(scope="module")
def eleven_pairs():
    """A batch and its tokenizer. The shortest captions come first, so the processes have unlike lengths."""
    data, tokenizer = small_data()
    batch = data.batch(range(11))
    return replace(batch, ids=DUPLICATES, texts={"caption": batch.texts["caption"]}), tokenizer


@pytest.fixture(scope="module", params=WORLDS)
def processes(request, eleven_pairs, tmp_path_factory):
    """What two and four real processes found."""
    return together.run(request.param, work, tmp_path_factory.mktemp("processes"), *eleven_pairs)


@pytest.fixture(scope="module")
def alone(eleven_pairs):
    """What one process finds, by (negatives, pairs, micro-batch)."""
    batch, tokenizer = eleven_pairs
    model = small_encoder(tokenizer)
    return {
        (negatives, *size): gradients(
            model, lambda n=negatives, s=size: BACKWARD[n](model, batch[: s[0]], OBJECTIVE, chunk=s[1])
        )
        for negatives in BACKWARD
        for size in SIZES
    }


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_many_processes_are_one(processes, alone, step):
    """Terms, InfoNCE and every gradient, the scale's included, in every process; clipped by the norm of all."""
    mode, *case = step
    grads, result = alone[tuple(case)]
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    for process in processes:
        found = process["steps"][step]
        assert_same(found["grads"], grads)
        assert_same(found["terms"], result.terms)
        torch.testing.assert_close(found["infonce"], result.infonce)
        torch.testing.assert_close(found["norm"], norm)
        assert_same(found["clipped"], {name: grad * 0.01 / (norm + 1e-6) for name, grad in grads.items()})
        # Once per step, however many chunks: all gradients fit into one bucket, or FSDP sends four blocks and the rest,
        # and the scale alone.
        assert found["calls"] == {"mean": 1, "fsdp": 5 if mode == "fsdp" else 0}


def test_whole_batch_is_the_reference(alone, eleven_pairs):
    """The reference itself is right, and the two kinds of negatives differ."""
    batch, tokenizer = eleven_pairs
    model = small_encoder(tokenizer)
    grads, terms = gradients(model, lambda: whole_batch(model, batch, OBJECTIVE))
    assert_same(alone["batch", 11, 4][0], grads)
    assert_same(alone["batch", 11, 4][1].terms, terms)
    weight = "backbone.visual_projection.weight"
    assert (alone["micro", 11, 4][0][weight] - grads[weight]).abs().max() > 1e-6


def test_without_gathering_negatives_stay_local(processes, eleven_pairs):
    batch, tokenizer = eleven_pairs
    model = small_encoder(tokenizer)
    micro, _ = gradients(model, lambda: micro_backward(model, batch[:8], OBJECTIVE, chunk=8 // len(processes)))
    whole, _ = gradients(model, lambda: whole_batch(model, batch[:8], OBJECTIVE))
    for process in processes:
        assert_same(process["alone"], micro)
    weight = "backbone.visual_projection.weight"
    assert (micro[weight] - whole[weight]).abs().max() > 1e-6


def test_gathered_tensors_and_gradients(processes):
    world = len(processes)
    owners = [number for number in range(world - 1) for _ in range(number + 1)]
    longest = 1 + world  # the pair of the last process counts nowhere, but its length does
    total = sum(range(1, world + 1))
    for number, process in enumerate(processes):
        found = process["gathered"]
        assert found["vectors"][:, 0].tolist() == owners
        assert found["tokens"].tolist() == [[10 + o] * (2 + o) + [0] * (longest - 2 - o) for o in owners]
        assert found["mask"].tolist() == [[True] * (2 + o) + [False] * (longest - 2 - o) for o in owners]
        assert found["crop"][:, 0].tolist() == [20 + o for o in owners]
        assert found["crop"].dtype == torch.float32
        assert found["ids"].flatten().tolist() == owners
        last = number == world - 1
        assert found["rows"] == ((0, 1) if last else (owners.index(number), number + 1))
        # Weight n + 1 in process n; all of them read the tokens of the first pair.
        assert found["vector grad"].unique().tolist() == [0.0 if last else total]
        expected = torch.zeros_like(found["token grad"])
        if number == 0:
            expected[0] = world
        assert torch.equal(found["token grad"], expected)


def test_gradients_are_averaged_wherever_they_come_from(processes):
    world = len(processes)
    middle = (world - 1) / 2
    for process in processes:
        everybody, one, nobody, frozen, early, twice = process["sparse"]
        torch.testing.assert_close(everybody, torch.tensor([[1.0, 2], [3, 4]], dtype=torch.float64) * (middle + 1))
        torch.testing.assert_close(one, torch.full((2, 2), 4.0 / world))
        torch.testing.assert_close(early, torch.full((2, 2), middle + 1, dtype=torch.float64))
        torch.testing.assert_close(twice, torch.full((2, 2), 4.0))
        assert nobody is None
        assert frozen is None


def test_a_failure_ends_all_and_is_said_once(processes):
    last = len(processes) - 1
    for number, process in enumerate(processes):
        one = f"from {last}" if number == last else "silent 1"
        every = "from 0" if number == 0 else "silent 1"
        assert process["agreed"] == ["well", "well", one, one, every, every]


def test_values_of_all_processes(processes):
    world = len(processes)
    for process in processes:
        found = process["values"]
        assert found["mean"] == [(world - 1) / 2, world - 1]
        assert found["rows"] == [[[number]] for number in range(world)]
        assert found["told"] == "from 0"
        assert found["weight"] == [0]
    assert len({process["values"]["seed"] for process in processes}) == world


@given(
    count=st.integers(2, 60),
    micro=st.integers(2, 9),
    world=st.integers(2, 7),
    negatives=st.sampled_from(["micro", "batch"]),
)
def test_shares_make_up_the_batch(count, micro, world, negatives):
    """Every pair once, in order, in every evaluation; as many chunks in every process, none too large."""
    batch = [100 + row for row in range(count)]
    optim = OptimConfig(micro_batch=micro, negatives=negatives)
    shares = []
    with pytest.MonkeyPatch.context() as patch:
        whole = own_share(batch, optim)
        patch.setattr(run_data, "world_size", lambda: world)
        for number in range(world):
            patch.setattr(run_data, "rank", lambda number=number: number)
            shares.append(own_share(batch, optim))
    assert whole.rows == batch
    assert not whole.idle
    chunks = [
        [[] if number in share.idle else list(share.rows[rows]) for number, rows in enumerate(share.slices)]
        for share in shares
    ]
    assert len({len(parts) for parts in chunks}) == 1
    for share, parts in zip(shares, chunks):
        assert share.evaluations == whole.evaluations
        assert share.pairs == count
        assert [rows.stop - rows.start for rows in share.slices] == [max(1, len(part)) for part in parts]
        assert len(share.rows) == share.slices[-1].stop
        assert all(len(part) <= micro + (negatives == "micro") for part in parts)
    if negatives == "batch":
        assert [row for parts in chunks for part in parts for row in part] == batch
    else:
        for number, rows in enumerate(whole.slices):
            assert [row for parts in chunks for row in parts[number]] == batch[rows]


def test_alone_nothing_changes(eleven_pairs, monkeypatch):
    batch, tokenizer = eleven_pairs
    for size in (None, "1"):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if size:
            monkeypatch.setenv("WORLD_SIZE", size)
        with process_group():
            assert not is_distributed()
            assert (rank(), world_size()) == (0, 1)
            embeddings = small_encoder(tokenizer)(batch)
            assert gather_embeddings(embeddings) is embeddings
            parameter = torch.nn.Parameter(torch.zeros(2))
            parameter.grad = torch.ones(2)
            mean = GradientMean([parameter])
            with mean.exchange(True):
                pass
            mean.finish()
            assert parameter.grad.tolist() == [1, 1]
            with pytest.raises(ValueError, match="mine"), agreement():
                raise ValueError("mine")
            assert tell_everybody(3) == 3
            assert gather_rows(torch.ones(2)).shape == (1, 2)
