"""Explanations in a terminal: heat maps and places by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hnclip.search.answer import Answer
from hnclip.search.explain import Explanation, Shares, WordMatch
from hnclip.search.find import Hit
from hnclip.search.index.reader import Item

ITEM = Item(7, "a.png", 0, "{}", (30, 30), ())
WHOLE = (0.0, 0.0, 1.0, 1.0)


def match(word: str, *patches: float) -> WordMatch:
    return WordMatch(word, 0, len(word), max(patches), patches)


def shown(*words: WordMatch, side: int, box: Shares = WHOLE) -> list[str]:
    """The lines of one explanation."""
    explanation = Explanation(ITEM, "text", words, side, side, box)
    hits, places = (Hit(ITEM, 0.5),), {7: "a.png"}
    answer = Answer(
        Path("a.hnc"), "exact", "text", "text", "images", 1, False, hits, (), (), (explanation,), places, {}, ()
    )
    return answer.to_text().split("\n\n")[-1].splitlines()


def test_a_heat_map_is_shaded_from_the_worst_patch_to_the_best() -> None:
    assert shown(match("red", 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.4, 0.2, 0.1), side=3) == [
        "Words that stand out in result 1:",
        "  red 0.50",
        "  ··░░▒▒",
        "  ▓▓████",
        "  ▓▓░░··",
        "  centre",
    ]


def test_a_large_grid_shows_the_best_patch_of_each_cell() -> None:
    patches = [0.0] * 32**2
    patches[5 * 32 + 30] = 1.0  # in the second row of cells, the last column
    lines = shown(match("red", *patches), side=32)
    assert lines[2:10] == ["  " + "·" * 16, "  " + "·" * 14 + "██", *["  " + "·" * 16] * 6]
    assert lines[10] == "  top right"


def test_equal_patches_have_one_shade() -> None:
    assert shown(match("red", *[0.25] * 4), side=2)[2:4] == ["  ····"] * 2


@pytest.mark.parametrize(
    ("patch", "box", "place"),
    [
        *((number, WHOLE, place) for number, place in enumerate(("top left", "top", "top right", "left", "centre"))),
        *((number, WHOLE, place) for number, place in enumerate(("right", "bottom left", "bottom", "bottom right"), 5)),
        (0, (0.5, 0.0, 1.0, 1.0), "top"),  # the crop begins in the middle of the picture
        (8, (0.0, 0.0, 0.3, 0.3), "top left"),
    ],
)
def test_places_are_those_of_the_whole_picture(patch: int, box: Shares, place: str) -> None:
    assert shown(match("red", *(float(number == patch) for number in range(9))), side=3, box=box)[-1].strip() == place


def test_words_that_stand_out_come_first_and_each_once() -> None:
    words = [
        match("flat", 0.9, 0.9, 0.9, 0.9),
        match("Sharp", 0.0, 0.5, 0.0, 0.0),
        match("the", 0.0, 0.9, 0.0, 0.0),
        match("less", 0.1, 0.4, 0.1, 0.1),
        match("sharp", 0.2, 0.3, 0.2, 0.2),
    ]
    assert shown(*words, side=2)[1].split() == ["Sharp", "0.50", "less", "0.40", "flat", "0.90"]


def test_what_has_no_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    words = [match(f"word{number}", 0.0, 1 - number / 20, 0.0, 0.0) for number in range(12)]
    lines = shown(*words, side=2)
    assert lines[1].split() == ["word0", "1.00", "word1", "0.95", "word2", "0.90"]
    assert all(len(line) <= 40 for line in lines)
    also = " ".join(" ".join(lines[5:]).split())
    assert also == "also " + ", ".join(f"word{number} {1 - number / 20:.2f} top right" for number in range(3, 10))


def test_a_crop_is_said() -> None:
    assert "(the model sees 25% of it, the middle)" in shown(match("a1", 0.5), side=1, box=(0.25, 0.25, 0.75, 0.75))[0]
