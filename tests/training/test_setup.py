"""Less memory or compiled code, and the same numbers; which precision and scale a run has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small import assert_same, gradients, small_batch, small_encoder
from torch import Tensor

from hnclip.core import Batch
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.parameters import freeze
from hnclip.training.setup import compile_blocks, recompute_activations


def backward(model: DualEncoder, batch: Batch) -> int:
    """Gradients of a loss that reads vectors and tokens, and the bytes that wait for the backward pass."""
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(5)  # of dropout
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = model(batch, tokens=True)
    parts = [part for view in (found.images["full"], found.texts["caption"]) for part in (view.vectors, view.tokens)]
    (sum((part * torch.arange(part.numel()).view_as(part) % 7).sum() for part in parts) * found.scale).backward()
    return sum(held.values())


def test_recomputing_gives_the_same_gradients_from_less_memory() -> None:
    """Dropout is replayed, and a frozen tower is not in the graph."""
    batch, tokenizer = small_batch()
    model = small_encoder(tokenizer, dropout=0.3)
    names = list(model.state_dict())
    expected, all_bytes = gradients(model, lambda: backward(model, batch))
    recompute_activations(model)
    found, held = gradients(model, lambda: backward(model, batch))
    assert_same(found, expected, atol=1e-9)
    assert held < all_bytes / 2
    assert list(model.state_dict()) == names
    freeze(model, image="all")
    views = model(batch, tokens=True)
    assert not views.images["full"].vectors.requires_grad
    assert views.texts["caption"].vectors.requires_grad


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at every tensor
def test_compiled_blocks_give_the_same_gradients_at_any_length() -> None:
    batch, tokenizer = small_batch()
    model = small_encoder(tokenizer)
    parts = [batch[:3], batch[3:9], batch[9:]]
    expected = [gradients(model, lambda part=part: backward(model, part))[0] for part in parts]  # type: ignore[misc]
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compile_blocks(model, backend=backend)  # type: ignore[arg-type]
    for part, right in zip(parts, expected):
        assert_same(gradients(model, lambda part=part: backward(model, part))[0], right, atol=1e-9)  # type: ignore[misc]
    assert 0 < len(compiled) <= 8  # two towers, then any length; not once per block and length
    torch._dynamo.reset()
