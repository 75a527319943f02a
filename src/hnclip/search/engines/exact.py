"""Exact search through codes of 8 bits: every row is looked at, few are looked at closely, none is missed.

A scan of the codes gives each row's score to within a bound: the code's distance from its row (`slack`), the rounding
of the query to bf16 and that of the result. Some rows that look best are scored closely; the k-th best of these is a
score that k rows reach for certain. Whatever could reach it within the bound is scored closely too. The codes are half
of the bf16 vectors' bytes, and reading them is what a query takes its time for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hnclip.search.index.vectors import StoredVectors

TOGETHER = 4  # queries of one scan: more of them make the kernel compute, not read
_ROUNDING = 2**-8  # relative, of a result in bf16 and of what led to it
_BLOCK = 16384  # rows at a time where the kernel is missing, or when many rows are scored closely


def exact_nearest(
    vectors: StoredVectors, queries: Tensor, k: int, *, first: int = 0, dead: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """For each query, scores and rows of the k nearest from row `first` on, in the order of `ranked`.

    Args:
        dead: rows that do not count.

    Shape:
        queries [Q, D] float32; returns Q pairs of [≤ k] float32 and [≤ k] int64
    """
    hidden = torch.zeros(0, dtype=torch.int64) if dead is None else dead[dead >= first] - first
    living = len(vectors) - first - len(hidden)
    found = []
    for some in queries.split(TOGETHER):
        for query, look in zip(some, _scan(vectors, some, first)):
            look[hidden] = -torch.inf
            found.append(_closely(vectors, query, look, min(k, living), living, first))
    return found


def ranked(vectors: StoredVectors, query: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Scores and rows of the k nearest among some rows: highest score first, of equal ones the first row first.

    Shape:
        query [D]; rows [n] int64, each once
    """
    rows = rows.sort().values
    scores = torch.cat([score_rows(vectors, query, part) for part in rows.split(_BLOCK)])  # [n]
    order = scores.sort(descending=True, stable=True).indices[:k]
    return scores[order], rows[order]


def score_rows(vectors: StoredVectors, query: Tensor, rows: Tensor) -> Tensor:
    """Similarities [n] of a query with some rows [n]; a row's does not depend on which others are asked for."""
    if vectors.bf16 is not None:
        stored = torch.from_numpy(vectors.bf16).view(torch.bfloat16)[rows].float()  # [n, D]
    else:
        stored = torch.from_numpy(vectors.rows(rows.numpy()))  # [n, D]
    return (stored * query).sum(dim=1)  # a matrix product would sum in an order that depends on n


def _closely(
    vectors: StoredVectors, query: Tensor, look: Tensor, k: int, living: int, first: int
) -> tuple[Tensor, Tensor]:
    """The k nearest by their real scores, `look` [N] being those of the scan."""
    best = look.topk(min(living, max(4 * k, 64)))  # [n]
    scores, rows = ranked(vectors, query, best.indices + first, k)
    if len(best.indices) == living:
        return scores, rows
    reached = float(scores[-1]) - _bound(vectors, query, max(map(abs, best.values[[0, -1]].tolist())))
    possible = (look >= reached).nonzero().squeeze(1)  # [m], `rows` among them
    return ranked(vectors, query, possible + first, k)


def _bound(vectors: StoredVectors, query: Tensor, largest: float) -> float:
    """How far the scan may be off a row's score where its result is at most this large."""
    longest = 1.01  # rows have length 1 up to bf16
    rounding = (query - query.to(torch.bfloat16).float()).norm()
    return float(longest * rounding + 1.01 * query.norm() * vectors.slack + _ROUNDING * largest + 1e-6)


def _scan(vectors: StoredVectors, queries: Tensor, first: int) -> Tensor:
    """Scores by codes, [q, N - first] float32."""
    codes = torch.from_numpy(vectors.codes)[first:]  # [N, D] int8
    scales = torch.from_numpy(vectors.scales).view(torch.bfloat16)[first:]  # [N]
    return _product(queries.to(torch.bfloat16), codes, scales).float()


def _product(queries: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """queries·codesᵀ·scales [q, N], by torch's kernel for weights of 8 bits where there is one."""
    kernel = getattr(torch, "_weight_int8pack_mm", None)
    if kernel is not None and codes.shape[1] % 32 == 0 and len(codes):
        return kernel(queries, codes, scales)
    found = torch.empty(len(queries), len(codes))
    for start in range(0, len(codes), _BLOCK):
        part = slice(start, start + _BLOCK)
        found[:, part] = queries.float() @ codes[part].float().T * scales[part].float()
    return found
