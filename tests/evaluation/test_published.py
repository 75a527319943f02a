"""The paper's numbers as data: what the paper derives from them must follow from them again.

Averages and differences below are the paper's own printed ones. Where the paper contradicts itself, the contradiction
is named here, so that a slip in the data cannot hide as one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from hnclip.evaluation.published import PublishedResult, paper_title, published, published_statistics, same_benchmark

BENCHMARKS = ("DOCCI", "DCI", "Long-DCI", "Urban-1K")
DIRECTIONS = ("text_to_image", "image_to_text")
# Numbers per table.
NUMBERS = {"1": 120, "2": 144, "3a": 40, "3b": 48, "3c": 16, "A2": 48, "A4": 144}
NUMBERS |= {"A5": 160, "A6": 200, "A7": 50, "A8": 36, "A9": 160, "A10": 120, "A11": 120}

# Text to image, then image to text, each at R@1, 5, 10 (R@1 alone in table 3c).
OVER_BEST_OTHER = {
    ("1", "DOCCI"): [3.52, 0.76, 0.43, 3.63, 1.04, 0.51],
    ("1", "DCI"): [3.40, 2.15, 1.45, 4.00, 1.85, 1.25],
    ("1", "Long-DCI"): [3.59, 0.70, 0.42, 2.95, 0.21, 0.12],
    ("1", "Urban-1K"): [3.40, 0.60, 0.30, 2.50, 1.20, 0.70],
    ("A11", "DOCCI"): [3.62, 0.86, 0.44, 3.89, 1.12, 0.46],
    ("A11", "DCI"): [3.83, 2.17, 1.28, 4.08, 1.57, 0.87],
    ("A11", "Long-DCI"): [3.33, 0.35, 0.17, 2.74, 0.05, 0.12],
    ("A11", "Urban-1K"): [3.77, 1.37, 0.50, 3.27, 1.47, 0.53],
}
AVERAGES = {  # of R@1 over all benchmarks of the table and both directions
    "3a": {"γ = 0": 81.43, "γ = 0.25": 83.77, "γ = 0.5": 83.76, "γ = 0.75": 83.48, "γ = 1.0": 83.05},
    "3b": {"InfoNCE alone": 74.10, "InfoNCE and L_tok": 73.95, "L_HN alone": 78.51, "L_HN and L_tok": 78.67},
    "3c": {"Ḡ recomputed": 83.76, "Ḡ frozen at the start": 80.68},
}
LARGEST_SEED_DIFFERENCE = {"HN-CLIP": 1.53, "GOAL": 1.26, "StructXLIP": 0.38}


def rows(table: str, benchmark: str, method: str | None = None) -> list[PublishedResult]:
    return published(benchmark, table=table, method=method)


def values(result: PublishedResult) -> list[float]:
    return [value for direction in DIRECTIONS for value in result.recall[direction].values()]


def everything() -> list[PublishedResult]:
    return [result for benchmark in BENCHMARKS for result in published(benchmark)]


def rounded(value: float) -> object:
    """Equal to what is printed with two decimals, whichever way a 5 was rounded."""
    return pytest.approx(value, abs=0.0051)


def test_every_number_of_every_table_is_there():
    counts: Counter[str] = Counter()
    for result in everything():
        counts[result.table] += len(values(result))
    assert counts == NUMBERS


def test_margins_over_the_best_other_method():
    for (table, benchmark), printed in OVER_BEST_OTHER.items():
        found = rows(table, benchmark)
        (own,) = (values(result) for result in found if result.method == "HN-CLIP")
        best = [max(column) for column in zip(*(values(result) for result in found if result.method != "HN-CLIP"))]
        # Table A11 subtracts means before it rounds them: one more unit of the last digit.
        near = 0.0051 if table == "1" else 0.0151
        assert [a - b for a, b in zip(own, best)] == pytest.approx(printed, abs=near), (table, benchmark)


def test_averages_and_differences_between_seeds():
    for table, printed in AVERAGES.items():
        found: dict[str, list[float]] = defaultdict(list)
        for benchmark in BENCHMARKS:
            for result in rows(table, benchmark):
                found[result.setting] += [result.recall[direction][1] for direction in DIRECTIONS]
        assert {setting: sum(part) / len(part) for setting, part in found.items()} == rounded(printed)
    for method, largest in LARGEST_SEED_DIFFERENCE.items():
        first, second = rows("A8", "Long-DCI", method)
        assert max(abs(a - b) for a, b in zip(values(first), values(second))) == rounded(largest)


def configuration(result: PublishedResult) -> tuple[str, ...]:
    """What was evaluated, whichever way a table calls it."""
    method, setting = result.method, result.setting
    if setting.startswith("released checkpoint"):
        return ("released", result.benchmark)
    plain = ("γ = 0.5", "L_HN and L_tok", "Ḡ recomputed", "seed 42", "100 % of the training data")
    same = {**dict.fromkeys(plain, ""), "γ = 0": "InfoNCE and L_tok"}
    if method == "Long-CLIP":
        method, setting = "HN-CLIP", {"with L_HN": "L_HN alone", "fine-tuned with InfoNCE": "InfoNCE alone"}[setting]
    return (method, same.get(setting, setting), str(result.trained_on), result.benchmark)


def test_one_configuration_has_the_same_numbers_in_every_table():
    seen: dict[tuple[object, ...], float] = {}
    repeated = 0
    for result in everything():
        for direction in DIRECTIONS:
            for k, value in result.recall[direction].items():
                key = (*configuration(result), direction, k)
                repeated += key in seen
                assert seen.setdefault(key, value) == value, (key, result.table)
    assert repeated == 588


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


def test_rows_are_named_by_their_tables():
    names = [(result.name, result.benchmark) for result in everything()]
    assert len(names) == len(set(names))
    assert rows("1", "docci")[0].name == "paper, Table 1: Long-CLIP, released checkpoint"
    (transfer,) = (row for row in rows("A10", "DOCCI", "HN-CLIP") if row.trained_on == "DCI")
    assert transfer.name == "paper, Table A10: HN-CLIP, trained on DCI"
    (seeds,) = rows("A11", "Urban-1K", "HN-CLIP")
    assert seeds.deviation["image_to_text"] == {1: 0.83, 5: 0.35, 10: 0.06}
    assert f'"{paper_title()}"' in (Path(__file__).parents[2] / "CITATION.cff").read_text(encoding="utf-8")


def test_the_spelling_of_a_benchmark_does_not_matter():
    assert published("urban1k") == published("Urban-1K") != []
    assert not same_benchmark("dci", "Long-DCI")
    assert published("scenes/park") == published("docci/official") == []
    with pytest.raises(ValueError, match="A3"):
        published("DOCCI", table="A3")


def test_statistics():
    found = {name: published_statistics(name) for name in BENCHMARKS}
    assert found["Long-DCI"].test == found["DCI"].train + found["DCI"].test  # the gallery holds the training pairs
    assert all(0 < one.pairwise < one.hardest < 1 for one in found.values())
    assert published_statistics("scenes/park") is None
