"""The negatives of training batches before the first step: how similar their captions are, and both losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hnclip.analysis.captions import BINS, Histogram, count_values
from hnclip.config import TrainConfig
from hnclip.data.batching import PairData
from hnclip.data.sampler import cluster_order, cut_batches, epoch_order, nearest_captions
from hnclip.losses import clip_loss, hard_negative_loss
from hnclip.losses.hard_negative import agree, product
from hnclip.training.data import REACH, batch_sizes
from hnclip.training.step import SATURATED, chunk_slices

CLUSTER = 4  # near-duplicates in a batch, where clusters are compared with random batches
SAMPLE = 4096  # queries that are compared with more pairs than a batch has
PAPER_EDGES = (0.8, 0.9)
NO_NEGATIVES = "no batch holds two pairs that differ, so there are no negatives"


class QueryGroup(NamedTuple):
    """Pairs that one evaluation of the loss compares: all are columns, the first `queries` are queries too.

    Shape:
        rows [R]
    """

    rows: Tensor
    queries: int


@dataclass(frozen=True)
class Epoch:
    """The first epoch of a run: N pairs, each an image with one of its captions, in batches.

    Shape:
        chosen: [N], the row of each pair's caption; ids: [N, 2], image and caption; memory: [M], the pairs in memory
    """

    chosen: Tensor
    ids: Tensor
    batches: list[list[int]]
    micro_batch: int
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def groups(self, negatives: str) -> list[QueryGroup]:
        """The groups of the epoch with negatives "micro", "batch" or "memory" (at its start); with "all", some pairs
        against all. Of the last two, the groups of at most `SAMPLE` queries."""
        if negatives == "batch":
            return [QueryGroup(torch.tensor(rows), len(rows)) for rows in self.batches]
        micro = [
            torch.tensor(rows[part]) for rows in self.batches for part in chunk_slices(len(rows), self.micro_batch)
        ]
        if negatives == "micro":
            return [QueryGroup(rows, len(rows)) for rows in micro]
        columns = self.memory if negatives == "memory" else torch.arange(len(self.ids))
        most = SAMPLE // self.micro_batch
        return [QueryGroup(torch.cat([rows, columns]), len(rows)) for rows in micro[:most]]


def first_epoch(pairs: PairData, config: TrainConfig) -> Epoch:
    """The captions and random batches of a run's first epoch, and its memory as the trainer fills it."""
    drawn = pairs.draw(config.seed, 0)
    memory = epoch_order(len(pairs), config.seed, config.optim.epochs)[: config.optim.memory]
    return Epoch(
        chosen=drawn.chosen,
        ids=drawn.ids,
        batches=cut_batches(epoch_order(len(pairs), config.seed, 0), batch_sizes(len(pairs), config)),
        micro_batch=config.optim.micro_batch,
        memory=torch.tensor(memory, dtype=torch.int64),
    )


def clustered_epoch(epoch: Epoch, text: Tensor, seed: int) -> Epoch:
    """The epoch with batches of clusters, as a run with --cluster deals them.

    Shape:
        text [N, D], captions of the pairs
    """
    order = cluster_order(nearest_captions(text, REACH * CLUSTER), CLUSTER, seed, 0)
    return replace(epoch, batches=cut_batches(order, [len(rows) for rows in epoch.batches]))


@dataclass(frozen=True)
class BatchNegatives:
    """Caption similarities of queries with their negatives.

    Args:
        hardest: mean cosine of a query with its hardest negative.
        spread: deviation among the negatives of a query, as the root of its mean square.
        count: negatives of a query, in the mean.
    """

    similarities: Histogram
    hardest: float
    spread: float
    count: float


@torch.no_grad()
def batch_negatives(text: Tensor, groups: Iterable[QueryGroup], ids: Tensor) -> BatchNegatives:
    """Caption similarity of each query with its negatives: the entries of Ḡ that carry a margin, of one direction.

    Args:
        text: unit vectors of the pairs' captions.
        ids: pairs that agree in any column are never negatives of each other.

    Shape:
        text [N, D]; ids [N, K]

    Reference:
        HN-CLIP, eq. 2; appendix A, figure "Statistical analysis of the caption geometry", panel C.
    """
    counts = torch.zeros(BINS, dtype=torch.int64)
    total, hardest, variances, numbers = 0.0, [], [], []
    for similarity in _negatives(text, groups, ids):  # [q, R]
        counts += count_values(similarity)
        hardest.append(similarity.amax(1))
        real = similarity > -torch.inf
        values, number = similarity.double().masked_fill(~real, 0), real.sum(1)  # [q, R], [q]
        mean = values.sum(1) / number
        variances.append((values.square().sum(1) / number - mean.square()).clamp(min=0))
        total += values.sum().item()
        numbers.append(number)
    if not hardest:
        raise ValueError(NO_NEGATIVES)
    return BatchNegatives(
        similarities=Histogram(counts.numpy(), total / int(counts.sum())),
        hardest=torch.cat(hardest).double().mean().item(),
        spread=torch.cat(variances).mean().sqrt().item(),
        count=torch.cat(numbers).double().mean().item(),
    )


