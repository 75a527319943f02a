"""The vectors of one kind, searched: whatever engine proposes, scores and order are those of the stored vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hnclip.search.engines import Candidates
from hnclip.search.engines.exact import exact_nearest, ranked
from hnclip.search.index.layout import Kind
from hnclip.search.index.reader import Index

MORE = 4  # times k that an engine is asked for: its order is only roughly the right one


@dataclass(frozen=True)
class Nearest:
    """Rows that were found for one query, nearest first, and their cosines with it; each [≤ k]."""

    rows: np.ndarray
    scores: np.ndarray


class Gallery:
    """Images or captions of an index, ready to be searched."""

    def __init__(self, index: Index, kind: Kind, candidates: Candidates | None = None) -> None:
        """
        Args:
            candidates: an approximate engine; without one the search is exact.
        """
        self.vectors = index.vectors(kind)
        self.candidates = candidates
        self._dead = torch.from_numpy(index.dead(kind))  # [dead]

    def __len__(self) -> int:
        """Rows that can be found."""
        return len(self.vectors) - len(self._dead)

    def nearest(self, queries: np.ndarray, k: int) -> list[Nearest]:
        """The k nearest rows of each query [Q, D], fewer if there are no more; equal scores by row."""
        asked = torch.from_numpy(np.ascontiguousarray(queries, np.float32))  # [Q, D]
        k = min(k, len(self))
        if k < 1:
            return [Nearest(np.zeros(0, np.int64), np.zeros(0, np.float32)) for _ in asked]
        if self.candidates is None:
            found = exact_nearest(self.vectors, asked, k, dead=self._dead)
        else:
            found = self._approximate(self.candidates, asked, k)
        return [Nearest(rows.numpy(), scores.numpy()) for scores, rows in found]

    def _approximate(self, candidates: Candidates, queries: Tensor, k: int) -> list[tuple[Tensor, Tensor]]:
        """What the engine proposes, and what it does not know of yet."""
        covered = min(candidates.covered, len(self.vectors))
        recent = exact_nearest(self.vectors, queries, k, first=covered, dead=self._dead)
        wanted = min(covered, k, covered - int((self._dead < covered).sum()))  # living rows that must come
        count = min(covered, MORE * k)
        rows = [torch.zeros(0, dtype=torch.int64) for _ in queries]
        while wanted:
            proposed = torch.from_numpy(candidates.propose(queries.numpy(), count))  # [Q, count]
            rows = [self._living(some, covered) for some in proposed]
            if count == covered or min(map(len, rows)) >= wanted:
                break
            count = min(covered, 4 * count)  # dead rows were in the way
        return [
            ranked(self.vectors, query, torch.cat([own, new]), k) for query, own, (_, new) in zip(queries, rows, recent)
        ]

    def _living(self, proposed: Tensor, covered: int) -> Tensor:
        """Rows of this version, each once."""
        rows = proposed[(proposed >= 0) & (proposed < covered)].unique()
        return rows[~torch.isin(rows, self._dead)]
