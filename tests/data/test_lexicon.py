"""Captions without words of appearance: whole words, readable where that is simple, never empty."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hnclip.data.lexicon import CATEGORIES, filter_caption, filter_version, load_filter, word_list

REPAIRED = {
    "An orange tree near a gold statue": "A tree near a statue",
    "a red apple and an ivory horse": "an apple and a horse",
    "a red hour hand, a red university, A RED UMBRELLA": "an hour hand, a university, An UMBRELLA",
    "a red-haired woman near a wood-burning stove": "a haired woman near a burning stove",
    "a black-and-white photo and a blue-green lake": "a photo and a lake",
    "red and blue balloons float": "balloons float",
    "a red, white and blue flag waves": "a flag waves",
    "a red, round ball and a red and tall box": "a round ball and a tall box",
    "Leather, wooden, and metal chairs stand around.": "chairs stand around.",
    "The car is red and parked, a gold/silver lamp (wooden) shines.": "The car is and parked, a lamp shines.",
    "The glass's edge and the brick's side": "The glass's edge and the brick's side",
    "A Greenland map of a redwood forest": "A Greenland map of a redwood forest",
}
BLUNT = {  # StructXLIP's released filter
    "An orange tree near a gold statue": "An tree near a statue",
    "A man in a white-striped shirt": "A man in a -striped shirt",
    "The car is red, and the Dark Blue bus stops .": "The car is, and the bus stops.",
    "A stainless steel sink, redwood": "A stainless steel sink, redwood",
}


def test_filter_with_and_without_repair():
    assert {text: filter_caption(text) for text in REPAIRED} == REPAIRED
    assert {text: filter_caption(text, ["colours"], repair=False) for text in BLUNT} == BLUNT


@pytest.mark.parametrize("repair", [True, False])
def test_captions_of_which_too_little_would_remain_are_not_changed(repair):
    for text in ("a red and blue ball", "Red"):  # "ball" alone
        assert filter_caption(text, repair=repair) == text
    assert filter_caption("a red ball rolls", repair=repair) == "a ball rolls"


listed = st.sampled_from([entry for category in CATEGORIES for entry in word_list(category)])
GLUE = ["a", "an", "the", "and", "or", "is", "of", "made", "very", "dark", "runs", "on"]
others = st.sampled_from([*GLUE, "car", "apple", "hour", "house", "SUV", "one", "usual"])
marks = st.sampled_from([" ", " ", " ", " ", "-", ", ", ". ", ",", ' "', '" ', " (", ") ", "\n", "'s ", "/"])
texts = st.lists(st.tuples(listed | others, marks, st.booleans()), min_size=1, max_size=14).map(
    lambda parts: "".join((word.capitalize() if high else word) + mark for word, mark, high in parts)
)


@given(texts | st.text(max_size=40))
def test_filters_add_no_word_and_leave_none_that_is_listed(text):
    for repair in (True, False):
        found = filter_caption(text, repair=repair)
        assert found.strip() or not text.strip()
        remaining = iter(re.findall(r"\w+", text.lower()))
        for word in re.findall(r"\w+", found.lower()):  # in the order of the caption; "a" and "an" may change
            assert any(other in ({"a", "an"} if word in ("a", "an") else {word}) for other in remaining)
        if found != text and not repair:
            assert not {"red", "wooden", "shiny"} & set(re.findall(r"\w+", found.lower()))


def test_word_lists_hold_distinct_words_in_lower_case():
    for category in CATEGORIES:
        entries = word_list(category)
        assert len(set(entries)) == len(entries) > 40
        assert all(re.fullmatch(r"[a-z]+(?:[ -][a-z]+)*", entry) for entry in entries)
    assert len(word_list("structxlip_colours")) == 56


def test_filters_by_name():
    text = "An orange wooden door near a gold statue"
    expected = {
        "lexicon": "A door near a statue",
        "lexicon:colours": "A wooden door near a statue",
        "lexicon:colours, materials": "A door near a statue",
        "blunt": "An door near a statue",
        "blunt:materials": "An orange door near a gold statue",
    }
    for name, filtered in expected.items():
        assert pickle.loads(pickle.dumps(load_filter(name)))(text) == filtered
    assert len({filter_version(name) for name in expected}) == len(expected)
    assert filter_version("my_filters:lower") == "my_filters:lower"


def test_functions_of_the_user_and_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_filters.py").write_text("def lower(text): return text.lower()\ndef none(text): return ' '\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_filters", raising=False)
    assert load_filter("my_filters:lower")("A Dog") == "a dog"
    with pytest.raises(ValueError, match="my_filters:none"):
        load_filter("my_filters:none")("A Dog")
    for name in ("lexikon", "lexicon:colors", "lexicon:", "my_filters:absent", "my_filters:__name__", "not_there:f"):
        with pytest.raises(ValueError, match=name.rpartition(":")[2] or "choose"):
            load_filter(name)