def _negatives(text: Tensor, groups: Iterable[QueryGroup], ids: Tensor) -> Iterator[Tensor]:
    """Similarities [q, R] of the queries that have a negative, -inf where there is none."""
    for rows, queries in groups:
        vectors, names = text[rows].float(), ids[rows]
        similarity = product(vectors[:queries], vectors)  # [q, R]
        similarity.masked_fill_(agree(names[:queries], names), -torch.inf)  # a pair agrees with itself
        similarity = similarity[similarity.amax(1) > -torch.inf]
        if len(similarity):
            yield similarity


@torch.no_grad()
def hardest_weight(text: Tensor, groups: Iterable[QueryGroup], ids: Tensor, strengths: Sequence[float]) -> list[float]:
    """For each strength s·γ, how much of a query's weight its hardest negative would have if only margins counted: the
    largest entry of softmax(s·γ·Ḡ), mean over queries. At strength 0 it is 1 / negatives."""
    found = []
    for similarity in _negatives(text, groups, ids):  # [q, R]
        none, values = similarity == -torch.inf, similarity.double()  # 0 · −inf would be NaN
        logits = ((strength * values).masked_fill(none, -torch.inf) for strength in strengths)
        found.append(torch.stack([one.softmax(1).amax(1) for one in logits]))  # [S, q]
    return torch.cat(found, dim=1).mean(1).tolist()


@dataclass(frozen=True)
class Buckets:
    """Shares of negatives below the first edge, between edges, and from the last one on."""

    edges: Sequence[float]
    shares: Sequence[float]
    labels: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def buckets(histogram: Histogram, edges: Sequence[float] = PAPER_EDGES) -> Buckets:
    """Shares by edges in rising order; an edge belongs to the bucket above it. Exact at edges of bins, as 0.8 is."""
    above = [1.0, *(histogram.share_above(edge) for edge in edges), 0.0]
    names = [f"{edge:.4g}" for edge in edges]
    between = (f"{low} to {high}" for low, high in pairwise(names))
    labels = (f"below {names[0]}", *between, f"{names[-1]} and above")
    return Buckets(edges, [more - less for more, less in pairwise(above)], labels)


def quantile_edges(histogram: Histogram) -> tuple[float, ...]:
    """Edges for any encoder: the median, the 90 % and the 99 % quantile, at edges of bins, each once."""
    return tuple(dict.fromkeys(round(histogram.quantile(share) * BINS / 2) / (BINS / 2) for share in (0.5, 0.9, 0.99)))


def batch_similarity(text: Tensor, rows: Sequence[int]) -> Tensor:
    """Ḡ [B, B] of a batch: cosines of its captions, 0 on the diagonal.

    Reference:
        HN-CLIP, eq. 2; appendix A, figure "One real training batch per benchmark".
    """
    chosen = text[torch.as_tensor(rows)].float()  # [B, D]
    return product(chosen, chosen).fill_diagonal_(0)


@dataclass(frozen=True)
class BatchLosses:
    """InfoNCE and L_HN over several evaluations: quartiles, and the share of evaluations below `SATURATED`.
    `negatives` of a query, in the mean."""

    evaluations: int
    negatives: float
    gamma: float
    scale: float
    infonce_quartiles: list[float]
    hn_quartiles: list[float]
    infonce_saturated: float
    hn_saturated: float


@torch.no_grad()
def batch_losses(
    image: Tensor, text: Tensor, ids: Tensor, groups: Iterable[QueryGroup], *, scale: float, gamma: float
) -> BatchLosses:
    """Both losses of each group that has negatives, in float64: in float32 a loss below 1e-7 is 0.

    Shape:
        image, text [N, D], unit vectors; ids [N, K], as of `batch_negatives`

    Reference:
        HN-CLIP, figure 4a, at the first step.
    """
    image, text, found, negatives, queries = image.double(), text.double(), [], 0, 0
    for rows, own in groups:
        names = ids[rows]
        if not (count := int((~agree(names[:own], names)).sum())):
            continue
        shard: dict[str, Any] = {"ids": names, "rows": own}
        infonce = clip_loss(image[rows], text[rows], scale, **shard)
        found.append(torch.stack([infonce, hard_negative_loss(image[rows], text[rows], scale, gamma, **shard)]))
        negatives, queries = negatives + count, queries + own
    if not found:
        raise ValueError(NO_NEGATIVES)
    losses = torch.stack(found)  # [L, 2]
    quartiles = losses.quantile(losses.new_tensor([0.25, 0.5, 0.75]), dim=0).T.tolist()
    saturated = (losses < SATURATED).double().mean(0).tolist()
    return BatchLosses(len(losses), negatives / queries, gamma, scale, *quartiles, *saturated)
