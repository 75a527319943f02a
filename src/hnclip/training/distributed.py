"""Several processes as one: the process group, gathers of embeddings, sums of gradients, and sharded models (FSDP2).

Every process encodes its own rows. Their embeddings are gathered as data, and every process evaluates the objective on
all of them, so each knows the exact gradient of its own rows, which it sends through its encoder. Parameter gradients
are then summed over processes once per optimiser step.

Why not `DistributedDataParallel`: its reducer expects one backward pass in which every parameter gets its gradient.
Gradient caching has several, objectives may ignore an output, and a tower may be frozen.

Without a process group all functions do what one process needs: nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hnclip.core import Embeddings, ViewEmbeddings, pad_tokens
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.parameters import encoder_layers
from hnclip.util.device import local_rank

TIMEOUT = timedelta(hours=2)  # ranks also wait for each other while images are decoded
Value = TypeVar("Value")


@contextmanager
def process_group(device: str = "auto") -> Iterator[None]:
    """The process group of `torchrun`'s environment, for the time of the block; an existing group is used as it is.

    Args:
        device: of the tensors, as in `RunOptions.device`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or is_distributed():
        yield
        return
    if "RANK" not in os.environ:
        raise ValueError("WORLD_SIZE is set in the environment, but RANK is not: start with torchrun, or unset it")
    dist.init_process_group(_backend(device), timeout=TIMEOUT)
    yield
    dist.destroy_process_group()  # not after an error: it may wait for processes that have ended


def _backend(device: str) -> str:
    """gloo for tensors of the host; for those of an accelerator, its own library."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device.startswith("cpu") or found is None:
        return "gloo"
    torch.accelerator.set_device_index(local_rank())
    return f"cpu:gloo,{found.type}:{dist.get_default_backend_for_device(found)}"


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def rank_seed(seed: int, step: int) -> int:
    """A seed for dropout that differs between ranks and steps."""
    return int.from_bytes(sha256(repr((seed, step, rank())).encode()).digest()[:8], "big")


def broadcast_object(value: Value) -> Value:
    """The value of rank 0."""
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather_objects(value: Value) -> list[Value]:
    """The values of all ranks."""
    found: list[Any] = [value] * world_size()
    if is_distributed():
        dist.all_gather_object(found, value)
    return found


def gather_rows(local: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """[N_r, …] of every rank as [ΣN_r, …], without gradient.

    Args:
        counts: N_r of every rank; equal ones if not given.
    """
    if not is_distributed():
        return local
    counts = counts or [len(local)] * world_size()
    largest = max(counts)
    sent = local.new_zeros(largest, *local.shape[1:])  # shorter ones are padded to the longest
    sent[: len(local)] = local
    blocks = [torch.empty_like(sent) for _ in counts]
    dist.all_gather(blocks, sent)
    return torch.cat([block[:count] for block, count in zip(blocks, counts)])


def encode_shared(encode: Callable[[list[int]], Tensor], count: int) -> Tensor:
    """`encode` of rows 0 … count−1, shared by all ranks; the same result [count, D] in each of them.

    Every rank encodes equally many rows, the last ones again if necessary: with FSDP an encoder call is collective.
    """
    world, each = world_size(), -(-count // world_size())
    own = [(turn * world + rank()) % count for turn in range(each)]
    vectors = gather_rows(encode(own)).unflatten(0, (world, each))  # [W, N, D]; row n of rank w is n·W + w
    return vectors.transpose(0, 1).flatten(0, 1)[:count].contiguous()


def gather_embeddings(embeddings: Embeddings, rows: int) -> tuple[Embeddings, int]:
    """The pairs of all ranks in rank order, as data, and the place of this rank's first pair among them.

    Args:
        embeddings: without gradient.
        rows: pairs of this rank: the first ones, or 0 for a rank without a pair, whose row is filler.

    Shape:
        [N_r, …] becomes [ΣN_r, …]; tokens get the longest length of any rank.
    """
    if not is_distributed():
        return embeddings, 0
    views = [*embeddings.images.values(), *embeddings.texts.values()]
    lengths = [0 if view.tokens is None else view.tokens.shape[1] for view in views]
    # Shapes travel in the host's memory, so that no accelerator has to be waited for.
    shapes = gather_rows(torch.tensor([[rows, *lengths]]))  # [W, 1 + V]
    counts, longest = shapes[:, 0].tolist(), iter(shapes[:, 1:].amax(0).tolist())

    def gather(tensor: Any) -> Any:
        return None if tensor is None else gather_rows(tensor[:rows], counts)

    def gather_view(view: ViewEmbeddings) -> ViewEmbeddings:
        padded = pad_tokens(view, next(longest))
        return ViewEmbeddings(*(gather(getattr(padded, spec.name)) for spec in fields(padded)))

    gathered = replace(
        embeddings,
        images={name: gather_view(view) for name, view in embeddings.images.items()},
        texts={name: gather_view(view) for name, view in embeddings.texts.items()},
        ids=gather(embeddings.ids),
        margin_text=gather(embeddings.margin_text),
    )
    return gathered, sum(counts[: rank()])


@torch.no_grad()
def sum_gradients(model: nn.Module) -> None:
    """Replace every gradient by its sum over ranks, all of which have gradients of the same parameters. FSDP has done
    so already for its own."""
    if not is_distributed():
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None and not is_sharded(p)]
    for dtype in dict.fromkeys(grad.dtype for grad in grads):  # in the same order on every rank
        group = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.flatten() for grad in group])
        dist.all_reduce(flat)
        for grad, total in zip(group, flat.split([grad.numel() for grad in group])):
            grad.copy_(total.view_as(grad))


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """The norm of all gradients, which are scaled down if it is above `limit`; as torch's `clip_grad_norm_`."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    shards = [local_part(grad) for grad in grads if is_sharded(grad)]
    if not shards:
        return nn.utils.clip_grad_norm_(model.parameters(), limit)
    whole = [grad for grad in grads if not is_sharded(grad)]
    square = nn.utils.get_total_norm(shards).square()
    dist.all_reduce(square)
    norm = (square + nn.utils.get_total_norm(whole).square()).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for grad in (*shards, *whole):
        grad.mul_(factor.to(grad.dtype))
    return norm


