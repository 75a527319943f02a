"""One optimiser step: the gradients of a batch, exact for any kind of negatives and any number of processes.

A group is the set of pairs that are each other's negatives: a micro-batch, or with `negatives batch` the whole batch.
For each group:

1. Encode its chunks. One chunk keeps its graph; several are encoded without one, remembering the random state.
2. Detach the embeddings, gather those of all ranks, evaluate the objective on all pairs of the group, and keep its
   gradient by every embedding. No gradient flows through the gather: every rank evaluates the same whole group.
3. Send the gradients of the own rows into the graph; without one, encode the chunk again with its random state replayed
   (GradCache, Gao et al. 2021).

By the chain rule this is exact if step 3 computes the same embeddings as step 1: the replay repeats the dropout masks.
Models that change their buffers in forward, as batch norm does, are excluded.

The numbers of a step stay on the device. The trainer reads them after it has queued the next step, so that an
accelerator always has work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hnclip.config import OptimConfig
from hnclip.core import Batch, Embeddings, NegativePairs, join_embeddings
from hnclip.data.sampler import share
from hnclip.losses import clip_loss
from hnclip.models.dual_encoder import DualEncoder
from hnclip.objectives.base import GlobalTerm, Objective, TrainProgress
from hnclip.training.distributed import (
    clip_gradients,
    gather_embeddings,
    is_sharded_model,
    rank,
    sum_gradients,
    world_size,
)
from hnclip.training.memory import PairMemory
from hnclip.training.optimizer import clamp_scale, schedule_factor, set_learning_rate
from hnclip.util.device import random_state, restore_random_state

SATURATED = 1e-3  # a loss below this teaches nothing: the paper's threshold
_INFONCE = GlobalTerm(clip_loss)


@dataclass(frozen=True)
class Group:
    """Pairs that are each other's negatives, and the part of them that this rank encodes.

    Args:
        pairs: numbers of the pairs of all ranks in the training set, in order.
        chunks: slices of this rank's batch that are encoded at once.
        rows: pairs of this rank in them; 0 for a rank without one, which encodes one filler row, because an encoder
            call may be collective (FSDP).
    """

    pairs: Sequence[int]
    chunks: Sequence[slice]
    rows: int


@dataclass(frozen=True)
class GroupLosses:
    """Losses of one step, without gradient, the same on every rank.

    Shape:
        terms: scalars by name, weights applied; means over all pairs of the step.
        losses: [G], the sum of the terms of each group.
        infonce: [G], plain InfoNCE of each group on the same columns.
    """

    terms: dict[str, Tensor]
    losses: Tensor
    infonce: Tensor


def chunk_slices(count: int, size: int) -> list[slice]:
    """Consecutive slices of `size` rows. A single last row joins the slice before: alone it has no negative."""
    starts = list(range(0, count, size))
    if size > 1 and len(starts) > 1 and count - starts[-1] == 1:
        starts.pop()
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], count])]


def split_batch(
    batch: Sequence[int], optim: OptimConfig, *, rank: int = 0, world: int = 1
) -> tuple[list[int], list[Group]]:
    """The pairs of a batch that a rank encodes, and their groups.

    Every micro-batch is shared among the ranks, in order. With negatives from the batch each rank takes every W-th
    pair: in a batch in order of length, chunks hold captions of similar length. All ranks have equally many chunks.
    """
    if optim.negatives == "batch":
        own = list(batch[rank::world])
        count = -(-len(batch) // (world * optim.micro_batch))
        return own or [batch[0]], [Group(batch, _slices([share(own or [0], n, count) for n in range(count)]), len(own))]
    parts = [batch[rows] for rows in chunk_slices(len(batch), optim.micro_batch)]
    owns = [share(part, rank, world) for part in parts]
    slices = _slices([own or part[:1] for own, part in zip(owns, parts)])
    rows = [row for own, part in zip(owns, parts) for row in own or part[:1]]
    return rows, [Group(part, [chunk], len(own)) for part, own, chunk in zip(parts, owns, slices)]


def _slices(parts: Sequence[Sequence[int]]) -> list[slice]:
    """The places of consecutive parts."""
    stops = list(accumulate(len(part) for part in parts))
    return [slice(start, stop) for start, stop in zip([0, *stops], stops)]


def backward(
    model: DualEncoder,
    batch: Batch,
    objective: Objective,
    optim: OptimConfig,
    groups: Sequence[Group] | None = None,
    memory: PairMemory | None = None,
) -> GroupLosses:
    """Add to every parameter the gradient of a step: the mean over all pairs of the losses of their groups.

    Memory: the activations of one chunk, and the embeddings of a group with their gradients.

    Args:
        batch: the rows of this rank, in the host's memory or on the model's device.
        optim: negatives, micro_batch and precision, which must not be "auto".
        groups: how the batch is divided; as `split_batch` does if not given.
        memory: further negatives. The pairs of each group are added to it afterwards.

    Relations:
        With one group of one chunk this is plain `loss.backward()`. The value and all gradients do not depend on the
        number of chunks (without dropout) nor of processes.
    """
    groups = split_batch(range(len(batch)), optim)[1] if groups is None else groups
    total = sum(len(group.pairs) for group in groups)
    results = []
    for number, group in enumerate(groups, start=1):
        weight, last = len(group.pairs) / total, number == len(groups)
        results.append((weight, *_group_backward(model, batch, objective, optim, group, weight, last, memory)))
    sum_gradients(model)
    return GroupLosses(
        {name: torch.stack([weight * terms[name] for weight, terms, _ in results]).sum() for name in results[0][1]},
        torch.stack([torch.stack(list(terms.values())).sum() for _, terms, _ in results]),
        torch.stack([infonce for _, _, infonce in results]),
    )


def _group_backward(
    model: DualEncoder,
    batch: Batch,
    objective: Objective,
    optim: OptimConfig,
    group: Group,
    weight: float,
    last: bool,
    memory: PairMemory | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Terms and InfoNCE of a group, after adding `weight` times its gradient. `last`: no other group of the step
    follows, so a sharded model reduces its gradients."""
    device, tokens = model.device, objective.tokens
    chunks = [batch[rows].to(device) for rows in group.chunks]
    keep_graph = len(chunks) == 1
    encoded, states = [], []
    for chunk in chunks:
        states.append(None if keep_graph else random_state(device))
        with torch.set_grad_enabled(keep_graph), _autocast(optim, device):
            encoded.append(model(chunk, tokens=tokens))

    with torch.no_grad():
        gathered, offset = gather_embeddings(join_embeddings(encoded), group.rows)
    negatives = None if memory is None else memory.negatives()
    leaves = replace(gathered, scale=gathered.scale.detach(), memory=negatives)
    for leaf in (*_tensors(leaves), leaves.scale):
        leaf.requires_grad_()
    terms = objective(leaves)
    (weight * torch.stack(list(terms.values())).sum()).backward()
    with torch.no_grad():
        infonce = _INFONCE(leaves)
    if memory is not None:
        image, text = leaves.images["full"].vectors, leaves.texts["caption"].vectors
        assert leaves.ids is not None
        memory.add(NegativePairs(image, text, leaves.ids, leaves.margin_text), torch.tensor(group.pairs))

    for number, (chunk, state) in enumerate(zip(chunks, states)):
        if is_sharded_model(model):
            model.set_requires_gradient_sync(last and number == len(chunks) - 1)  # type: ignore[operator]
        live = encoded[number]
        if state is not None:
            with _replayed(state, device), _autocast(optim, device):
                live = model(chunk, tokens=tokens)
        own = slice(offset, offset + len(chunk))
        pushed = [
            # Tokens of a group are padded to its longest caption, those of a chunk to its own.
            (tensor, leaf.grad[own, : tensor.shape[1]] if group.rows else torch.zeros_like(tensor))
            for tensor, leaf in zip(_tensors(live), _tensors(leaves))
            # No gradient: a view that the objective ignores. No graph: a frozen tower.
            if leaf.grad is not None and tensor.requires_grad
        ]
        if is_sharded_model(model):  # FSDP averages over ranks
            pushed = [(tensor, world_size() * grad) for tensor, grad in pushed]
        if number == 0 and live.scale.requires_grad and leaves.scale.grad is not None:
            grad = leaves.scale.grad  # whole on every rank, so one sends it
            pushed.append((live.scale, grad if rank() == 0 else torch.zeros_like(grad)))
        if pushed:
            tensors, grads = zip(*pushed)
            torch.autograd.backward(tensors, grads)
        offset += len(chunk)
    return {name: term.detach() for name, term in terms.items()}, infonce


