"""Ranks, recalls, intervals and paired comparisons of vectors that are there; `retrieval` evaluates models on data."""

from hnclip.evaluation.compare import compare_queries, compare_ranks, read_queries
from hnclip.evaluation.metrics import recall_at, summarize
from hnclip.evaluation.published import published
from hnclip.evaluation.ranks import Ranks, retrieval_ranks

__all__ = [
    "Ranks",
    "compare_queries",
    "compare_ranks",
    "published",
    "read_queries",
    "recall_at",
    "retrieval_ranks",
    "summarize",
]
