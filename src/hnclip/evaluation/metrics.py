"""Recall at K and rank statistics, in percent, per direction."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hnclip.evaluation.bootstrap import bootstrap_intervals
from hnclip.evaluation.ranks import ARROWS, Ranks


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
) -> dict[str, Any]:
    """Recall at every K, mean and median rank of both directions, with bootstrap intervals if asked.

    Args:
        ranks: from `retrieval_ranks`.
        ks: lengths of the result list.
        intervals: also bootstrap every recall, unless there is only one image or group. The captions of one image
            are always drawn together.
        groups: label per image; images of one label (near-duplicates) are drawn together, with all their captions.
            Without it every image is its own group.

    Returns:
        Plain numbers and lists, ready for JSON: "text_to_image" and "image_to_text" with "R@1", "R@1_interval", …,
        "mean_rank", "median_rank" and "queries" each, and for every K "mean_R@K", the mean recall of both.

    Shape:
        groups [I].
    """
    labels = ranks.query_groups(groups)
    bootstrapped = intervals and labels["image_to_text"].unique().numel() > 1  # one group has no spread to measure
    found: dict[str, Any] = {}
    for direction in ARROWS:
        own = getattr(ranks, direction)  # [n]
        values = found[direction] = {}
        hits = 100.0 * (own[:, None] <= torch.tensor(ks))  # [n, K] in percent, like the recall
        estimates = bootstrap_intervals(hits, groups=labels[direction]) if bootstrapped else [None] * len(ks)
        for k, estimate in zip(ks, estimates):
            values[f"R@{k}"] = recall_at(own, k)
            if estimate is not None:
                values[f"R@{k}_interval"] = [estimate.low, estimate.high]
        values["mean_rank"] = statistics.fmean(own.tolist())
        values["median_rank"] = float(statistics.median(own.tolist()))
        values["queries"] = len(own)
    return found | {f"mean_R@{k}": sum(found[direction][f"R@{k}"] for direction in ARROWS) / 2 for k in ks}