def _tensors(embeddings: Embeddings) -> list[Tensor]:
    """Vectors and tokens of every view: what gradients pass through, apart from the scale."""
    views = [*embeddings.images.values(), *embeddings.texts.values()]
    return [tensor for view in views for tensor in (view.vectors, view.tokens) if tensor is not None]


def _autocast(optim: OptimConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Around each encoder call, and nothing else: the objective is computed in full precision."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if optim.precision == "bf16" else nullcontext()


@contextmanager
def _replayed(state: dict[str, Tensor], device: torch.device) -> Iterator[None]:
    """Draw from `state` inside the block; afterwards the generators are as before it."""
    current = random_state(device)
    restore_random_state(state, device)
    try:
        yield
    finally:
        restore_random_state(current, device)


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one step, on the device: terms, InfoNCE, gradient norm, scale; the same on every rank.

    Shape:
        values: [K], in the order of `names`; the first `terms` of them add up to the loss.
    """

    names: tuple[str, ...]
    values: Tensor
    terms: int

    def read(self) -> dict[str, float]:
        """By name, with `loss` first; waits for the device."""
        values = self.values.tolist()
        return {"loss": sum(values[: self.terms]), **dict(zip(self.names, values))}


@dataclass(frozen=True)
class TrainStep:
    """The optimiser steps of a run.

    Args:
        optim: with the precision chosen, not "auto".
        total: steps of the run, for the schedule.
        memory: further negatives, for `negatives memory`.
    """

    model: DualEncoder
    objective: Objective
    optimizer: torch.optim.Optimizer
    optim: OptimConfig
    total: int
    memory: PairMemory | None = None

    def __call__(self, batch: Batch, step: int, groups: Sequence[Group] | None = None) -> StepMetrics:
        """Do the optimiser step that follows `step` others; `batch` and `groups` as in `backward`."""
        optim = self.optim
        set_learning_rate(self.optimizer, schedule_factor(step, self.total, optim))
        self.optimizer.zero_grad(set_to_none=True)
        progress = TrainProgress(step, max(1, self.total // optim.epochs), optim.epochs)
        found = backward(self.model, batch, self.objective.at(progress), optim, groups, self.memory)
        norm = clip_gradients(self.model, optim.clip_grad or float("inf"))  # infinite: only measured
        self.optimizer.step()
        clamp_scale(self.model.backbone.logit_scale, optim.scale_max)
        numbers = {
            **found.terms,
            "infonce": found.infonce.mean(),
            "saturated": (found.infonce < SATURATED).float().mean(),
            "grad_norm": norm,
            "scale": self.model.scale.detach(),
        }
        return StepMetrics(tuple(numbers), torch.stack([value.float() for value in numbers.values()]), len(found.terms))
