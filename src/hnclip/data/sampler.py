"""Which pairs meet in a batch: an order from the seed and the epoch alone, and no pair beside its own double.

The batches are those of the whole job. Several processes deal the same batches and each takes its `share`, so the order
is the same for any number of them; a run that stopped in the middle of an epoch deals it again and goes on behind the
batches that are done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Deal:
    """An epoch cut into batches of rows, and the rows that found no batch without a double of themselves."""

    batches: list[list[int]]
    left_out: list[int]


def epoch_order(length: int, seed: int, epoch: int) -> list[int]:
    """The order of the pairs in an epoch."""
    return torch.randperm(length, generator=_generator(seed, epoch)).tolist()


def choose_captions(counts: Tensor, seed: int, epoch: int) -> Tensor:
    """Which of its captions each record shows in an epoch: a random one in the first, then one after the other, so that
    every caption has come up once before any comes up again.

    Shape:
        counts [N], captions of each record; returns [N].
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(2**31, counts.shape, generator=generator)  # [N]
    return (start + epoch) % counts


def deal_batches(order: Sequence[int], ids: Tensor, sizes: Sequence[int]) -> Deal:
    """Fill batches in this order, but never two rows that share a number in the same column of `ids`.

    A row that has a double in the batch waits for the next one. What is still waiting at the end takes the place of a
    row in an earlier batch that can move to the end instead. Rows for which no place is found stay out, above all when
    there are more doubles than batches: in another epoch, in another order, it is the turn of others.

    Args:
        order: rows of `ids`, each once.
        ids: equal numbers in a column mean the same picture, or the same caption.
        sizes: rows per batch, together as many as there are in `order`.

    Shape:
        ids [N, C]

    Relations:
        Without doubles the batches are `order`, cut by `sizes`.
    """
    if sum(sizes) != len(order):
        raise ValueError(f"sizes must add up to the {len(order)} rows of the order, got {sum(sizes)}")
    table = _Table(ids, sizes)
    coming, left_out = table.within_reach(order)
    waiting: list[int] = []
    position = 0
    for batch in range(len(sizes)):
        waiting = [row for row in waiting if not table.put(row, batch)]
        while position < len(coming) and not table.is_full(batch):
            if not table.put(coming[position], batch):
                waiting.append(coming[position])
            position += 1
    left_out += [row for row in waiting if not table.squeeze_in(row)]
    if len(order) > 1 and not all(table.give_company(batch) for batch in range(len(sizes))):
        raise ValueError(
            f"the pictures and captions are too much alike to fill {len(sizes)} batches: {len(left_out)} of "
            f"{len(order)} pairs repeat others; use larger batches (fewer of them), or merge the records that repeat"
        )
    return Deal(table.batches, left_out)


def share(batch: Sequence[int], rank: int, world: int) -> list[int]:
    """The rows of one process: joined over all processes, in the order of their ranks, they are the batch."""
    return list(batch[len(batch) * rank // world : len(batch) * (rank + 1) // world])


@torch.no_grad()
def nearest_captions(vectors: Tensor, count: int, *, chunk: int = 2048) -> Tensor:
    """The `count` nearest others of every vector by cosine, the nearest first.

    Shape:
        vectors [N, D]; returns [N, min(count, N - 1)]. Memory is O(chunk · N).
    """
    unit = torch.nn.functional.normalize(vectors.float(), dim=1)  # [N, D]
    count = min(count, len(unit) - 1)
    found = []
    for start in range(0, len(unit), chunk):
        scores = unit[start : start + chunk] @ unit.T  # [c, N]
        rows = torch.arange(len(scores))
        scores[rows, start + rows] = -torch.inf  # nobody is a neighbour of itself
        found.append(scores.topk(count, dim=1).indices)  # [c, count]
    return torch.cat(found)


def cluster_order(neighbours: Tensor, size: int, seed: int, epoch: int) -> list[int]:
    """An order of the pairs in which near-duplicates stand together: clusters of up to `size`, in random order.

    Walking through the epoch's random order, each pair that is still free takes its nearest free neighbours with it. So
    the clusters differ from epoch to epoch, and with `size` 1 this is `epoch_order`. The paper has nothing like it: its
    batches are random.

    Shape:
        neighbours [N, K], from `nearest_captions`.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    free = [True] * len(neighbours)
    near = neighbours.tolist()
    clusters: list[list[int]] = []
    for first in epoch_order(len(near), seed, epoch):
        if not free[first]:
            continue
        cluster = [first, *(row for row in near[first] if free[row])][:size]
        for row in cluster:
            free[row] = False
        clusters.append(cluster)
    if size > 1:  # latecomers found few free neighbours; without this, small clusters would end every epoch
        turns = torch.randperm(len(clusters), generator=_generator(seed, epoch, 1)).tolist()
        clusters = [clusters[turn] for turn in turns]
    return [row for cluster in clusters for row in cluster]


def _generator(seed: int, epoch: int, stream: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed((stream << 60) + (seed << 20) + epoch)


class _Table:
    """Batches while they are dealt, and which numbers each of them holds already."""

    def __init__(self, ids: Tensor, sizes: Sequence[int]) -> None:
        self.batches: list[list[int]] = [[] for _ in sizes]
        self._sizes = sizes
        self._held: list[set[tuple[int, int]]] = [set() for _ in sizes]
        # (column, number) pairs: a picture and a caption of one number are not the same thing
        self._numbers = [set(enumerate(row)) for row in ids.tolist()]

    def within_reach(self, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """Rows that may find a place, and those that cannot: more doubles came before them than there are batches."""
        seen: Counter[tuple[int, int]] = Counter()
        near: list[int] = []
        far: list[int] = []
        for row in order:
            if any(seen[number] >= len(self._sizes) for number in self._numbers[row]):
                far.append(row)
            else:
                seen.update(self._numbers[row])
                near.append(row)
        return near, far

    def is_full(self, batch: int) -> bool:
        return len(self.batches[batch]) >= self._sizes[batch]

    def put(self, row: int, batch: int) -> bool:
        """Add a row, unless the batch is full or holds a double of it."""
        if self.is_full(batch) or not self._held[batch].isdisjoint(self._numbers[row]):
            return False
        self.batches[batch].append(row)
        self._held[batch] |= self._numbers[row]
        return True

    def give_company(self, batch: int) -> bool:
        """Whether a batch has two rows, of which a loss can tell one from the other; if need be from larger batches."""
        for giver in sorted(range(len(self.batches)), key=lambda other: -len(self.batches[other])):
            for row in list(self.batches[giver]):
                if len(self.batches[batch]) >= 2:
                    return True
                if giver != batch and len(self.batches[giver]) > 2 and self.put(row, batch):
                    self.batches[giver].remove(row)
                    self._held[giver] -= self._numbers[row]
        return len(self.batches[batch]) >= 2

    def squeeze_in(self, row: int) -> bool:
        """Find a place for a row among batches that are dealt: an empty one, or that of a row that can move there."""
        short = [batch for batch in range(len(self._sizes)) if not self.is_full(batch)]
        if any(self.put(row, batch) for batch in short):
            return True
        for batch, rows in enumerate(self.batches):
            if not self._held[batch].isdisjoint(self._numbers[row]):
                continue
            for position, other in enumerate(rows):
                if any(self.put(other, place) for place in short if place != batch):
                    rows[position] = row
                    self._held[batch] = self._held[batch] - self._numbers[other] | self._numbers[row]
                    return True
        return False
