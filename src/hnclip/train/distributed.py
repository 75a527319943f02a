"""Several processes as one batch. Ranks and world sizes live only here.

The contract: every process holds as many pairs as the others and the same parameters, evaluates its
objective with its own pairs as queries and everybody's as columns (`gather_embeddings`), and averages the
gradients once per optimiser step (`average_gradients`).

The loss is a mean over local queries. So its mean over processes is the loss of one process that holds all
pairs, in value and in every gradient: a vector collects the gradients of all the losses it was a column of on
its way back through the gather, and the scale, which is not gathered, that of its own process's loss.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hnclip.objectives.embeddings import Embeddings, ViewEmbeddings, pad_tokens


@contextmanager
def process_group(init_method: str = "env://") -> Iterator[None]:
    """The process group of `torchrun`'s environment for the time of the block; without one, nothing."""
    if "WORLD_SIZE" not in os.environ:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        init_method=init_method, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The number of this process; 0 when it is alone."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """The number of processes; 1 when there is no group."""
    return dist.get_world_size() if is_distributed() else 1


def gather_embeddings(embeddings: Embeddings) -> Embeddings:
    """The pairs of all processes in rank order, this process's as queries; alone, the embeddings as they are.

    Vectors and tokens keep their gradient. The scale stays this process's own. `ids` must mean the same in
    every process: number the whole data set, not a shard.

    Shape:
        [N, …] becomes [W·N, …] for W processes; tokens get the longest length of any process.
    """
    if not is_distributed():
        return embeddings
    images, texts = _common_lengths(embeddings)
    views = [*images.values(), *texts.values()]
    vectors = [view.vectors for view in views]
    tokens = [view.tokens for view in views if view.tokens is not None]
    gathered = iter(_Gather.apply(*vectors, *tokens))
    all_vectors = [next(gathered) for _ in vectors]  # [W·N, D] each
    all_views = iter(
        ViewEmbeddings(
            every,
            None if view.tokens is None else next(gathered),  # [W·N, T, D]
            None if view.mask is None else _all_gather(view.mask),  # [W·N, T]
        )
        for view, every in zip(views, all_vectors)
    )
    count = len(vectors[0])
    return Embeddings(
        images={name: next(all_views) for name in images},
        texts={name: next(all_views) for name in texts},
        scale=embeddings.scale,
        ids=None if embeddings.ids is None else _all_gather(embeddings.ids),
        margin_text=None if embeddings.margin_text is None else _all_gather(embeddings.margin_text.detach()),
        offset=rank() * count,
        rows=count,
    )


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its mean over all processes; alone, do nothing.

    A gradient that only some processes have counts as zero in the others, one that nobody has stays None.

    Memory: one flat copy of the gradients of one dtype at a time.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not is_distributed() or not trained:
        return
    present = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device)
    dist.all_reduce(present, dist.ReduceOp.MAX)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter, somewhere in zip(trained, present.tolist()):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= world_size()
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(mean.view_as(grad))


class _Gather(torch.autograd.Function):
    """Tensors of all processes, in rank order; on the way back the gradients of all processes are summed.

    One node for all tensors, so that every process runs the collectives of the backward pass in the same
    order. A reduce-scatter would move less than the sum that everybody gets, but not every backend has one.
    """

    @staticmethod
    def forward(ctx: Any, *local: Tensor) -> tuple[Tensor, ...]:
        gathered = tuple(_all_gather(tensor) for tensor in local)
        ctx.mark_non_differentiable(*(g for g, needed in zip(gathered, ctx.needs_input_grad) if not needed))
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(_local_sum(g) if needed else None for g, needed in zip(grads, ctx.needs_input_grad))


def _local_sum(grad: Tensor) -> Tensor:
    """The sum over processes of a gradient [W·N, …], cut to this process's rows [N, …]."""
    summed = grad.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed)
    return summed.chunk(world_size())[rank()]


def _all_gather(local: Tensor) -> Tensor:
    """[N, …] of every process as [W·N, …], without gradient."""
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(world_size())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts)


Views = Mapping[str, ViewEmbeddings]


def _common_lengths(embeddings: Embeddings) -> tuple[Views, Views]:
    """Image and text views, each as long in tokens as the longest of any process; checks the pair counts."""
    views = [*embeddings.images.values(), *embeddings.texts.values()]
    lengths = [0 if view.tokens is None else view.tokens.shape[1] for view in views]
    local = torch.tensor([[len(views[0].vectors), *lengths]], device=views[0].vectors.device)  # [1, 1 + V]
    counts, *all_lengths = _all_gather(local).T.tolist()
    if len(set(counts)) > 1:
        raise ValueError(f"every process must hold the same number of pairs, got {counts} by rank")
    longest = iter([max(length) for length in all_lengths])

    def padded(side: Views) -> Views:
        return {name: pad_tokens(view, next(longest)) for name, view in side.items()}

    return padded(embeddings.images), padded(embeddings.texts)
