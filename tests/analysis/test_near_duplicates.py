"""Which captions are shown beside each other, and which of their words are highlighted."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from hnclip.analysis.false_negatives import Suspect
from hnclip.analysis.geometry import CaptionGeometry, caption_geometry
from hnclip.analysis.near_duplicates import highlight_shared, near_duplicate_rows, pair_rows, shorten
from hnclip.analysis.shown import CompanionRow, Passage

PICTURES = [Image.new("RGB", (2, 2), (number, 0, 0)) for number in range(64)]
NAMES = [f"record-{number}" for number in range(64)]


class OnlyItsStart(str):
    """A text of which nobody may look at more than slices."""

    def _whole(self, *_: object) -> None:
        raise AssertionError("the whole text was looked at")

    __iter__ = split = casefold = lower = strip = encode = translate = _whole  # type: ignore[assignment]


def joined(passage: Passage) -> str:
    return "".join(piece for piece, _ in passage)


def marked(passage: Passage) -> list[str]:
    return [piece for piece, highlighted in passage if highlighted]


def shared(query: str, other: str) -> tuple[list[str], list[str]]:
    first, second = highlight_shared(query, other)
    return marked(first), marked(second)


def on_a_circle(degrees: list[float]) -> Tensor:
    """Unit vectors whose cosines are those of the angles between them."""
    angles = torch.tensor([math.radians(angle) for angle in degrees])
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def rows_of(
    text: Tensor, owner: Tensor, geometry: CaptionGeometry | None = None, **options: float
) -> tuple[list[int], list[CompanionRow]]:
    """The rows shown, and the number of each query: captions are called by their numbers."""
    captions = [f"caption{row}" for row in range(len(text))]
    found = near_duplicate_rows(
        text,
        owner,
        captions,
        geometry or caption_geometry(text, owner),
        names=NAMES,
        picture=PICTURES.__getitem__,
        **options,  # type: ignore[arg-type]
    )
    return [int(joined(row.query.text).removeprefix("caption")) for row in found], found


# Neighbours 1, 2, 3, … degrees apart: every caption's nearest is the one before it, but for the first.
STAIRS = on_a_circle([0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55])


def test_queries_are_near_the_quantile_and_companions_nearest_first() -> None:
    owner = torch.arange(11)
    queries, rows = rows_of(STAIRS, owner, quantile=0.5, rows=3)
    # Hardest companions are 1, 1, 2, 3, … 10 degrees away; half of them at most 5, and 5 is the median.
    assert queries[0] == 5
    assert set(queries) == {4, 5, 6}
    assert [joined(shown.text) for shown in rows[0].companions] == ["caption4", "caption6", "caption3"]
    labels = [f"cosine {math.cos(math.radians(angle)):.3f}" for angle in (5, 6, 9)]
    assert [shown.label.partition(":")[0] for shown in rows[0].companions] == labels
    assert rows[0].query.picture is PICTURES[5]
    assert [shown.picture for shown in rows[0].companions] == [PICTURES[4], PICTURES[6], PICTURES[3]]


def test_the_last_quantile_is_the_most_similar_first_and_no_pair_comes_twice() -> None:
    queries, rows = rows_of(STAIRS, torch.arange(11), quantile=1.0, rows=4)
    assert queries == [0, 2, 3, 4]  # 1 and 0 are each other's nearest
    assert [joined(row.companions[0].text) for row in rows] == ["caption1", "caption1", "caption2", "caption3"]
    assert rows_of(STAIRS, torch.arange(11), quantile=0.0, rows=1)[0] == [10]


def test_no_picture_is_a_query_twice_nor_a_companion_twice_in_a_row() -> None:
    text = on_a_circle([0, 0.1, 5, 5.1, 20, 20.2, 40, 60])
    owner = torch.tensor([7, 7, 3, 3, 9, 9, 1, 2])
    queries, rows = rows_of(text, owner, quantile=1.0, rows=20, companions=20)
    pictures = [row.query.picture for row in rows]
    assert len(set(map(id, pictures))) == len(pictures)
    for row in rows:
        shown = [row.query.picture, *(companion.picture for companion in row.companions)]
        assert len(set(map(id, shown))) == len(shown) == 5  # all five pictures, each once
    assert queries[0] == 1
    assert [joined(shown.text) for shown in rows[0].companions[:2]] == ["caption2", "caption4"]


def test_as_many_as_there_are() -> None:
    text = on_a_circle([0, 1, 5])
    queries, rows = rows_of(text, torch.arange(3), rows=9, companions=9)
    assert sorted(queries) in ([0, 2], [1, 2])
    assert [len(row.companions) for row in rows] == [2, 2]
    assert rows_of(text, torch.arange(3), rows=0)[0] == []


def test_of_a_sample_only_its_captions_are_queries() -> None:
    text = F.normalize(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    owner = torch.arange(60)
    geometry = caption_geometry(text, owner, exact_up_to=0, samples=5, search_up_to=5 * 60)
    queries, rows = rows_of(text, owner, geometry, rows=50)
    assert queries
    assert set(queries) <= set(geometry.rows.tolist())
    nearest = dict(zip(geometry.rows.tolist(), geometry.nearest.tolist()))
    for query, row in zip(queries, rows):
        assert joined(row.companions[0].text) == f"caption{nearest[query]}"


def test_the_query_shows_words_that_any_companion_shares() -> None:
    text, owner = on_a_circle([0, 1, 2.5]), torch.arange(3)
    captions = ["A red car by a tree", "The red bike", "the tall tree, a bike"]
    geometry = caption_geometry(text, owner)
    row = near_duplicate_rows(
        text, owner, captions, geometry, quantile=1, rows=1, names=NAMES, picture=lambda record: None
    )[0]
    assert joined(row.query.text) == captions[0]
    assert marked(row.query.text) == ["red", "tree"]
    assert [marked(shown.text) for shown in row.companions] == [["red"], ["tree"]]
    assert row.query.picture is None
    assert row.query.label == "record-0"


def test_suspects_are_shown_as_pairs() -> None:
    captions = ["a dog", "a cat", "one dog"]
    owner = torch.tensor([0, 3, 5])
    (row,) = pair_rows([Suspect(0, 2, 0.98765)], owner, captions, names=NAMES, picture=PICTURES.__getitem__)
    assert (joined(row.query.text), row.query.picture) == ("a dog", PICTURES[0])
    (other,) = row.companions
    assert (other.label, other.picture, marked(other.text)) == ("cosine 0.988: record-5", PICTURES[5], ["dog"])


def test_counts_that_do_not_agree_are_named() -> None:
    geometry = caption_geometry(STAIRS, torch.arange(11))
    with pytest.raises(ValueError, match=r"captions \(3\)"):
        near_duplicate_rows(
            STAIRS, torch.arange(11), ["a", "b", "c"], geometry, names=NAMES, picture=lambda record: None
        )
    with pytest.raises(ValueError, match=r"text \(5\).*geometry \(11\)"):
        near_duplicate_rows(STAIRS[:5], torch.arange(5), ["a"] * 5, geometry, names=NAMES, picture=lambda record: None)


def test_content_words_are_shared_whatever_their_case() -> None:
    assert shared("The Red car, and the dog's RED tail.", "A dog with red ears on the car") == (
        ["Red", "car", "dog's", "RED"],
        ["dog", "red", "car"],
    )
    first, _ = highlight_shared("a red car", "Red!")
    assert first == (("a ", False), ("red", True), (" car", False))


def test_part_of_a_word_is_no_word() -> None:
    assert shared("a carpet, scar", "the car") == ([], [])
    assert shared("don’t walk", "don't run") == (["don’t"], ["don't"])


@pytest.mark.parametrize(
    ("query", "other", "expected"),
    [
        ("Красная машина у дома", "КРАСНАЯ лодка", (["Красная"], ["КРАСНАЯ"])),
        ("Die STRASSE", "eine Straße", (["STRASSE"], ["Straße"])),
        ("caf\u00e9 bleu", "le cafe\u0301", (["caf\u00e9"], ["cafe\u0301"])),
        ("हिन्दी किताब", "नई किताब", (["किताब"], ["किताब"])),  # with vowel signs
        ("سيارة حمراء", "قارب حمراء", (["حمراء"], ["حمراء"])),
        ("一辆红色汽车停在路边", "红色汽车和房子", (["红色汽车"], ["红色汽车"])),
        ("红", "红", (["红"], ["红"])),
        ("红车", "车红", ([], [])),  # a character alone says little
        ("赤いAI車", "青いai車", (["AI車"], ["ai車"])),  # a run of one is compared as it is
        ("รถยนต์สีแดง", "รถยนต์เก่า", (["รถยนต์"], ["รถยนต์"])),
        ("빨간 자동차", "파란 자동차", (["자동차"], ["자동차"])),
    ],
)
def test_words_of_any_script(query: str, other: str, expected: tuple[list[str], list[str]]) -> None:
    assert shared(query, other) == expected


texts = st.text(st.characters(), max_size=80) | st.text("ab a'’s\n車红한 ก\u0301", max_size=40)


@given(texts, texts, st.integers(1, 60))
def test_pieces_joined_are_the_text(query: str, other: str, limit: int) -> None:
    for passage, text in zip(highlight_shared(query, other, limit=limit), (query, other)):
        assert joined(passage) == shorten(text, limit)
        assert all(piece for piece, _ in passage)
        flags = [flag for _, flag in passage]
        assert all(before != after for before, after in zip(flags, flags[1:]))  # noqa: RUF007
        joined(passage).encode()


@given(texts)
def test_a_text_shares_all_its_content_with_itself(text: str) -> None:
    first, second = highlight_shared(text, text)
    assert first == second
    assert shared(text, "") == ([], [])


def test_what_cannot_be_printed_is_a_space() -> None:
    assert shorten("a\nb\tc\x00d\u2028e\ud800f\u202eg\x85") == "a b c d e f g "
    assert shorten("नमस्\u200dते 👩\u200d🚒") == "नमस्\u200dते 👩\u200d🚒"  # joiners are part of what is written


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("exactly ten", 11, "exactly ten"),
        ("exactly eleven", 11, "exactly el…"),  # the last space is too far back
        ("x" * 95 + " and more words", 100, "x" * 95 + "…"),
        ("x" * 96 + "\nand more words", 100, "x" * 96 + " an…"),
        ("红" * 30, 10, "红" * 9 + "…"),
        ("ab", 1, "…"),
    ],
)
def test_long_texts_are_cut_between_words(text: str, limit: int, expected: str) -> None:
    assert shorten(text, limit) == expected
    assert len(expected) <= limit


def test_a_limit_is_at_least_a_character() -> None:
    with pytest.raises(ValueError, match="limit"):
        shorten("abc", 0)


def test_ten_megabytes_cost_nothing() -> None:
    long = "word " * 2_000_000
    first, second = highlight_shared(OnlyItsStart(long), OnlyItsStart("x" * 10_000_000))
    assert len(joined(first)) <= 700
    assert len(joined(second)) == 700
