"""A distribution of similarities as the counts of equal bins, which add up over tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

BINS = 20_000  # of [-1, 1]: quantiles are exact to 1e-4


@dataclass(frozen=True, eq=False)
class Histogram:
    """How often a value lies in each of K equal bins of [low, high], and the mean, which is not read off the bins.

    Values outside are counted in the outermost bins: a cosine may be 1 + 1e-7.

    `error` is how far any share read off it may be from that of all values, with 95 % confidence; 0 if all values were
    counted.

    Shape:
        counts: [K] int64
    """

    counts: np.ndarray
    mean: float
    low: float = -1.0
    high: float = 1.0
    error: float = 0.0

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def edges(self) -> np.ndarray:
        """[K + 1]"""
        return np.linspace(self.low, self.high, len(self.counts) + 1)

    @property
    def deviation(self) -> float:
        """The standard deviation, to the width of a bin."""
        self._check_filled()
        middles = (self.edges[1:] + self.edges[:-1]) / 2  # [K]
        # Around the mean of the bins: that of a sample's histogram may be the mean of all.
        mean = np.average(middles, weights=self.counts)
        return math.sqrt(np.average((middles - mean) ** 2, weights=self.counts))

    def quantile(self, share: float) -> float:
        """The value below which this share of all lies, to the width of a bin: 0 is the least value, 1 the greatest."""
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1, got {share}")
        self._check_filled()
        cumulated = np.cumsum(self.counts)  # [K]
        place = share * self.total
        slot = int(np.searchsorted(cumulated, max(place, 0.5)))  # the least value, too, is in a bin that holds values
        inside = (place - (cumulated[slot] - self.counts[slot])) / self.counts[slot]
        return float(self.low + (slot + inside) * self._width)

    def share_above(self, value: float) -> float:
        """The share of values that are at least `value`: exact at the edge of a bin, elsewhere to the width of one."""
        self._check_filled()
        place = min(max((value - self.low) / self._width, 0.0), float(len(self.counts)))
        # 0.8 and the edge that stands for it may differ in their last digit.
        whole = round(place) if abs(place - round(place)) < 1e-6 else math.floor(place)
        above = int(self.counts[whole:].sum())
        cut = max(place - whole, 0.0) * int(self.counts[whole]) if whole < len(self.counts) else 0.0
        return (above - cut) / self.total

    def merged(self, bins: int) -> Histogram:
        """The same with fewer bins, of which the number must be a divisor of this one's."""
        if bins < 1 or len(self.counts) % bins:
            raise ValueError(f"{len(self.counts)} bins cannot be merged into {bins}")
        counts = self.counts.reshape(bins, -1).sum(1)
        return replace(self, counts=counts)

    def to_dict(self, quantiles: Sequence[float] = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)) -> dict[str, Any]:
        """For JSON, with bins that a figure would show."""
        few = self.merged(200) if len(self.counts) % 200 == 0 else self
        return {
            "count": self.total,
            "mean": self.mean,
            "quantiles": {f"{share:g}": self.quantile(share) for share in quantiles} if self.total else {},
            "error": self.error,
            "low": self.low,
            "high": self.high,
            "counts": few.counts.tolist(),
        }

    @property
    def _width(self) -> float:
        return (self.high - self.low) / len(self.counts)

    def _check_filled(self) -> None:
        if not self.total:
            raise ValueError("an empty histogram has neither quantiles nor shares nor a deviation")


def count_values(values: Tensor, *, bins: int = BINS, low: float = -1.0, high: float = 1.0) -> Tensor:
    """[K] int64: how many values lie in each bin of a `Histogram`; -inf stands for no value.

    A bin holds its lower edge. Places are found in fp64: in fp32 a value just below an edge is rounded onto it.
    """
    place = values.detach().flatten().double().sub_(low).mul_(bins / (high - low)).clamp_(0, bins - 1)  # [n]
    counts = place.int().bincount(minlength=bins)  # [K]
    counts[0] -= (values == -torch.inf).sum()
    return counts


def sampling_error(samples: int) -> float:
    """How far any share among independent draws may be from that among all, with 95 % confidence.

    Reference:
        Dvoretzky, Kiefer and Wolfowitz, with Massart's constant: P(sup |F_n - F| > e) ≤ 2 exp(-2 n e²).
    """
    return math.sqrt(math.log(2 / 0.05) / (2 * samples))
