"""The order of training pairs: from the seed and the epoch alone, and so the same for any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def epoch_order(length: int, seed: int, epoch: int) -> list[int]:
    """The order of the pairs in an epoch."""
    return torch.randperm(length, generator=_generator(seed, epoch)).tolist()


def cut_batches(order: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Consecutive batches of these sizes."""
    stops = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [list(order[start:stop]) for start, stop in pairwise(stops)]


def choose_captions(counts: Tensor, seed: int, epoch: int) -> Tensor:
    """The caption of each record in an epoch, given their numbers of captions [N]: a random one in the first, then the
    next, so that every caption is used once before any is used again."""
    start = torch.randint(2**31, counts.shape, generator=torch.Generator().manual_seed(seed))  # [N]
    return (start + epoch) % counts


def share(batch: Sequence[int], rank: int, world: int) -> list[int]:
    """The rows of one process; joined in the order of ranks they are the batch."""
    return list(batch[len(batch) * rank // world : len(batch) * (rank + 1) // world])


@torch.no_grad()
def nearest_captions(vectors: Tensor, count: int, *, chunk: int = 2048) -> Tensor:
    """The `count` nearest others of every vector by cosine, nearest first.

    Shape:
        vectors: [N, D]; returns [N, min(count, N - 1)]. Memory is O(chunk · N).
    """
    unit = F.normalize(vectors.float(), dim=1)  # [N, D]
    count = min(count, len(unit) - 1)
    found = []
    for start in range(0, len(unit), chunk):
        scores = unit[start : start + chunk] @ unit.T  # [c, N]
        rows = torch.arange(len(scores))
        scores[rows, start + rows] = -torch.inf  # not its own neighbour
        found.append(scores.topk(count, dim=1).indices)  # [c, count]
    return torch.cat(found)


def cluster_order(neighbours: Tensor, size: int, seed: int, epoch: int) -> list[int]:
    """An order of the pairs in clusters of up to `size` near-duplicates, from `nearest_captions` [N, K].

    In the epoch's random order, each pair that is still free takes its nearest free neighbours into its cluster. With
    `size` 1 this is `epoch_order`. The paper's batches are random.
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
    if size > 1:  # the last ones find few free neighbours; without this, small clusters would end every epoch
        turns = torch.randperm(len(clusters), generator=_generator(seed, epoch, 1)).tolist()
        clusters = [clusters[turn] for turn in turns]
    return [row for cluster in clusters for row in cluster]


def _generator(seed: int, epoch: int, stream: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed((stream << 60) + (seed << 20) + epoch)
