"""How hard the negatives are that training meets in its batches, by the similarity of their captions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hnclip.analysis.histogram import BINS, Histogram, count_values
from hnclip.losses.hard_negative import agree, check_embeddings, check_ids, product

PAPER_EDGES = (0.8, 0.9)

_NONE = "no batch holds two pairs that differ, so there are no negatives; use larger batches"


@dataclass(frozen=True)
class Buckets:
    """Shares of negatives below the first edge, between edges, and from the last one on; together 1."""

    edges: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """What to call each share: "below 0.8", "0.8 to 0.9", "0.9 and above"."""
        said = [f"{edge:.4g}" for edge in self.edges]
        between = [f"{low} to {high}" for low, high in pairwise(said)]
        return (f"below {said[0]}", *between, f"{said[-1]} and above")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "labels": self.labels}


@torch.no_grad()
def negative_similarities(
    text: Tensor, batches: Iterable[Sequence[int]], ids: Tensor, *, chunk: int = 1024
) -> Histogram:
    """Caption similarity of every pair with each of its negatives, over batches as training deals them.

    Args:
        text: the embedding of each pair's caption, L2-normalised.
        batches: rows that meet in one evaluation of the loss, e.g. the micro-batches of an epoch.
        ids: pairs that agree in any column are the same picture or caption, never negatives; `PairData.ids`.
        chunk: rows of a batch that are compared at a time with all of it.

    Shape:
        text [N, D]; ids [N, K] integers.

    Relations:
        Without doubles a batch of B pairs counts B·(B - 1) negatives. These are the entries of Ḡ that carry a margin,
        of one direction; the other has the same.

    Reference:
        HN-CLIP, eq. 2; appendix A, figure "Statistical analysis of the caption geometry", panel C.
    """
    counts = torch.zeros(BINS, dtype=torch.int64, device=text.device)  # [K]
    total = torch.zeros((), dtype=torch.float64, device=text.device)
    for similarity in _negatives(text, batches, ids, chunk):
        counts += count_values(similarity)
        total += similarity[similarity > -torch.inf].sum(dtype=torch.float64)
    count = int(counts.sum())
    if not count:
        raise ValueError(_NONE)
    return Histogram(counts.cpu().numpy(), total.item() / count)


@torch.no_grad()
def hardest_in_batch(text: Tensor, batches: Iterable[Sequence[int]], ids: Tensor, *, chunk: int = 1024) -> float:
    """Mean similarity of each pair's hardest negative in its batch; arguments as of `negative_similarities`.

    Relations:
        With one caption per picture, no doubles and all pairs in one batch, the mean of `CaptionGeometry.hardest`;
        smaller batches can only lower it.
    """
    return _mean_of_largest(_negatives(text, batches, ids, chunk))


@torch.no_grad()
def hardest_of_all(text: Tensor, ids: Tensor, *, most: int = 4096, seed: int = 0, chunk: int = 256) -> float:
    """The similarity of a pair's hardest negative if all N pairs were its batch; the mean over at most `most` of them,
    drawn at random.

    Shape:
        text [N, D], L2-normalised; ids [N, K] integers. Memory is O(chunk · N).

    Relations:
        `hardest_in_batch` of one batch of all pairs, if N is no more than `most`.
    """
    rows = torch.randperm(len(text), generator=torch.Generator().manual_seed(seed))[:most].to(text.device)  # [S]
    numbers = torch.as_tensor(check_ids(ids, len(text)), device=text.device)  # [N, K]
    return _mean_of_largest(
        product(text[part].float(), text.float()).masked_fill_(agree(numbers[part], numbers), -torch.inf)  # [b, N]
        for part in rows.split(chunk)
    )


def _mean_of_largest(similarities: Iterable[Tensor]) -> float:
    """Of every row [b, B] that has a number; -inf is none, and a pair may have no negative."""
    hardest = torch.cat([torch.empty(0), *(part.amax(1).cpu() for part in similarities)])  # [n]
    hardest = hardest[hardest > -torch.inf]
    if not len(hardest):
        raise ValueError(_NONE)
    return hardest.mean(dtype=torch.float64).item()


def _negatives(text: Tensor, batches: Iterable[Sequence[int]], ids: Tensor, chunk: int) -> Iterator[Tensor]:
    """Similarities [b, B] of some pairs of a batch with all of it, -inf where these are no negatives."""
    check_embeddings("text", text, 2)
    if not text.isfinite().all():
        raise ValueError("text must be finite, got NaN or infinity")
    numbers = torch.as_tensor(check_ids(ids, len(text)), device=text.device)  # [N, K]
    for batch in batches:
        rows = torch.as_tensor(batch, dtype=torch.int64, device=text.device)  # [B]
        for part in rows.split(chunk):
            similarity = product(text[part].float(), text[rows].float())  # [b, B]
            yield similarity.masked_fill_(agree(numbers[part], numbers[rows]), -torch.inf)  # a pair agrees with itself


def bucket_shares(histogram: Histogram, edges: Sequence[float]) -> tuple[float, ...]:
    """The share of values in each bucket, from below the first edge to above the last: one more than there are edges.

    An edge belongs to the bucket above it. Shares are exact where the edges are those of bins, as 0.8 is.
    """
    if not edges or list(edges) != sorted(set(edges)):
        raise ValueError(f"edges must be at least one number, in rising order, got {tuple(edges)}")
    above = [1.0, *(histogram.share_above(edge) for edge in edges), 0.0]
    return tuple(more - less for more, less in pairwise(above))


def buckets(histogram: Histogram, edges: Sequence[float] = PAPER_EDGES) -> Buckets:
    """`bucket_shares` with their edges and names."""
    return Buckets(tuple(edges), bucket_shares(histogram, edges))


def quantile_edges(similarities: Histogram, shares: Sequence[float] = (0.5, 0.9, 0.99)) -> tuple[float, ...]:
    """Edges for an encoder whose cosines live elsewhere than the paper's: the values below which these shares of all
    pairs of captions lie, each at the nearest edge of a bin.

    Relations:
        Fewer than `shares` where quantiles coincide, above all if all captions are equal.
    """
    edges = similarities.edges  # [K + 1]
    nearest = [float(edges[abs(edges - similarities.quantile(share)).argmin()]) for share in sorted(shares)]
    return tuple(dict.fromkeys(round(edge, 10) for edge in nearest))


@torch.no_grad()
def batch_similarity(text: Tensor, rows: Sequence[int]) -> Tensor:
    """Ḡ of one batch: the similarity of its captions, 0 on the diagonal.

    Shape:
        text [N, D], L2-normalised; rows: B of them; returns [B, B].

    Reference:
        HN-CLIP, eq. 2; appendix A, figure "One real training batch per benchmark".
    """
    chosen = text[torch.as_tensor(rows, dtype=torch.int64, device=text.device)].float()  # [B, D]
    return product(chosen, chosen).fill_diagonal_(0)
