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

MORE, LEAST = 4, 64  # times the wanted that an engine is asked for, its order is only roughly right; and no fewer rows
FURTHER = 16  # times that, where dead rows left too few of them


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
        """What the engine proposes, and what it does not know of yet; all rows for a query it has too little for."""
        covered = min(candidates.covered, len(self.vectors))
        wanted = min(k, covered - int((self._dead < covered).sum()))  # living rows that must come
        proposed = self._propose(candidates, queries, covered, wanted)
        recent = exact_nearest(self.vectors, queries, k, first=covered, dead=self._dead)
        found = [
            ranked(self.vectors, query, torch.cat([rows, new]), k)
            for query, rows, (_, new) in zip(queries, proposed, recent)
        ]
        if short := [number for number, rows in enumerate(proposed) if len(rows) < wanted]:
            for number, exact in zip(short, exact_nearest(self.vectors, queries[short], k, dead=self._dead)):
                found[number] = exact
        return found

    def _propose(self, candidates: Candidates, queries: Tensor, covered: int, wanted: int) -> list[Tensor]:
        """Living rows for each query, at least as many as are wanted if the engine has them."""
        rows = [torch.zeros(0, dtype=torch.int64) for _ in queries]
        some_more = max(MORE * wanted, LEAST)
        for count in (some_more, FURTHER * some_more):  # once more where dead rows were in the way
            short = [number for number, some in enumerate(rows) if len(some) < wanted]
            if short:
                found = candidates.propose(queries[short].numpy(), min(covered, count))  # [short, count]
                for number, some in zip(short, torch.from_numpy(found)):
                    rows[number] = self._living(some, covered)
        return rows

    def _living(self, proposed: Tensor, covered: int) -> Tensor:
        """Rows of this version, each once."""
        rows = proposed[(proposed >= 0) & (proposed < covered)].unique()
        return rows[~torch.isin(rows, self._dead)]
