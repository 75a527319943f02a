"""Less memory or compiled code, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hnclip.core import Batch
from hnclip.data.batching import pad_texts
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.models.parameters import freeze
from hnclip.training.setup import choose_precision, compile_blocks, fast_bf16, recompute_activations


def batch_for(model: DualEncoder, lengths: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(sum(lengths))
    end = model.tokenizer.eos_token_id
    words = [[*torch.randint(3, 300, (length - 1,), generator=generator).tolist(), end] for length in lengths]
    size = (len(lengths), 3, model.image_size, model.image_size)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    count = torch.arange(len(lengths))
    return Batch({"full": pixels}, {"caption": pad_texts(words, model.text_transform.pad)}, torch.stack([count] * 2, 1))


def gradients(model: DualEncoder, batch: Batch) -> tuple[dict[str, Tensor], int]:
    """Every gradient of a loss that reads vectors and tokens, and the bytes that wait for the backward pass."""
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    torch.manual_seed(5)  # of dropout
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = model(batch, tokens=True)
    views = [found.images["full"], found.texts["caption"]]
    loss = sum(
        (part * torch.arange(part.numel()).view_as(part) % 7).sum() for v in views for part in (v.vectors, v.tokens)
    )
    (loss * found.scale).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}, sum(
        held.values()
    )


@pytest.fixture
def model(model_directory: Path) -> DualEncoder:
    return load(str(model_directory)).double().train()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("lengths", [[40, 9, 21], [12, 12, 12]], ids=["packed", "plain"])
def test_recomputing_gives_the_same_gradients_from_less_memory(model: DualEncoder, lengths: list[int]) -> None:
    """Dropout is on: what is computed again must be the same again."""
    batch = batch_for(model, lengths)
    names = list(model.state_dict())
    expected, all_bytes = gradients(model, batch)
    recompute_activations(model)
    found, held = gradients(model, batch)
    same(found, expected)
    assert held < all_bytes / 2
    assert list(model.state_dict()) == names


def test_recomputing_leaves_frozen_towers_out_of_the_graph(model: DualEncoder) -> None:
    batch = batch_for(model, [40, 9, 21])
    freeze(model, image="all")
    recompute_activations(model)
    found = model(batch, tokens=True)
    assert not found.images["full"].vectors.requires_grad
    assert found.texts["caption"].vectors.requires_grad


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at every tensor
def test_compiled_blocks_give_the_same_gradients_at_any_length(model: DualEncoder) -> None:
    for module in model.modules():  # compiled code draws its dropout from another sequence
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    batches = [batch_for(model, lengths) for lengths in ([40, 9, 21], [11, 30, 4], [50, 6, 7], [8, 8, 8])]
    expected = [gradients(model, batch)[0] for batch in batches]
    names = list(model.state_dict())
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compile_blocks(model, backend=backend)  # type: ignore[arg-type]
    for batch, right in zip(batches, expected):
        same(gradients(model, batch)[0], right)
    assert 0 < len(compiled) <= 8  # two towers, then any length; not once per block and length
    assert list(model.state_dict()) == names
    torch._dynamo.reset()


def test_precision_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = torch.device("cpu")
    for there in ({"amx_bf16": True, "avx512_bf16": False}, {"avx512_bf16": True}, {"sve_bf16": True}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda there=there: {"avx2": True, **there})
        assert fast_bf16(processor)
        assert choose_precision("auto", processor) == "bf16"
        assert choose_precision("fp32", processor) == "fp32"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "avx512_f": True})
    assert not fast_bf16(processor)
    assert choose_precision("auto", processor) == "fp32"
    assert choose_precision("bf16", processor) == "bf16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert not fast_bf16(torch.device("cuda"))
    assert not fast_bf16(torch.device("mps"))
