"""Captions into tokens, cleaned, split into sentences, and without words of appearance."""

from __future__ import annotations

import html
import pickle
import re
import sys
from pathlib import Path

import ftfy
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hnclip.data.lexicon import CATEGORIES, filter_caption, filter_version, load_filter, word_list
from hnclip.data.texts import CHUNK, TextTransform, clean_caption, first_sentence, split_sentences
from hnclip.models.preprocessing import train_tokenizer
from small_families import bert_tokenizer, sentencepiece_tokenizer

CAPTIONS = [
    "A red house",
    "a dog and the green tree on the grass under a blue house near the bench with a cat and a tree",
    "dog",
    "the dog on the grass with the red house and a tree and a tree and a tree",
]
EDGES = {"clip": (1, 1), "bert": (1, 1), "siglip": (0, 1)}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        "clip": train_tokenizer(CAPTIONS, 600),
        "bert": bert_tokenizer(),
        "siglip": sentencepiece_tokenizer(tmp_path_factory.mktemp("siglip")),
    }


@pytest.fixture(params=EDGES)
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("context", [3, 4, 8, 17, 20, 1000])
def test_truncation_removes_the_last_words_and_keeps_special_tokens(tokenizers, kind, context):
    """Against one text at a time, and the last word removed until the rest fits."""
    tokenizer, transform = tokenizers[kind], TextTransform(tokenizers[kind], context)
    assert transform.edges == EDGES[kind]
    expected = [tokenizer.encode(text, verbose=False) for text in CAPTIONS]
    truncated = sum(len(row) > context for row in expected)
    for row in expected:
        while len(row) > context:
            del row[len(row) - EDGES[kind][1] - 1]
    found = transform(CAPTIONS)
    assert [row.tolist() for row in found] == expected
    assert (found.truncated, found.lengths.tolist()) == (truncated, [len(row) for row in expected])
    assert (found.tokens.dtype, found.tokens.size) == (np.int32, found.lengths.sum())  # four bytes for each token


def test_chunks_of_many_texts_are_joined_in_order(tokenizers):
    transform = TextTransform(tokenizers["bert"], 12)
    texts = [CAPTIONS[index % 4] + " tree" * (index % 3) for index in range(2 * CHUNK + 5)]
    found = transform(texts)
    for index in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 4, -1):
        assert found[index].tolist() == transform([texts[index]])[0].tolist()
    assert (len(found), found.truncated) == (len(texts), sum(transform([text]).truncated for text in texts[:12]) * 683)
    assert list(transform.offsets(texts))[-2] == next(transform.offsets(texts[-2:]))


# Texts without words; [UNK] is no word, and BERT knows no word of more than 100 letters.
UNREADABLE = [
    "",
    " \n",
    None,
    7,
    "dog \ud83d",
    "<|endoftext|>",
    "!!!",
    "🦜",
    "zzz" * 50,
    "&nbsp;",
    "\ufeff",
    "zzz " * 9,
]


@pytest.mark.parametrize("clean", [str, clean_caption])
def test_validate_agrees_with_tokenising(tokenizers, kind, clean):
    transform = TextTransform(tokenizers[kind], 77, clean)
    texts = [*UNREADABLE, "zzz " * 9 + "dog", "一只狗 dog", "&amp;dog", "7"]
    for text, reason in zip(texts, transform.validate(texts), strict=True):
        if reason is None:
            assert len(transform([text])) == 1
        else:
            with pytest.raises(ValueError, match=r"texts\[2\]"):
                transform(["dog", "a dog", text])


# Cleaning


def literal_clean(text: str) -> str:
    """OpenAI's basic_clean and whitespace_clean, step by step."""
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).strip().split()).strip()


ASCII = [chr(code) for code in range(128)]
SEQUENCES = ["\x1b[31m", "\r\n", "&amp;", "&amp;lt;", "&#38;", "&#28;", "<br>", "&nbsp", "&#xD;", "A&E", "&&"]


@given(st.lists(st.sampled_from(ASCII + SEQUENCES)).map("".join) | st.text(st.characters()))
@example("a\x1fb\x0bc\x1cb\fc\td\re")  # white space to Python, control characters to ftfy
@example("<b> caf&amp;eacute;")  # ftfy does not decode entities next to a "<"
@example("schÃ¶n, itâ€™s “curly” ﬁne &amp;eacute; e\u0301")
@example("&Sigma;ΑΣ.")
def test_cleaning_equals_openais(text):
    """A final sigma makes the caption lower case."""
    expected = literal_clean(text)
    assert clean_caption(text) == (expected.lower() if "Σ" in expected else expected)


# Sentences, separated by bars here; two bars where there is no space

SENTENCES = [
    "A pole of 3.5 m stands here.|It costs $1.50.",
    "Mr. Smith and Dr. Lee of St. Louis wave.|They smile.",
    "Fruit, e.g. apples, i.e. red ones, lie approx. 2 m away.|Good.",
    "It goes on... and on.|It stops...|Then it goes on…|Really.|It ends . . .|Next.",
    'It reads "No parking." in red.|It reads "Stop."|A dog (it is old.)|A cat (young!) sleeps.',
    "A line\nthat was wrapped.|First paragraph|\n\n|second paragraph",
    "the dog sits.|it is small.|一只狗。||一只猫！||树",
    "The files www.example.Museum, photo.final.jpg and docs/readme.Text are shown.",
]


@pytest.mark.parametrize("case", SENTENCES)
def test_careful_sentences(case):
    text = case.replace("||", "\0").replace("|\n\n|", "\n\n").replace("|", " ").replace("\0", "")
    assert split_sentences(text) == [part.strip() for part in case.split("|") if part.strip()]


@given(st.text(alphabet=st.sampled_from(list("aB1.!?… \n\t\"')(。-,")) | st.characters(), max_size=80))
def test_sentences_are_stripped_and_keep_every_character(text):
    found = split_sentences(text)
    assert all(part.strip() == part != "" for part in found)
    assert "".join("".join(found).split()) == "".join(text.split())
    # GOAL's released code
    assert split_sentences(text, "dots") == [part.strip() for part in text.split(".") if part.strip()]
    assert text.strip().replace("\n", " ").startswith(first_sentence(text))


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
    expected = {"lexicon": "A door", "lexicon:colours": "A wooden door", "blunt:materials": "An orange door"}
    for name, filtered in expected.items():
        assert (
            pickle.loads(pickle.dumps(load_filter(name)))("An orange wooden door stands here")
            == f"{filtered} stands here"
        )
    assert len({filter_version(name) for name in expected}) == len(expected)
    (tmp_path / "my_filters.py").write_text("def lower(text): return text.lower()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_filters", raising=False)
    assert load_filter("my_filters:lower")("A Dog") == "a dog"
    for name in ("lexikon", "lexicon:colors", "my_filters:absent", "my_filters:__name__", "not_there:f"):
        with pytest.raises(ValueError, match=name.rpartition(":")[2]):
            load_filter(name)
