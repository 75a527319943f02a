"""Several processes as one batch. Ranks and world sizes live only here.

The contract: every process holds its share of the batch's pairs and the same parameters, evaluates its objective with
its own pairs as queries and everybody's as columns (`gather_embeddings`), and the gradients are averaged over processes
once per optimiser step (`hnclip.train.gradients`, or FSDP's reduce-scatter).

The loss is a mean over local queries. Weighted by W·(own pairs)/(all pairs), its mean over the W processes is the loss
of one process that holds all pairs, in value and in every gradient: a vector collects the gradients of all the losses
it was a column of on its way back through the gather, and the scale, which is not gathered, that of its own process's
loss.

What the host alone knows (lengths, failures) travels in the host's memory, so that no accelerator has to wait for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from hnclip.core import Embeddings, ViewEmbeddings, pad_tokens
from hnclip.util.device import local_rank

TIMEOUT = "HNCLIP_TIMEOUT"  # environment: seconds after which a process that does not answer counts as lost
SECONDS = 600
GRACE = 5  # seconds in which the process that has something to say can say it, before the others end

_patient: dist.ProcessGroup | None = None  # of processes that wait as long as it takes
_store: Store | None = None


@contextmanager
def process_group(device: str = "auto", *, init_method: str = "env://") -> Iterator[None]:
    """The process group of `torchrun`'s environment for the time of the block; without one, nothing. Inside a group
    that exists already, that one.

    Args:
        device: what the tensors will be on, as in `TrainConfig.device`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or is_distributed():
        yield
        return
    global _patient, _store
    if "RANK" not in os.environ:
        raise ValueError("WORLD_SIZE is set in the environment, but RANK is not: start with torchrun, or unset it")
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        timeout = timedelta(seconds=float(os.environ.get(TIMEOUT, SECONDS)))
    except ValueError as error:
        raise ValueError(f"{TIMEOUT} in the environment must be seconds, got {os.environ[TIMEOUT]!r}") from error
    store, _, _ = next(rendezvous(init_method, number, world, timeout=timeout))
    joint = PrefixStore("hnclip", store)
    dist.init_process_group(_backend(device), store=joint, rank=number, world_size=world, timeout=timeout)
    _patient = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    _store = store.clone() if hasattr(store, "clone") else store  # of its own: it must answer while others are blocked
    try:
        yield
    except BaseException:
        _patient = _store = None
        raise  # without taking the group apart: that may wait for processes that are gone
    _patient = _store = None
    dist.destroy_process_group()


def _backend(device: str) -> str:
    """The host's tensors by gloo; those of an accelerator, if one is to be used, by its own library."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device.startswith("cpu") or found is None:
        return "gloo"
    if found.type == "mps":
        raise ValueError("several processes cannot share Apple's accelerator: leave torchrun out, or --device cpu")
    local, count = local_rank(), torch.accelerator.device_count()
    if local >= count:
        raise ValueError(f"{local + 1} or more processes on a machine with {count} accelerators: start {count} of them")
    torch.accelerator.set_device_index(local)
    return f"cpu:gloo,{found.type}:{dist.get_default_backend_for_device(found)}"


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The number of this process; 0 when it is alone."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """The number of processes; 1 when there is no group."""
    return dist.get_world_size() if is_distributed() else 1


def seed_of_process(seed: int, step: int) -> int:
    """A seed for dropout that is another one in every process and after every step."""
    return int.from_bytes(sha256(repr((seed, step, rank())).encode()).digest()[:8], "big")


# Agreement ----------------------------------------------------------------------------------------------------


@contextmanager
def agreement(*, patient: bool = False) -> Iterator[None]:
    """A block that every process leaves without an error, or none does.

    The first process that failed raises its error and so says it; all others end silently. Nobody leaves the block
    before everybody has come to its end.

    Args:
        patient: wait for the others as long as it takes, not only for the time-out of the group.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        if not is_distributed():
            raise
        error = caught
    if not is_distributed():
        return
    flags = torch.zeros(world_size(), dtype=torch.int32)
    flags[rank()] = error is not None
    dist.all_reduce(flags, group=_patient if patient else None)
    if flags.any():
        fail_together(error if rank() == int(flags.argmax()) else None)


def fail_together(error: BaseException | None) -> NoReturn:
    """End all processes with one message: raise `error` in the process that has it, and end the others behind it. A
    launcher that sees one process end also ends the rest, so they wait until the message is out."""
    if error is not None:
        raise error
    time.sleep(GRACE)
    raise SystemExit(1)


def speaks_first() -> bool:
    """Whether no other process has asked this before: of those that find that one is missing, one says so."""
    try:
        return _store is None or _store.add("spoken", 1) == 1
    except RuntimeError:  # the process that kept the store is the one that is missing
        return True


