"""Explanations in a terminal: heat maps and places by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hnclip.search.answer import Answer, Separated
from hnclip.search.explain import Explanation, Shares, WordMatch
from hnclip.search.find import CaptionHit, Hit
from hnclip.search.index.reader import Caption, Item
from hnclip.search.twins import TwinCaption, TwinGroup

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


@pytest.mark.parametrize(
    ("box", "much"),
    [((0.25, 0.25, 0.75, 0.75), "25%"), ((0.499, 0.0, 0.501, 1.0), "less than 1%"), ((0.45, 0.4, 0.55, 0.5), "1%")],
)
def test_a_crop_is_said(box: Shares, much: str) -> None:
    text = " ".join(" ".join(shown(match("a1", 0.5), side=1, box=box)).split())
    assert f"(the model sees {much} of it, the middle)" in text


def answer_of(hits: Sequence[Hit], twins: Sequence[Separated] = (), captions: Sequence[CaptionHit] = ()) -> Answer:
    items = [*(hit.item for hit in hits), *(item for hit in captions for item in hit.caption.items)]
    return Answer(
        index=Path("a.hnc"),
        engine="exact",
        query="text",
        asked="text",
        find="captions" if captions else "images",
        total=len(hits) + len(captions),
        cut=False,
        hits=tuple(hits),
        captions=tuple(captions),
        twins=tuple(twins),
        explanations=(),
        places={item.id: item.name for item in items},
        files={},
        notes=(),
    )


def test_groups_beyond_z_have_letters_of_their_own() -> None:
    items = [replace(ITEM, id=number, row=number, name=f"{number}.png") for number in range(2 * 54 + 1)]
    groups = [Separated(TwinGroup((items[n], items[n + 1]), 0.95, (), (n, n + 1))) for n in range(0, 2 * 54, 2)]
    blocks = answer_of([Hit(item, 0.5) for item in items], groups).to_text().split("\n\n")
    lines = blocks[1].splitlines()
    assert lines[0] == "   #     score  picture"
    assert lines[1] == "   1A    0.500  0.png"
    assert lines[52] == "  52Z    0.500  51.png"
    assert lines[53] == "  53AA   0.500  52.png"
    assert lines[108] == " 108BB   0.500  107.png"
    assert lines[109] == " 109     0.500  108.png"
    assert blocks[2] == "Near-twins A: results 1 and 2; cosine with the first 0.9500 or more"
    assert blocks[28] == "Near-twins AA: results 53 and 54; cosine with the first 0.9500 or more"


def test_results_that_were_not_re_ranked_stay_in_their_columns() -> None:
    hits = [Hit(ITEM, 0.5, 0.25), Hit(replace(ITEM, id=8, name="b.png"), 0.75)]
    assert answer_of(hits).to_text().splitlines()[2:] == [
        "   #   score  tokens  picture",
        "   1   0.500   0.250  a.png",
        "   2   0.750          b.png",
    ]


def test_captions_of_twins_have_their_own_ranks() -> None:
    """Pictures without captions lie between, and a caption that was found may be no longer its picture's."""
    said = replace(ITEM, captions=("something else",))
    captions = [CaptionHit(Caption(row, f"caption {row}", (ITEM if row else said,)), 0.5) for row in range(4)]
    passages = [TwinCaption(place, ITEM, (("caption ", False), (f"{place}", True))) for place in (1, 3)]
    group = TwinGroup((said, ITEM, ITEM), 0.95, tuple(passages), (0, 1, 3))
    assert answer_of([], [Separated(group)], captions).to_text().splitlines()[-2:] == [
        "     2  caption [1]",
        "     4  caption [3]",
    ]
