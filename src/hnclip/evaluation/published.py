"""The paper's own retrieval numbers, shown next to measured ones and never compared with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from hnclip.util.tables import MISSING


@dataclass(frozen=True)
class PublishedResult:
    """One row of a table of the paper on one benchmark.

    Attributes:
        table: its printed number, "1" to "A11"; a part of table 3 is "3a", "3b" or "3c".
        benchmark: DOCCI, DCI, Long-DCI or Urban-1K.
        method: the row, for example "HN-CLIP" or "GOAL".
        setting: what else the row says, for example "γ = 0.25"; often empty.
        trained_on: the training data; None where the released checkpoint was evaluated as it is.
        epoch: the selected epoch, in the one table that prints it.
        recall: percent by direction and K: `recall["text_to_image"][1]`.
        deviation: standard deviation over seeds in the same form; empty where the paper has none.
        name: of a table's row, "paper, Table 1: HN-CLIP".
    """

    table: str
    benchmark: str
    method: str
    setting: str
    trained_on: str | None
    epoch: int | None
    recall: Mapping[str, Mapping[int, float]]
    deviation: Mapping[str, Mapping[int, float]]
    name: str

    def cell(self, direction: str, k: int) -> str:
        """88.25, with the deviation over seeds 88.36 ± 0.14."""
        value, deviation = self.recall[direction].get(k), self.deviation.get(direction, {}).get(k)
        if value is None:
            return MISSING
        return f"{value:.2f}" if deviation is None else f"{value:.2f} ± {deviation:.2f}"


class Statistics(NamedTuple):
    """A benchmark in the paper's table A1: pairs, words per caption, and the mean cosine of all pairs of captions and
    of hardest negatives."""

    train: int
    test: int
    words: int
    pairwise: float
    hardest: float


def published(benchmark: str, *, table: str | None = None) -> list[PublishedResult]:
    """The paper's results on a benchmark, in the paper's order; none for data that the paper does not have.

    Args:
        benchmark: its name in any spelling: "urban1k" is Urban-1K.
        table: only this table, by its printed number.
    """
    if table is not None and table not in _document()["tables"]:
        raise ValueError(f"the paper has no table {table!r} of retrieval results; {', '.join(_document()['tables'])}")
    return [
        result for result in _results() if same_benchmark(result.benchmark, benchmark) and table in (None, result.table)
    ]


def published_statistics(benchmark: str) -> Statistics | None:
    """Table A1 for a benchmark; None for data that the paper does not have."""
    for name, found in _document()["benchmarks"].items():
        if same_benchmark(name, benchmark):
            return Statistics(**found)
    return None


def paper_title() -> str:
    return _document()["paper"]


def same_benchmark(one: str, other: str) -> bool:
    """Whether two spellings name the same benchmark."""
    first, second = (re.sub("[^a-z0-9]", "", name.lower()) for name in (one, other))
    return first == second


@cache
def _document() -> dict[str, Any]:
    return json.loads((files("hnclip.evaluation") / "published.json").read_text(encoding="utf-8"))


@cache
def _results() -> tuple[PublishedResult, ...]:
    return tuple(_result(row) for row in _document()["results"])


def _result(row: dict[str, Any]) -> PublishedResult:
    table = _document()["tables"][row["table"]]
    source = f"trained on {row['trained_on']}" if table["transfer"] and row["trained_on"] else ""
    return PublishedResult(
        table=row["table"],
        benchmark=row["benchmark"],
        method=row["method"],
        setting=row["setting"],
        trained_on=row["trained_on"],
        epoch=row.get("epoch"),
        recall=_by_k(row["recall"]),
        deviation=_by_k(row.get("deviation", {})),
        name=f"paper, Table {row['table']}: {', '.join(filter(None, [row['method'], source, row['setting']]))}",
    )


def _by_k(directions: dict[str, dict[str, float]]) -> dict[str, dict[int, float]]:
    return {name: {int(k): value for k, value in values.items()} for name, values in directions.items()}
