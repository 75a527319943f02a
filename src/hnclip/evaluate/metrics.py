"""Recall at K and rank statistics, in percent, per direction."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hnclip.evaluate.bootstrap import Estimate, bootstrap_intervals
from hnclip.evaluate.ranks import Ranks


@dataclass(frozen=True)
class DirectionMetrics:
    """One direction: recall in percent by K, with intervals by K if they were asked for."""

    recall: Mapping[int, float]
    mean_rank: float
    median_rank: float
    queries: int
    intervals: Mapping[int, Estimate] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists under "R@1", "R@1_interval", …, "mean_rank", "median_rank", "queries"."""
        values: dict[str, Any] = {}
        for k, recall in self.recall.items():
            values[f"R@{k}"] = recall
            if k in self.intervals:
                values[f"R@{k}_interval"] = [self.intervals[k].low, self.intervals[k].high]
        return {**values, "mean_rank": self.mean_rank, "median_rank": self.median_rank, "queries": self.queries}


@dataclass(frozen=True)
class RetrievalMetrics:
    """Both directions of one model on one gallery."""

    text_to_image: DirectionMetrics
    image_to_text: DirectionMetrics

    def to_dict(self) -> dict[str, Any]:
        """Both directions, ready for JSON, and "mean_R@K", the mean recall of the two, for every K."""
        forward, backward = self.text_to_image, self.image_to_text
        means = {f"mean_R@{k}": (forward.recall[k] + backward.recall[k]) / 2 for k in forward.recall}
        return {"text_to_image": forward.to_dict(), "image_to_text": backward.to_dict(), **means}


def recall_at(ranks: Tensor, k: int) -> float:
    """Percentage of queries whose right answer is among the first k.

    A query counts as soon as one right answer is found, the usual R@K of retrieval; it is not the share of
    all right answers that were found.

    Args:
        ranks: 1-based ranks of one direction.
        k: length of the result list; beyond the gallery size every query is a hit.

    Shape:
        ranks [n] integers, at least one.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return 100 * int((ranks <= k).sum()) / len(ranks)


def summarize(
    ranks: Ranks,
    ks: Sequence[int] = (1, 5, 10, 25, 50),
    *,
    intervals: bool = False,
    groups: Tensor | None = None,
) -> RetrievalMetrics:
    """Recall at every K, mean and median rank of both directions, with bootstrap intervals if asked.

    Args:
        ranks: from `retrieval_ranks`.
        ks: lengths of the result list.
        intervals: also bootstrap every recall, unless there is only one image or group. The captions of one image
            are always drawn together.
        groups: label per image; images of one label (near-duplicates) are drawn together, with all their captions.
            Without it every image is its own group.

    Shape:
        groups [I].
    """
    image_groups = torch.arange(len(ranks.image_to_text)) if groups is None else groups.cpu()  # [I]
    bootstrapped = intervals and image_groups.unique().numel() > 1  # a single group has no spread to measure

    def direction(of: Tensor, labels: Tensor) -> DirectionMetrics:
        found: list[Estimate] = []
        if bootstrapped:
            hits = 100.0 * (of[:, None] <= torch.tensor(ks))  # [n, K] in percent, like the recall
            found = bootstrap_intervals(hits, groups=labels)
        return DirectionMetrics(
            recall={k: recall_at(of, k) for k in ks},
            mean_rank=statistics.fmean(of.tolist()),
            median_rank=float(statistics.median(of.tolist())),
            queries=len(of),
            intervals=dict(zip(ks, found)),
        )

    return RetrievalMetrics(
        text_to_image=direction(ranks.text_to_image, image_groups[ranks.owner]),
        image_to_text=direction(ranks.image_to_text, image_groups),
    )
