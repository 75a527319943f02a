"""Words of users in figures: any script, any length, no formulas, no warnings."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from hnclip.analysis.figures import drawable, words
from hnclip.analysis.figures.words import ELLIPSIS, MISSING, joined, look, right_to_left, width, wrap, wrapped


@pytest.mark.parametrize("text", ["Grün – Ελληνικά Кириллица كلب", "naïve $x_1$ {a} \\frac 100 %", ""])
def test_what_the_font_has_stays(text):
    assert drawable(text) == text


def test_what_no_font_has_is_visibly_missing(monkeypatch):
    monkeypatch.setattr(words, "FALLBACKS", ())
    assert drawable("a 犬 dog") == f"a {MISSING} dog"
    assert drawable("lone \ud800 surrogate") == f"lone {MISSING} surrogate"
    assert drawable("a\tb\nc\x00d") == "a b cd"  # spaces of all kinds, and a sign without a width
    assert drawable("\U000e0041x") == "x"  # a tag: no width either


def test_an_installed_font_helps_out(monkeypatch):
    letter = "\u1d81"  # in a font that comes with matplotlib, but not in its usual one
    monkeypatch.setattr(words, "FALLBACKS", ())
    assert drawable(letter) == MISSING
    monkeypatch.setattr(words, "FALLBACKS", ("No such family", "STIXGeneral"))
    assert drawable(letter) == letter
    assert look()["fontfamily"] == ["DejaVu Sans", "STIXGeneral"]  # matplotlib complains about unknown ones
    figure = Figure()
    figure.text(0, 0, drawable(letter), **look())
    figure.savefig(io.BytesIO())


def test_drawing_never_warns():
    figure = Figure()
    for text in ("犬が走る $\\frac", "\ud800", "🐶🐕‍🦺", "हिन्दी", "z\u0301\u0301"):
        figure.text(0, 0, drawable(text), **look())
    figure.savefig(io.BytesIO())


def test_width_is_that_of_the_letters():
    assert width("ii", 8) == pytest.approx(2 * width("i", 8))
    assert width("W", 16) == pytest.approx(2 * width("W", 8), rel=0.02)
    assert width("W", 8) > 2 * width("i", 8)
    assert width("a ", 8) > width("a", 8)
    assert width("", 8) == 0


def test_lines_hold_the_text_and_keep_to_their_room():
    text = "The quick brown fox jumps over the lazy dog, which is sleeping. " * 6
    lines = wrapped(text, 2.0, 8, 100).split("\n")
    assert " ".join(lines) == text.strip()
    assert max(width(line, 8) for line in lines) <= 2.0
    # None could have taken the next word as well.
    for line, following in pairwise(lines):
        assert 1.05 * width(f"{line} {following.split()[0]}", 8) > 2.0


def test_long_words_are_broken():
    lines = wrapped("ab " + "x" * 300, 1.0, 8, 100).split("\n")
    assert lines[0] == "ab"
    assert "".join(lines[1:]) == "x" * 300
    assert max(width(line, 8) for line in lines) <= 1.0
    assert wrapped("xyz", 0.001, 8, 9) == "x\ny\nz"  # one letter always fits


def test_east_asian_text_breaks_anywhere(monkeypatch):
    monkeypatch.setattr(words, "drawable", lambda text: text)  # whether or not a font is installed
    monkeypatch.setattr(words, "width", lambda text, size: 0.1 * len(text))
    assert wrapped("ab 犬犬犬犬犬犬", 0.55, 8, 9) == "ab 犬犬\n犬犬犬犬"
    assert wrapped("a bcd犬犬", 0.55, 8, 9) == "a bcd\n犬犬"  # not at the space


def test_too_many_lines_end_with_an_ellipsis():
    lines = wrapped("word " * 100, 1.0, 8, 3).split("\n")
    assert len(lines) == 3
    assert lines[-1].endswith("word" + ELLIPSIS)
    assert width(lines[-1], 8) <= 1.0
    assert wrapped("word " * 3, 10, 8, 1) == "word word word"
    # Far more than is looked at, also where it would shrink to nothing.
    assert wrapped(" " * 10_000_000 + "word", 1.0, 8, 3) == ELLIPSIS
    assert wrapped("word " * 2_000_000, 1.0, 8, 1).endswith(ELLIPSIS)


def test_highlights_follow_their_letters_over_lines():
    passage = (("A ", False), ("red", True), (", ", False), ("big  ", True), ("house", False), ("boat", True))
    flat = wrap(passage, 10, 8, 1)
    assert flat == [(("A ", False), ("red", True), (", ", False), ("big ", True), ("house", False), ("boat", True))]
    lines = wrap(passage, 0.7, 8, 9)
    assert [joined(line) for line in lines] == ["A red, big", "houseboat"]
    assert lines[1] == (("house", False), ("boat", True))
    assert lines[0][-1] == ("big", True)
    assert wrap((("all of this", True),), 0.3, 8, 1) == [(("all", True), (ELLIPSIS, False))]


@pytest.mark.parametrize("passage", [(), (("", True),), (("  \n ", False),)])
def test_nothing_has_no_lines(passage):
    assert wrap(passage, 1.0, 8, 3) == []


def test_direction_is_that_of_the_first_letter():
    assert right_to_left("12 כלב dog")
    assert right_to_left("كلب")
    assert not right_to_left("dog כלב")
    assert not right_to_left("12, 34")
