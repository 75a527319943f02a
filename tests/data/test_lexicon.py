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
    "a red apple and an ivory horse": "an apple and a horse",
    "a red hour hand, a red university, A RED UMBRELLA": "an hour hand, a university, An UMBRELLA",
    "a black-and-white photo and a blue-green lake": "a photo and a lake",
    "a red, round ball and a red and tall box": "a round ball and a tall box",
    "Leather, wooden, and metal chairs stand around.": "chairs stand around.",
    "The car is red and parked, a gold/silver lamp (wooden) shines.": "The car is and parked, a lamp shines.",
    "A Greenland map of a redwood forest": "A Greenland map of a redwood forest",
    "a red and blue ball": "a red and blue ball",  # too little would remain
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


listed = st.sampled_from([entry for category in CATEGORIES for entry in word_list(category)])
GLUE = ["a", "an", "the", "and", "or", "is", "of", "made", "very", "dark", "car", "apple", "hour", "SUV", "one"]
marks = st.sampled_from([" ", " ", " ", " ", "-", ", ", ". ", ",", ' "', '" ', " (", ") ", "\n", "'s ", "/"])
texts = st.lists(st.tuples(listed | st.sampled_from(GLUE), marks, st.booleans()), min_size=1, max_size=14).map(
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


def test_filters_by_name_and_functions_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "An orange wooden door near a gold statue"
    expected = {
        "lexicon": "A door near a statue",
        "lexicon:colours": "A wooden door near a statue",
        "blunt": "An door near a statue",
        "blunt:materials": "An orange door near a gold statue",
    }
    for name, filtered in expected.items():
        assert pickle.loads(pickle.dumps(load_filter(name)))(text) == filtered
    assert len({filter_version(name) for name in expected}) == len(expected)
    (tmp_path / "my_filters.py").write_text("def lower(text): return text.lower()\ndef none(text): return ' '\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_filters", raising=False)
    assert load_filter("my_filters:lower")("A Dog") == "a dog"
    with pytest.raises(ValueError, match="my_filters:none"):
        load_filter("my_filters:none")("A Dog")
    for name in ("lexikon", "lexicon:colors", "my_filters:absent", "my_filters:__name__", "not_there:f"):
        with pytest.raises(ValueError, match=name.rpartition(":")[2]):
            load_filter(name)
