"""Less memory or compiled code, and the same numbers; which precision and scale a run has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small import assert_same, config_for
from torch import Tensor

from hnclip.config import AdaptConfig
from hnclip.core import Batch
from hnclip.data.batching import pad_texts
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.models.parameters import freeze
from hnclip.training.setup import (
    choose_precision,
    choose_trainable,
    compile_blocks,
    fast_bf16,
    recompute_activations,
)


def batch_for(model: DualEncoder, lengths: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(sum(lengths))
    end = model.tokenizer.eos_token_id
    words = [[*torch.randint(3, 300, (length - 1,), generator=generator).tolist(), end] for length in lengths]
    size = (len(lengths), 3, model.image_size, model.image_size)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return Batch({"full": pixels}, {"caption": pad_texts(words, model.text_transform.pad)}, torch.arange(3)[:, None])


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
    parts = [part for view in (found.images["full"], found.texts["caption"]) for part in (view.vectors, view.tokens)]
    (sum((part * torch.arange(part.numel()).view_as(part) % 7).sum() for part in parts) * found.scale).backward()
    grads = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return grads, sum(held.values())


@pytest.fixture
def model(model_directory: Path) -> DualEncoder:
    return load(str(model_directory)).double().train()


@pytest.mark.parametrize("lengths", [[40, 9, 21], [12, 12, 12]], ids=["packed", "plain"])
def test_recomputing_gives_the_same_gradients_from_less_memory(model: DualEncoder, lengths: list[int]) -> None:
    """Dropout is replayed, and a frozen tower is not in the graph."""
    batch, names = batch_for(model, lengths), list(model.state_dict())
    expected, all_bytes = gradients(model, batch)
    recompute_activations(model)
    found, held = gradients(model, batch)
    assert_same(found, expected, atol=1e-9)
    assert held < all_bytes / 2
    assert list(model.state_dict()) == names
    freeze(model, image="all")
    views = model(batch, tokens=True)
    assert not views.images["full"].vectors.requires_grad
    assert views.texts["caption"].vectors.requires_grad


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at every tensor
def test_compiled_blocks_give_the_same_gradients_at_any_length(model: DualEncoder) -> None:
    for module in model.modules():  # compiled code draws its dropout from another sequence
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    batches = [batch_for(model, lengths) for lengths in ([40, 9, 21], [11, 30, 4], [8, 8, 8])]
    expected = [gradients(model, batch)[0] for batch in batches]
    names = list(model.state_dict())
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compile_blocks(model, backend=backend)  # type: ignore[arg-type]
    for batch, right in zip(batches, expected):
        assert_same(gradients(model, batch)[0], right, atol=1e-9)
    assert 0 < len(compiled) <= 8  # two towers, then any length; not once per block and length
    assert list(model.state_dict()) == names
    torch._dynamo.reset()


def test_precision_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = torch.device("cpu")
    for found, fast in (
        ({"amx_bf16": True, "avx512_bf16": False}, True),
        ({"avx2": True, "avx512_bf16": True}, True),
        ({"sve_bf16": True}, True),
        ({"avx512_bf16": False, "avx512_f": True}, False),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        assert fast_bf16(processor) == fast
        assert choose_precision("auto", processor) == ("bf16" if fast else "fp32")
    assert [choose_precision(wanted, processor) for wanted in ("fp32", "bf16")] == ["fp32", "bf16"]  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert not fast_bf16(torch.device("cuda"))
    assert not fast_bf16(torch.device("mps"))


@pytest.mark.parametrize("scale_lr", [0.0, 1e-2])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_initial_scale_can_be_chosen_and_fixed(method: str, scale_lr: float, model: DualEncoder) -> None:
    optim = {"scale": 20.0, "scale_lr": scale_lr}
    choose_trainable(config_for("any", adapt=AdaptConfig(method=method), optim=optim), model)  # type: ignore[arg-type]
    assert model.scale.item() == pytest.approx(20.0)
    assert model.backbone.logit_scale.requires_grad == (scale_lr > 0)