@torch.no_grad()
def distribute(model: DualEncoder, mode: str) -> None:
    """Give every rank the weights of rank 0; with mode fsdp each keeps a shard of them (FSDP2)."""
    if not is_distributed():
        return
    for tensor in (*model.parameters(), *model.buffers()):
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0)
        tensor.copy_(whole)
    if mode == "fsdp":
        _shard(model)


def _shard(model: DualEncoder) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(model.device.type, (world_size(),))
    for tower in (model.backbone.vision_model, model.backbone.text_model):
        for block in encoder_layers(tower):
            fully_shard(block, mesh=mesh)
    # Numbers without a dimension (the scale) cannot be sharded: they stay whole.
    fully_shard(model, mesh=mesh, ignored_params={p for p in model.parameters() if p.ndim == 0})
    for method in ("encode_images", "encode_texts"):  # evaluation calls these instead of `forward`
        register_fsdp_forward_method(model, method)
    # The scale is returned as a view, which nothing changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)


def is_sharded_model(model: Any) -> bool:
    return hasattr(model, "set_requires_gradient_sync")


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor, whose class takes long to import."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Any) -> Tensor:
    """The rows of a tensor that this rank holds, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def gather_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Whole tensors by name: as they are if none is sharded; otherwise in the host's memory of rank 0, empty elsewhere.
    Collective. Values that are no tensors are kept."""
    if not any(map(is_sharded, tensors.values())):
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        if rank() == 0:
            found[name] = whole.cpu()
    return found


def like_parameter(whole: Tensor, own: Any) -> Tensor:
    """A copy of a whole tensor, sharded as `own` is."""
    if not is_sharded(own):
        return whole.clone()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
