"""Engines find the nearest vectors of an index; one contract for all of them.

The index keeps every vector; an engine only proposes rows (`Candidates`), and `Gallery` scores them with the stored
vectors, leaves out what is dead, adds what was written after the engine was made, and puts them in order. So scores are
the same numbers whoever found the rows, an engine that lags behind loses nothing, and what an approximate engine can
get wrong is only which rows it proposes: its recall.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

# Rows that are kept in view while a graph (HNSW) is searched. Descriptions lie far from all pictures, and with fewer
# rows in view a graph of many misses some of those that are nearest to them.
IN_VIEW = 1024


class Candidates(ABC):
    """Proposes rows for queries. `covered` is how many rows, from the first on, it knows of."""

    covered: int

    @abstractmethod
    def propose(self, queries: np.ndarray, count: int) -> np.ndarray:
        """The rows that it takes for the nearest, best first.

        Shape:
            queries: [Q, D] float32 of length 1
            returns [Q, count] int64, -1 where it has no more
        """

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Give back what is held."""
