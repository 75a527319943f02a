"""Results of several models as one table, for a terminal or for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_DIRECTIONS = {"text_to_image": "T→I", "image_to_text": "I→T"}


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned plain text: first column to the left, the others to the right.

    >>> print(text_table(["model", "R@1"], [["a", "9.5"], ["longer", "10.0"]]))
    model    R@1
    ------  ----
    a        9.5
    longer  10.0
    """
    _check_rows(headers, rows)
    widths = [max(map(len, column)) for column in zip(headers, *rows)]

    def line(cells: Sequence[str]) -> str:
        others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:])]
        return "  ".join([cells[0].ljust(widths[0]), *others]).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, rows)])


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with the same alignment; a bar inside a cell is escaped.

    >>> print(markdown_table(["model", "R@1"], [["a", "9.5"]]))
    | model | R@1 |
    | :--- | ---: |
    | a | 9.5 |
    """
    _check_rows(headers, rows)

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

    return "\n".join([line(headers), line([":---", *["---:"] * (len(headers) - 1)]), *map(line, rows)])


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
    headers = ["model", *(f"{arrow} R@{k}" for arrow in _DIRECTIONS.values() for k in ks)]
    rows = [
        [name, *(_cell(name, metrics, direction, k, k == ks[0]) for direction in _DIRECTIONS for k in ks)]
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


def _check_rows(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not headers:
        raise ValueError("headers must name at least one column")
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"rows must have {len(headers)} cells like headers, got {list(row)}")
