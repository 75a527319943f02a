"""Gradients of one optimiser step in chunks that fit into memory, with negatives from the chunk or the batch.

A contrastive loss does not add up over chunks, because every pair is everybody's negative. `cached_backward`
still gets the whole batch's gradient with the activations of one chunk (GradCache, Gao et al. 2021):

1. Encode every chunk without a graph, and remember the random state it began with.
2. Join the embeddings, evaluate the objective on all pairs, and keep its gradient by every embedding.
3. Encode every chunk again, now with a graph, and push the kept gradients into the parameters.

By the chain rule this is exact if step 3 computes the same embeddings as step 1. Dropout draws new masks at
every call, so step 3 replays the random state of step 1. A model that changes its buffers in forward, as
batch norm does, is out.

`micro_backward` is plain accumulation: every chunk is a batch of its own, with negatives from the chunk only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hnclip.core import Batch, Embeddings, ViewEmbeddings, join_embeddings
from hnclip.losses import clip_loss
from hnclip.objectives.base import Objective
from hnclip.train.checkpoint import random_state, restore_random_state


@dataclass(frozen=True)
class StepResult:
    """What one step saw, without gradients.

    Shape:
        terms: scalars by name, weights applied; means over the pairs of this process.
        losses: [L], the sum of the terms in each of the L evaluations of the objective.
        infonce: [L], plain InfoNCE of "full" and "caption" in each of them.

    Of several processes all are weighted so that their mean over processes is that of all pairs.
    """

    terms: dict[str, Tensor]
    losses: Tensor
    infonce: Tensor


@dataclass(frozen=True)
class Share:
    """What one process does of the batch of the whole job: which rows it encodes, and in which chunks. The default is
    a process that is alone, or that holds as much as any other.

    Args:
        rows: of the data; a batch of them is what the backward functions take.
        slices: of these rows, one for each chunk.
        evaluations: pairs of the whole job in each evaluation of the objective.
        processes: among which the batch is dealt.
        idle: the chunks, by number, in which there is nothing to do for this process. Each holds one pair that counts
            nowhere, because an encoder call may be a matter of all processes (FSDP).
    """

    rows: Sequence[int]
    slices: Sequence[slice]
    evaluations: Sequence[int]
    processes: int = 1
    idle: frozenset[int] = frozenset()

    @property
    def pairs(self) -> int:
        """Pairs of the whole job."""
        return sum(self.evaluations)

    def weight(self, pairs: int, chunk: int, own: int) -> float:
        """What a mean over `own` pairs in this chunk counts in a mean over `pairs` of the whole job."""
        return 0.0 if chunk in self.idle else self.processes * own / pairs


def _alone(embeddings: Embeddings) -> Embeddings:
    return embeddings


def _no_sync(last: bool) -> AbstractContextManager[Any]:
    return nullcontext()


def micro_backward(
    model: nn.Module,
    batch: Batch,
    objective: Objective,
    *,
    chunk: int,
    device: torch.device | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    gather: Callable[[Embeddings], Embeddings] = _alone,
    sync: Callable[[bool], AbstractContextManager[Any]] = _no_sync,
    share: Share | None = None,
) -> StepResult:
    """Add to every parameter the gradient of the mean loss of micro-batches of `chunk` pairs.

    Args:
        model: `model(batch, tokens=…) -> Embeddings`.
        objective: its terms' sum is the loss.
        chunk: pairs per micro-batch; see `chunk_slices` for the last one.
        device: where the model is, if the batch is elsewhere. In the host's memory a batch is cut without waiting
            for an accelerator: a chunk is as long as its longest caption.
        autocast: makes the context of each encoder call. Do not wrap the whole step instead: the objective
            stays outside, in full precision.
        gather: `gather_embeddings` adds the other processes' pairs of the same micro-batch as negatives.
        sync: makes the context of each chunk that goes backward, told whether it is the step's last one: gradients
            are exchanged between processes there, once.
        share: what the batch is of the whole job's, and its chunks instead of `chunk`; its micro-batches are those of
            the job.

    Relations:
        Losses count by their numbers of pairs, so uneven micro-batches average right. With a `chunk` as
        large as the batch this is `cached_backward`; with less, every pair has fewer negatives, and the
        gradient is another one.
    """
    device = device or batch.ids.device
    if share is None:
        slices = chunk_slices(len(batch), chunk)
        share = Share(range(len(batch)), slices, [rows.stop - rows.start for rows in slices])
    results = []
    for number, (rows, pairs) in enumerate(zip(share.slices, share.evaluations)):
        part = batch[rows].to(device)
        with sync(number == len(share.slices) - 1):
            with autocast():
                embeddings = model(part, tokens=objective.tokens)
            weight, weight_here = (share.weight(count, number, len(part)) for count in (share.pairs, pairs))
            gathered = gather(_without_pairs(embeddings) if number in share.idle else embeddings)
            results.append(_evaluate(objective, gathered, weight, weight_here))
    return StepResult(
        {name: torch.stack([result.terms[name] for result in results]).sum() for name in results[0].terms},
        torch.cat([result.losses for result in results]),
        torch.cat([result.infonce for result in results]),
    )


def cached_backward(
    model: nn.Module,
    batch: Batch,
    objective: Objective,
    *,
    chunk: int,
    device: torch.device | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    gather: Callable[[Embeddings], Embeddings] = _alone,
    sync: Callable[[bool], AbstractContextManager[Any]] = _no_sync,
    share: Share | None = None,
) -> StepResult:
    """Add to every parameter the gradient of the loss of the whole batch, encoding `chunk` pairs at a time.

    Afterwards the random state is where encoding every chunk once and evaluating the objective leaves it.

    Memory: the activations of one chunk, and the embeddings of the batch with their gradients. Time: one more
    forward pass than `micro_backward`.

    Args:
        model, objective, device, autocast, sync: as in `micro_backward`.
        chunk: pairs per encoder call; without dropout the result does not depend on it.
        gather: `gather_embeddings` adds the batches of the other processes as negatives.
        share: what the batch is of the whole job's, and its chunks instead of `chunk`.
    """
    device = device or batch.ids.device
    if share is None:
        share = Share(range(len(batch)), chunk_slices(len(batch), chunk), [len(batch)])
    chunks = [batch[rows].to(device) for rows in share.slices]
    states, parts = [], []
    for pairs in chunks:
        states.append(random_state(device))
        # Autocast ends with the call: older torch would hand weights cast here, without a graph, to step 3.
        with torch.no_grad(), autocast():
            parts.append(_as_leaves(model(pairs, tokens=objective.tokens)))

    joined = join_embeddings(parts)
    weight = share.weight(share.pairs, 0, len(batch))
    result = _evaluate(objective, gather(_without_pairs(joined) if share.idle else joined), weight, weight)

    for number, (pairs, state, part) in enumerate(zip(chunks, states, parts), start=1):
        with sync(number == len(chunks)):
            with _replay(state, device), autocast():
                live = model(pairs, tokens=objective.tokens)
            # No gradient: a view the objective ignores, or the scale of a part that did not lend it to the whole.
            # No graph: a frozen tower.
            pushed = [
                (tensor, leaf.grad)
                for tensor, leaf in zip(_differentiable(live), _differentiable(part))
                if leaf.grad is not None and tensor.requires_grad
            ]
            if pushed:
                tensors, grads = zip(*pushed)
                torch.autograd.backward(tensors, grads)
    return result


# By where the negatives of a pair come from.
BACKWARD: dict[str, Callable[..., StepResult]] = {"micro": micro_backward, "batch": cached_backward}


def chunk_slices(count: int, size: int) -> list[slice]:
    """Consecutive slices of `size` rows. One row left over joins the slice before: alone it has no negative."""
    if count < 1 or size < 1:
        raise ValueError(f"the batch and its chunks must hold at least 1 pair, got {count} and {size}")
    starts = list(range(0, count, size))
    if size > 1 and len(starts) > 1 and count - starts[-1] == 1:
        starts.pop()
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], count])]


def _differentiable(embeddings: Embeddings) -> list[Tensor]:
    """The tensors that a loss may send gradient to, in a fixed order."""
    views = [*embeddings.images.values(), *embeddings.texts.values()]
    tensors = [tensor for view in views for tensor in (view.vectors, view.tokens)]
    return [embeddings.scale, *(tensor for tensor in tensors if tensor is not None)]


def _as_leaves(embeddings: Embeddings) -> Embeddings:
    """The same numbers as the start of a new graph."""

    def views(side: Mapping[str, ViewEmbeddings]) -> dict[str, ViewEmbeddings]:
        return {
            name: replace(
                view,
                vectors=view.vectors.detach().requires_grad_(),
                tokens=None if view.tokens is None else view.tokens.detach().requires_grad_(),
            )
            for name, view in side.items()
        }

    scale = embeddings.scale.detach().requires_grad_()
    return replace(embeddings, images=views(embeddings.images), texts=views(embeddings.texts), scale=scale)


def _without_pairs(embeddings: Embeddings) -> Embeddings:
    return replace(embeddings, rows=0)


def _evaluate(objective: Objective, embeddings: Embeddings, weight: float, weight_here: float) -> StepResult:
    """Evaluate the objective once, its terms times `weight`, and go backward from their sum. `weight_here` is for what
    is told of this evaluation alone."""
    found = objective(embeddings)
    terms = {name: weight * term for name, term in found.items()}
    torch.stack(list(terms.values())).sum().backward()
    with torch.no_grad():
        loss = torch.stack(list(found.values())).sum()
        infonce = clip_loss(
            embeddings.images["full"].vectors,
            embeddings.texts["caption"].vectors,
            embeddings.scale,
            offset=embeddings.offset,
            rows=embeddings.rows,
            ids=embeddings.ids,
        )
    detached = {name: term.detach() for name, term in terms.items()}
    return StepResult(detached, weight_here * loss[None], weight_here * infonce[None])


@contextmanager
def _replay(state: dict[str, Tensor], device: torch.device) -> Iterator[None]:
    """Draw from `state` inside, and go on afterwards as if nothing had been drawn."""
    current = random_state(device)
    restore_random_state(state, device)
    try:
        yield
    finally:
        restore_random_state(current, device)
