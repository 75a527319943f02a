"""A distribution of similarities as the counts of equal bins, which add up over tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
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

    def quantile(self, share: float) -> float:
        """The value below which this share of all lies, to the width of a bin."""
        if not self.total:
            raise ValueError("an empty histogram has no quantiles")
        cumulated = np.cumsum(self.counts) / self.total  # [K]
        return float(np.interp(share, np.r_[0.0, cumulated], self.edges))

    def share_above(self, value: float) -> float:
        """The share of values that are at least `value`, to the width of a bin."""
        cumulated = np.r_[0.0, np.cumsum(self.counts) / max(1, self.total)]  # [K + 1]
        return float(1 - np.interp(value, self.edges, cumulated))

    def merged(self, bins: int) -> Histogram:
        """The same with fewer bins, of which the number must be a divisor of this one's."""
        if bins < 1 or len(self.counts) % bins:
            raise ValueError(f"{len(self.counts)} bins cannot be merged into {bins}")
        counts = self.counts.reshape(bins, -1).sum(1)
        return Histogram(counts, self.mean, self.low, self.high, self.error)

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
