"""Exact search through codes of 8 bits: every row is looked at, few are looked at closely, none is missed.

A scan of the codes gives each row's score to within a bound, `_off` and the rounding of its result. Some rows that look
best are scored closely; the k-th best of these is a score that k rows reach for certain. Whatever could reach it too
within the bound is scored closely as well. The codes are half of the bf16 vectors' bytes, and reading them is what a
query takes its time for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hnclip.search.index.vectors import LONGEST, StoredVectors

TOGETHER = 4  # queries of one scan: more of them make the kernel compute, not read
_ROUNDING = 2**-8  # of a result in bf16, relative to it: the kernel may cut instead of rounding
_BLOCK = 16384  # rows at a time where the kernel is missing, or when many rows are scored closely


def exact_nearest(
    vectors: StoredVectors, queries: Tensor, k: int, *, first: int = 0, dead: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """For each query, scores and rows of the k nearest from row `first` on, in the order of `ranked`.

    Args:
        k: at least 1.
        dead: rows that do not count, each once.

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
    needed = float(scores[-1]) - _off(vectors, query)  # of codes and query alone, before the result is rounded
    look_at = needed - _ROUNDING * abs(needed)  # x - r·|x| grows with x, so no row that reaches it lies below
    possible = (look >= look_at).nonzero().squeeze(1)  # [m], `rows` among them
    return ranked(vectors, query, possible + first, k)


def _off(vectors: StoredVectors, query: Tensor) -> float:
    """How far a row's score may be from query·code·scale as the scan sums it up, before it rounds the result.

    With q' the query in bf16, x the row and x' its code times its scale, both sums being of D products in float32:
    |q·x − q'·x'| ≤ |q·(x − x')| + |(q − q')·x'| ≤ ‖q‖·slack + ‖q − q'‖·‖x'‖, and each sum is off by at most
    (D + few)·2⁻²⁴·‖q‖·‖x‖. Codes and q' are numbers of bf16, so a product that takes float32 for bf16 loses nothing.
    """
    length = float(query.norm())
    rounded = float((query - query.to(torch.bfloat16).float()).norm())
    longest = LONGEST + vectors.slack  # of x'
    summing = 2 * (vectors.shape[1] + 8) * 2**-24 * LONGEST * longest * length
    return longest * rounded + LONGEST * length * vectors.slack + summing + 1e-12


def _scan(vectors: StoredVectors, queries: Tensor, first: int) -> Tensor:
    """Scores by codes, [q, N - first] float32."""
    codes = torch.from_numpy(vectors.codes)[first:]  # [N, D] int8
    scales = torch.from_numpy(vectors.scales).view(torch.bfloat16)[first:]  # [N]
    return _product(queries.to(torch.bfloat16), codes, scales).float()


def _product(queries: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """queries·codesᵀ·scales [q, N], by torch's kernel for weights of 8 bits where there is one.

    The kernel is private: it may be missing, or not be made for this processor. Widths that are no multiple of 32 must
    not be given to it, some end the process.
    """
    kernel = getattr(torch, "_weight_int8pack_mm", None)
    if kernel is not None and codes.shape[1] % 32 == 0 and len(codes):
        try:
            return kernel(queries, codes, scales)
        except (NotImplementedError, RuntimeError):
            pass
    found = torch.empty(len(queries), len(codes))
    for start in range(0, len(codes), _BLOCK):
        part = slice(start, start + _BLOCK)
        found[:, part] = queries.float() @ codes[part].float().T * scales[part].float()
    return found
