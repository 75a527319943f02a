from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hnclip.data.texts import SPLITTERS, first_sentence, sentence_spans, split_sentences

# Sentences are separated by bars here; a bar with no space around it is where no space stands.
CASES = [
    "A pole of 3.5 m stands here.|It costs $1.50.",
    "Mr. Smith and Dr. Lee of St. Louis wave.|They smile.",
    "Fruit, e.g. apples, i.e. red ones, lie approx. 2 m away.|Good.",
    "Car No. 5 leads.|Car No. 6 follows.",
    "She says no.|Then she leaves.",
    "A U.S. flag flies.|It was made in the U.S.|The pole is tall.",
    "Cats vs. dogs, birds, etc. play.|Cars, buses, etc.|Trees stand behind.",
    "A sign on Main St.|The street is empty.",
    "Opened at 9 a.m. on Monday.|Closed at 5 p.m.|Nobody is there.",
    "A wall 6 ft. high.|A rope of 6 ft.|The end.",
    "It goes on... and on.|It stops...|Then it goes on…|Really.",
    "The file photo.final.jpg from www.example.com/a.b lies here.|See example. com for more.",
    'It reads "No parking." in red.|It reads "Stop."|A car stops.',
    "A dog (it is old.)|A cat (young!) sleeps.",
    "What is this?|A cat!|The Yahoo! sign glows.|Why?!|Because.",
    "A line\nthat was wrapped.|Another one",
    "First paragraph|\n\n|second paragraph",
    "A dog|\n|A cat",
    "John F. Kennedy waves.|The letter C.|Below it is a D.",
    "1. A dog.|2. A cat.",
    "the dog sits. |it is small.|no stop at the end",
    "A man on the left.||A dog on the right.",
    "一只狗。||一只猫！||树",
    "A street they live in.|it is old.",
    "The page www.example.Museum and the file docs/readme.Text are shown.",
    "Only one",
    "It ends . . .|Next.",
]


@pytest.mark.parametrize("case", CASES)
def test_careful_sentences(case: str) -> None:
    parts = [part.strip() for part in case.split("|") if part.strip()]
    text = case.replace("||", "\0").replace("|\n", "\n").replace("\n|", "\n").replace("|", " ").replace("\0", "")
    assert split_sentences(text) == parts


def test_dots_are_the_official_splitting() -> None:
    text = " A pole of 3.5 m. It is e.g. red..  The end"
    assert split_sentences(text, "dots") == [part.strip() for part in text.split(".") if part.strip()]
    assert split_sentences("...", "dots") == []


@given(st.text(alphabet=st.sampled_from(list("aB1.!?… \n\t\"')(。-,")) | st.characters(), max_size=80))
def test_spans_are_ordered_stripped_and_hold_every_letter(text: str) -> None:
    for how in SPLITTERS:
        spans = sentence_spans(text, how)  # type: ignore[arg-type]
        edges = [edge for span in spans for edge in span]
        assert edges == sorted(edges)
        for start, stop in spans:
            assert text[start:stop].strip() == text[start:stop] != ""
        kept = "".join(text[start:stop] for start, stop in spans)
        left = "".join(kept.split()).replace(".", "")
        assert left == "".join(text.split()).replace(".", "")
    assert [part.strip() for part in text.split(".") if part.strip()] == split_sentences(text, "dots")
    assert text.strip().replace("\n", " ").startswith(first_sentence(text))


def test_first_sentence() -> None:
    text = "A pole of 3.5 m by Mr. Lee.\nIt is red. It is old."
    assert first_sentence(text) == "A pole of 3.5 m by Mr"
    assert first_sentence("One line.\nAnother. Third") == "One line"
    assert first_sentence("no stop") == "no stop"
    assert first_sentence(". A dog") == ". A dog"  # never empty


@pytest.mark.parametrize("unit", ["word. ", ". ", "A.", " ", "\n", '."', "1. ", "...a", "e.g. ", "! ?", " \n"])
def test_long_captions_take_linear_time(unit: str) -> None:
    text = "x" + unit * (100_000 // len(unit)) + "x"  # in quadratic time this does not come back
    spans = sentence_spans(text)
    assert (spans[0][0], spans[-1][1]) == (0, len(text))


def test_unknown_splitting_is_refused() -> None:
    with pytest.raises(ValueError, match="one of careful, dots, not 'lines'"):
        sentence_spans("A dog.", "lines")  # type: ignore[arg-type]