# Values -------------------------------------------------------------------------------------------------------


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum over processes of what each of them has found; alone, as it is."""
    if not is_distributed():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def mean_over_processes(values: Tensor) -> Tensor:
    """The mean over processes of what each of them has found; alone, as it is."""
    return sum_over_processes(values) / world_size() if is_distributed() else values


def gather_rows(local: Tensor) -> Tensor:
    """[N, …] of every process, N alike in all of them, as [W, N, …]; alone [1, N, …]."""
    if not is_distributed():
        return local[None]
    return _all_gather(local, [len(local)] * world_size()).unflatten(0, (world_size(), len(local)))


def tell_everybody(value: Any) -> Any:
    """What the first process was given."""
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@torch.no_grad()
def copy_from_first(model: nn.Module) -> None:
    """Give every process the weights and buffers of the first."""
    if is_distributed():
        for tensor in (*model.parameters(), *model.buffers()):
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            tensor.copy_(whole)


# Embeddings ---------------------------------------------------------------------------------------------------


def gather_embeddings(embeddings: Embeddings) -> Embeddings:
    """The pairs of all processes in rank order, this process's as queries; alone, the embeddings as they are.

    Vectors and tokens keep their gradient. The scale stays this process's own. `ids` must mean the same in
    every process: number the whole data set, not a shard. Processes may hold different numbers of pairs. One that has
    none to add brings any pair and says rows = 0: that pair is nobody's column, and row 0 of the whole is its query, to
    be weighted with 0.

    Shape:
        [N_r, …] becomes [ΣN_r, …]; tokens get the longest length of any process.

    Memory: beside the result, and only if the N_r differ, a copy of it.
    """
    if not is_distributed():
        return embeddings
    counts, images, texts = _common_shapes(embeddings)
    own = counts[rank()]
    views = [*images.values(), *texts.values()]
    vectors = [view.vectors[:own] for view in views]
    tokens = [view.tokens[:own] for view in views if view.tokens is not None]
    gathered = iter(_Gather.apply(counts, *vectors, *tokens))
    all_vectors = [next(gathered) for _ in vectors]  # [ΣN, D] each

    def constant(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else _all_gather(tensor.detach()[:own], counts)

    all_views = iter(
        ViewEmbeddings(
            every,
            None if view.tokens is None else next(gathered),  # [ΣN, T, D]
            constant(view.mask),  # [ΣN, T]
            constant(view.present),  # [ΣN]
            constant(view.ids),  # [ΣN]
        )
        for view, every in zip(views, all_vectors)
    )
    return Embeddings(
        images={name: next(all_views) for name in images},
        texts={name: next(all_views) for name in texts},
        scale=embeddings.scale,
        ids=constant(embeddings.ids),
        margin_text=constant(embeddings.margin_text),
        offset=sum(counts[: rank()]) if own else 0,
        rows=max(own, 1),
    )


class _Gather(torch.autograd.Function):
    """Tensors of all processes, in rank order; on the way back the gradients of all processes are summed.

    One node for all tensors, so that every process runs the collectives of the backward pass in the same order.
    """

    @staticmethod
    def forward(ctx: Any, counts: Sequence[int], *local: Tensor) -> tuple[Tensor, ...]:
        ctx.counts = counts
        gathered = tuple(_all_gather(tensor, counts) for tensor in local)
        ctx.mark_non_differentiable(*(g for g, needed in zip(gathered, ctx.needs_input_grad[1:]) if not needed))
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *(_local_sum(g, ctx.counts) if wanted else None for g, wanted in zip(grads, needed))


# The older names warn from torch 2.13 on, the newer ones are not there before.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_gather(local: Tensor, counts: Sequence[int]) -> Tensor:
    """[N_r, …] of every process as [ΣN_r, …], without gradient. Shorter ones travel filled up to the longest."""
    largest = max(counts)
    missing = largest - len(local)
    sent = torch.cat([local, local.new_zeros(missing, *local.shape[1:])]) if missing else local.contiguous()  # [L, …]
    blocks = sent.new_empty(len(counts) * largest, *sent.shape[1:])  # [W·L, …]
    _gather_into(blocks, sent)
    if min(counts) == largest:
        return blocks
    return torch.cat([block[:count] for block, count in zip(blocks.split(largest), counts)])


def _local_sum(grad: Tensor, counts: Sequence[int]) -> Tensor:
    """The sum over processes of a gradient [ΣN_r, …], cut to this process's rows [N_r, …]."""
    largest = max(counts)
    if min(counts) == largest:
        blocks = grad.contiguous()
    else:
        blocks = grad.new_zeros(len(counts) * largest, *grad.shape[1:])  # [W·L, …]
        for block, part in zip(blocks.split(largest), grad.split(list(counts))):
            block[: len(part)] = part
    summed = blocks.new_empty(largest, *blocks.shape[1:])  # [L, …]
    _reduce_scatter(summed, blocks)
    return summed[: counts[rank()]]


Views = Mapping[str, ViewEmbeddings]


def _common_shapes(embeddings: Embeddings) -> tuple[list[int], Views, Views]:
    """The number of pairs of each process, and image and text views as long in tokens as the longest of any."""
    views = [*embeddings.images.values(), *embeddings.texts.values()]
    lengths = [0 if view.tokens is None else view.tokens.shape[1] for view in views]
    own = len(views[0].vectors) if embeddings.rows is None else embeddings.rows
    counts, *all_lengths = gather_rows(torch.tensor([own, *lengths], device="cpu")).T.tolist()  # [1 + V, W]
    longest = iter([max(length) for length in all_lengths])

    def padded(side: Views) -> Views:
        return {name: pad_tokens(view, next(longest)) for name, view in side.items()}

    return counts, padded(embeddings.images), padded(embeddings.texts)
