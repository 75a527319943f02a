"""Ranks, recalls, their intervals and differences, every query for itself, and tables of all that."""

from __future__ import annotations

from .bootstrap import Interval, PairedDifference, bootstrap_interval, bootstrap_intervals, paired_bootstrap
from .compare import Comparison, compare_queries, compare_ranks
from .metrics import DirectionMetrics, RetrievalMetrics, recall_at, summarize
from .published import PublishedResult, published, published_statistics
from .queries import Candidate, Query, query_results, read_queries, write_queries
from .ranks import TIE_TOLERANCE, Ranks, retrieval_ranks
from .table import format_results, result_rows

__all__ = [
    "TIE_TOLERANCE",
    "Candidate",
    "Comparison",
    "DirectionMetrics",
    "Interval",
    "PairedDifference",
    "PublishedResult",
    "Query",
    "Ranks",
    "RetrievalMetrics",
    "bootstrap_interval",
    "bootstrap_intervals",
    "compare_queries",
    "compare_ranks",
    "format_results",
    "paired_bootstrap",
    "published",
    "published_statistics",
    "query_results",
    "read_queries",
    "recall_at",
    "result_rows",
    "retrieval_ranks",
    "summarize",
    "write_queries",
]
