"""The paper's numbers as data: what the paper derives from them must follow from them again.

Averages and differences below are the paper's own printed ones. Where the paper contradicts itself, the contradiction
is named here, so that a slip in the data cannot hide as one.
"""

from __future__ import annotations

from collections import Counter

from hnclip.evaluation.published import PublishedResult, published, published_statistics

BENCHMARKS = ("DOCCI", "DCI", "Long-DCI", "Urban-1K")
DIRECTIONS = ("text_to_image", "image_to_text")
# Numbers per table.
NUMBERS = {"1": 120, "2": 144, "3a": 40, "3b": 48, "3c": 16, "A2": 48, "A4": 144}
NUMBERS |= {"A5": 160, "A6": 200, "A7": 50, "A8": 36, "A9": 160, "A10": 120, "A11": 120}


def values(result: PublishedResult) -> list[float]:
    return [value for direction in DIRECTIONS for value in result.recall[direction].values()]


def everything() -> list[PublishedResult]:
    return [result for benchmark in BENCHMARKS for result in published(benchmark)]


def test_every_number_of_every_table_is_there():
    counts: Counter[str] = Counter()
    for result in everything():
        counts[result.table] += len(values(result))
    assert counts == NUMBERS


def test_recalls_grow_with_k_and_are_counts_of_queries():
    """R@K is a whole number of queries out of the test split. Three printed numbers, some of them in several tables,
    are no such share of Long-DCI's 7,444."""
    impossible = set()
    for result in everything():
        queries = published_statistics(result.benchmark).test
        assert all(list(recall.values()) == sorted(recall.values()) for recall in result.recall.values())
        for direction in DIRECTIONS if not result.deviation else ():  # a mean of rounded numbers can be anything
            for k, value in result.recall[direction].items():
                nearest = 100 * round(value / 100 * queries) / queries
                if abs(nearest - value) > 0.0051:
                    impossible.add((result.benchmark, direction, k, value))
    assert impossible == {
        ("Long-DCI", "text_to_image", 10, 96.34),
        ("Long-DCI", "image_to_text", 5, 92.86),
        ("Long-DCI", "image_to_text", 1, 74.75),
    }
