from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp
from test_grad_cache import DUPLICATES, assert_same, gradients, small_data, small_encoder, whole_batch

from hnclip.losses import hard_negative_loss
from hnclip.objectives.embeddings import Embeddings, ViewEmbeddings
from hnclip.objectives.hn_clip import HNClip
from hnclip.train.distributed import (
    average_gradients,
    gather_embeddings,
    is_distributed,
    process_group,
    rank,
    world_size,
)
from hnclip.train.grad_cache import cached_backward, micro_backward

WORLD, LOCAL = 2, 5
SECONDS = 120
OBJECTIVE = HNClip(hard_negative_loss, token_weight=0.5, frozen_margin=True)
MODES = {
    "plain": lambda *step: micro_backward(*step, chunk=LOCAL, gather=gather_embeddings),
    "cached": lambda *step: cached_backward(*step, chunk=2, gather=gather_embeddings),
    "cached alone": lambda *step: cached_backward(*step, chunk=2),
}


def one_process(number, folder, batch, tokenizer):
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(number)}
    torch.set_num_threads(1)
    with process_group(f"file://{folder}/meeting"):
        assert is_distributed()
        assert (rank(), world_size()) == (number, WORLD)
        model = small_encoder(tokenizer)
        local = batch[number * LOCAL : (number + 1) * LOCAL]
        found = {"length": local.texts["caption"].ids.shape[1], "gathered": gathered_views(number)}
        for name, backward in MODES.items():
            grads, result = gradients(model, lambda run=backward: averaged(model, run, local))
            found[name] = {"grads": grads, "terms": result.terms, "infonce": result.infonce}
        found["uneven"] = message(lambda: gather_embeddings(model(local[: LOCAL - number])))
        found["sparse"] = sparse_gradients(number)
        torch.save(found, f"{folder}/{number}.pt")
    assert not is_distributed()


def averaged(model, backward, batch):
    result = backward(model, batch, OBJECTIVE)
    average_gradients(model.parameters())
    return result


def message(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def gathered_views(number):
    """Two image views, one without tokens; what arrives where, and whose gradient comes back."""
    full = torch.full((2, 3), float(number), dtype=torch.float64, requires_grad=True)
    tokens = torch.full((2, 2 + number, 3), 10.0 + number, dtype=torch.float64, requires_grad=True)
    crop = torch.full((2, 3), 20.0 + number, dtype=torch.float32)
    view = ViewEmbeddings(full, tokens, torch.ones(2, 2 + number, dtype=torch.bool))
    scale = torch.tensor(2.0, requires_grad=True)
    ids = torch.tensor([[number], [7]])
    both = gather_embeddings(Embeddings({"full": view, "crop": ViewEmbeddings(crop)}, {"caption": view}, scale, ids))
    assert both.scale is scale
    assert both.images["crop"].tokens is None
    assert not both.images["crop"].vectors.requires_grad
    ((1 + number) * both.images["full"].vectors.sum() + both.images["full"].tokens[2].sum()).backward()
    image = both.images["full"]
    return {
        "vectors": image.vectors.detach(),
        "tokens": image.tokens.detach()[..., 0],
        "mask": image.mask,
        "crop": both.images["crop"].vectors,
        "ids": both.ids,
        "rows": (both.offset, both.rows),
        "vector grad": full.grad,
        "token grad": tokens.grad[..., 0],
    }


def sparse_gradients(number):
    """Four parameters of two dtypes: used by both processes, by process 0 only, by nobody, and frozen."""
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float64, torch.float32) * 2]
    parameters[3].requires_grad_(False)
    parameters[0].grad = torch.tensor([1.0, 2.0 + number], dtype=torch.float64)
    if number == 0:
        parameters[1].grad = torch.tensor([4.0, 6.0])
    average_gradients(parameters)
    return [parameter.grad for parameter in parameters]


@pytest.fixture(scope="module")
def ten_pairs():
    """A batch and its tokenizer. The shortest captions come first, so the two processes have unlike lengths."""
    data, tokenizer = small_data()
    batch = data.batch(range(WORLD * LOCAL))
    texts = {"caption": batch.texts["caption"]}
    return replace(batch, ids=DUPLICATES[: WORLD * LOCAL], texts=texts), tokenizer


