"""What a report says, checked against the numbers it speaks of."""

from __future__ import annotations

import math

import pytest

from hnclip.diagnose import advice


def test_near_duplicates_are_called_so_from_the_papers_numbers_on() -> None:
    assert advice.likeness(0.84, 0.92).title == "Captions are nearly alike"
    other = advice.likeness(0.46, 0.91)
    assert other.title == "Captions are not nearly alike"
    assert "0.46" in other.number
    assert "0.91" in other.number


def test_equal_margins_are_called_a_fixed_margin_and_its_size_named() -> None:
    found = advice.margins(0.84, 0.01, scale=100.0, gamma=0.5)  # 0.5 nats
    assert found.level == "note"
    assert "fixed margin" in found.meaning
    assert "fixed_margin --objective.parameters margin 0.42" in found.advice
    assert f"{math.exp(0.5):.1f}×" in found.meaning


def test_margins_that_differ_are_told_by_their_factor() -> None:
    # The paper: s = 100, γ = 0.5, a gap of 0.1 multiplies the ratio of gradients by e⁵ ≈ 148.
    found = advice.margins(0.84, 0.1, scale=100.0, gamma=0.5)
    assert found.level == "good"
    assert "148.4×" in found.meaning
    assert "more than 1,000×" in advice.margins(0.5, 0.5, scale=100.0, gamma=0.5).meaning


@pytest.mark.parametrize(("in_batch", "level"), [(0.79, "act"), (0.81, "good")])
def test_meetings_are_judged_by_the_deviation_in_a_batch(in_batch: float, level: str) -> None:
    found = advice.meetings(in_batch, 0.9, 0.1, source="micro")
    assert found.level == level
    assert ("--cluster 4" in found.advice) == (level == "act")
    assert "--optim.negatives" not in advice.meetings(in_batch, 0.9, 0.1, source="batch").advice


def test_more_negatives_come_before_a_margin() -> None:
    def found(micro: float, whole: float, source: str = "micro") -> str:
        return advice.start(micro, whole, 0.1, negatives=15, all_negatives=127, source=source).advice

    assert "not there yet" in found(0.2, 0.1)
    assert "--optim.negatives batch" in found(0.8, 0.2)
    assert "no margin" in found(0.8, 0.2)
    assert "--objective.global-loss hn" in found(0.9, 0.8)
    # A run that has all negatives already is not told to take them.
    assert "not there yet" in found(0.8, 0.2, "batch")
    assert "--optim.negatives" not in found(0.9, 0.8, "batch")


@pytest.mark.parametrize(
    ("verdict", "level", "word"),
    [("raises", "act", "--objective.global-loss hn"), ("lowers", "act", "infonce"), ("undecided", "note", "Either")],
)
def test_predictions_end_in_advice(verdict: str, level: str, word: str) -> None:
    found = advice.prediction(verdict, -1.25, -3.0, 0.5, gamma=0.25, pairs=4301, held_out=1000)
    assert found.level == level
    assert word in found.advice
    assert found.number == "-1.2 R@1 [-3.0, +0.5]"
    assert "4,301" in found.meaning
    assert "1,000" in found.meaning


def test_repeats_name_what_was_found_and_looked_for() -> None:
    exact, suspected = advice.repeats(3, 2, 40, 0.98)
    assert exact.number == "3 groups of equal captions, 2 groups of equal pictures"
    assert suspected.number == "40 pairs from 0.98 on"
    (without_pictures,) = advice.repeats(1, None, 0, 0.98)
    assert without_pictures.number == "1 group of equal captions"
    (none,) = advice.repeats(0, None, 0, 0.95)
    assert none.level == "good"
    assert none.meaning.startswith("No equal captions,")
    assert "pictures" in next(advice.repeats(0, 0, 0, 0.95)).meaning
    assert list(advice.repeats(0, 0, None, 0.98)) == []  # not searched is no good news


def test_a_few_cut_captions_are_a_note() -> None:
    assert advice.cut(0, 100, 77, 0) is None
    few, many = advice.cut(1, 100, 77, 0), advice.cut(2, 100, 77, 1)
    assert few is not None
    assert few.level == "note"
    assert many is not None
    assert many.level == "act"
    assert "2 of 100" in many.meaning
    assert "differ only there: 1." in many.meaning
    assert "differ only there" not in few.meaning
    assert many.number == "2.0% of captions"
