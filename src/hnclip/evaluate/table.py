"""The results of several models as one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hnclip.tables import text_table

ARROWS = {"text_to_image": "T→I", "image_to_text": "I→T"}


def format_results(
    results: Mapping[str, Mapping[str, Any]],
    *,
    ks: Sequence[int] = (1, 5, 10),
    table: Callable[[Sequence[str], Sequence[Sequence[str]]], str] = text_table,
) -> str:
    """One line per model: `result_rows` as `text_table` or `markdown_table`."""
    headers, *rows = result_rows(results, ks=ks)
    return table(headers, rows)


def result_rows(results: Mapping[str, Mapping[str, Any]], *, ks: Sequence[int] = (1, 5, 10)) -> list[list[str]]:
    """A header, then one row per model: recall in percent, text to image then image to text.

    Args:
        results: `RetrievalMetrics.to_dict()` by the model's name, in the order of the rows.
        ks: the columns of each direction. Only the first shows its interval, where the results have one.
    """
    if not ks:
        raise ValueError("ks must name at least one K")
    headers = ["model", *(f"{arrow} R@{k}" for arrow in ARROWS.values() for k in ks)]
    rows = [
        [name, *(_cell(name, metrics, direction, k, k == ks[0]) for direction in ARROWS for k in ks)]
        for name, metrics in results.items()
    ]
    return [headers, *rows]


def _cell(name: str, metrics: Mapping[str, Any], direction: str, k: int, with_interval: bool) -> str:
    values = metrics.get(direction, {})
    if f"R@{k}" not in values:
        raise ValueError(f"results[{name!r}] has no R@{k} for {direction}")
    recall = f"{values[f'R@{k}']:.1f}"
    if with_interval and f"R@{k}_interval" in values:
        low, high = values[f"R@{k}_interval"]
        return f"{recall} [{low:.1f}, {high:.1f}]"
    return recall