@pytest.fixture(scope="module")
def processes(ten_pairs, tmp_path_factory):
    """What two real processes found."""
    folder = tmp_path_factory.mktemp("processes")
    context = mp.spawn(one_process, (str(folder), *ten_pairs), nprocs=WORLD, join=False)
    deadline = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"two processes did not finish in {SECONDS} s"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{number}.pt") for number in range(WORLD)]


@pytest.fixture(scope="module")
def alone(ten_pairs):
    """What one process with all pairs finds: the model, the batch, gradients and terms."""
    batch, tokenizer = ten_pairs
    model = small_encoder(tokenizer)
    grads, terms = gradients(model, lambda: whole_batch(model, batch, OBJECTIVE))
    return model, batch, grads, terms


def test_words_differ_in_length(processes):
    assert processes[0]["length"] < processes[1]["length"]


@pytest.mark.parametrize("mode", ["plain", "cached"])
def test_two_processes_are_one_batch(processes, alone, mode):
    """Loss and every gradient, the scale's included, in both processes."""
    _, _, grads, terms = alone
    found = [process[mode] for process in processes]
    for process in found:
        assert_same(process["grads"], grads)
    assert_same({name: sum(process["terms"][name] for process in found) / WORLD for name in terms}, terms)
    assert found[0]["terms"]["global"] != found[1]["terms"]["global"]
    infonce = cached_backward(alone[0], alone[1], OBJECTIVE, chunk=100).infonce
    torch.testing.assert_close(sum(process["infonce"] for process in found) / WORLD, infonce)


def test_without_gathering_negatives_stay_local(processes, alone):
    """The control, and the other meaning of two processes: each its own micro-batch."""
    model, batch, whole, _ = alone
    micro, _ = gradients(model, lambda: micro_backward(model, batch, OBJECTIVE, chunk=LOCAL))
    for process in processes:
        assert_same(process["cached alone"]["grads"], micro)
    weight = "backbone.visual_projection.weight"
    assert (micro[weight] - whole[weight]).abs().max() > 1e-6


def test_gathered_tensors_and_gradients(processes):
    for number, process in enumerate(processes):
        found = process["gathered"]
        assert found["vectors"][:, 0].tolist() == [0, 0, 1, 1]
        assert found["tokens"].tolist() == [[10, 10, 0]] * 2 + [[11, 11, 11]] * 2
        assert found["mask"].tolist() == [[True, True, False]] * 2 + [[True] * 3] * 2
        assert found["crop"][:, 0].tolist() == [20, 20, 21, 21]
        assert found["crop"].dtype == torch.float32
        assert found["ids"].tolist() == [[0], [7], [1], [7]]
        assert found["rows"] == (2 * number, 2)
        # Weight 1 in process 0 and 2 in process 1; both read the tokens of row 2, which is process 1's first.
        assert found["vector grad"].tolist() == [[3.0] * 3] * 2
        expected = [[0.0] * 2] * 2 if number == 0 else [[2.0] * 3, [0.0] * 3]
        assert found["token grad"].tolist() == expected


def test_uneven_numbers_of_pairs_are_an_error_everywhere(processes):
    for process in processes:
        assert process["uneven"] == "every process must hold the same number of pairs, got [5, 4] by rank"


def test_missing_gradients_count_as_zero(processes):
    for process in processes:
        everybody, one, nobody, frozen = process["sparse"]
        assert everybody.tolist() == [1.0, 2.5]
        assert everybody.dtype == torch.float64
        assert one.tolist() == [2.0, 3.0]
        assert nobody is None
        assert frozen is None


def test_alone_nothing_changes(alone, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model, batch, _, _ = alone
    with process_group():
        assert not is_distributed()
        assert (rank(), world_size()) == (0, 1)
        embeddings = model(batch)
        assert gather_embeddings(embeddings) is embeddings
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.ones(2)
        average_gradients([parameter])
        assert parameter.grad.tolist() == [1, 1]
