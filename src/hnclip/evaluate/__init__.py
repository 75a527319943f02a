"""Ranks, recalls, their intervals, and tables of them."""

from __future__ import annotations

from .bootstrap import Interval, PairedDifference, bootstrap_interval, paired_bootstrap
from .metrics import DirectionMetrics, RetrievalMetrics, recall_at, summarize
from .ranks import TIE_TOLERANCE, Ranks, retrieval_ranks
from .table import format_results, markdown_table, result_rows, text_table

__all__ = [
    "TIE_TOLERANCE",
    "DirectionMetrics",
    "Interval",
    "PairedDifference",
    "Ranks",
    "RetrievalMetrics",
    "bootstrap_interval",
    "format_results",
    "markdown_table",
    "paired_bootstrap",
    "recall_at",
    "result_rows",
    "retrieval_ranks",
    "summarize",
    "text_table",
]
