"""Tables in three layouts, and words of texts: which are shared, which differ, how they are shortened."""

from __future__ import annotations

import doctest
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hnclip.util import tables
from hnclip.util import text as text_module
from hnclip.util.tables import LATEX, Marked, latex_escape, latex_table, markdown_table, text_table
from hnclip.util.text import Passage, highlight_different, highlight_shared, shorten

HEADERS, ROWS = (
    ["model", "T→I R@1"],
    [["a", Marked("9.50", "second")], ["my_run", Marked("10.00", "best")], [], ["paper", "–"]],
)


def test_marks_rules_and_titles_over_columns():
    markdown = markdown_table(HEADERS, ROWS).split("\n")
    assert markdown[2:] == ["| a | *9.50* |", "| my_run | **10.00** |", "|  |  |", "| paper | – |"]
    table = latex_table(HEADERS, ROWS, spans=[("DOCCI & more", 1)], caption="100 % of it.", label="tab:it")
    for part in (r"\caption{100 \% of it.}", r"& \multicolumn{1}{c}{DOCCI \& more} \\", r"my\_run & \textbf{10.00} \\"):
        assert part in table
    assert text_table(["m", "long header"], [["wide name", "1"]]).split("\n")[2] == "wide name            1"


COMMANDS = {escaped: plain for plain, escaped in LATEX.items()} | {"-{}": "-", "{[}": "[", "{*}": "*"}


def read_latex(text: str) -> str:
    """What LaTeX would print: known commands are characters, and nothing else may be special."""
    commands = "|".join(map(re.escape, sorted(COMMANDS, key=len, reverse=True)))
    assert not re.search(r"[\\&%$#_{}~^<>|]|--", re.sub(commands, "?", text)), text
    return re.sub(commands, lambda command: COMMANDS[command[0]], text)


@given(st.text(st.sampled_from([*r"ab1 .-[]*{}\&%$#_~^<>|", *"–…→×±−αγλΔḠé\n\t"]), max_size=12))
@example("a--b---c")
@example("[x] *")
@example("* [")
def test_escaped_text_prints_as_itself(text):
    escaped = latex_escape(text)
    assert read_latex(escaped) == " ".join(text.split())
    assert not re.match(r"[\[*]", escaped)  # it would belong to the line break of the row before


def marked(passages: tuple[Passage, ...]) -> list[list[str]]:
    return [[piece for piece, highlighted in passage if highlighted] for passage in passages]


@pytest.mark.parametrize(
    ("query", "other", "expected"),
    [
        ("The Red car, a dog's RED tail", "One dog, red ears", [["Red", "dog's", "RED"], ["dog", "red"]]),
        ("a red car", "Red!", [["red"], ["Red"]]),
        ("Die STRASSE", "eine Straße", [["STRASSE"], ["Straße"]]),
        ("caf\u00e9 bleu", "le cafe\u0301", [["caf\u00e9"], ["cafe\u0301"]]),
        ("हिन्दी किताब", "नई किताब", [["किताब"], ["किताब"]]),
        ("一辆红色汽车停在路边", "红色汽车和房子", [["红色汽车"], ["红色汽车"]]),
        ("红车", "车红", [[], []]),  # a character alone means little
    ],
)  # fmt: skip
def test_words_of_any_script(query: str, other: str, expected: list[list[str]]) -> None:
    assert marked(highlight_shared(query, other)) == expected


def test_what_only_one_text_has() -> None:
    texts = "A red dog's ball on the lawn.", "The RED cat on a lawn", "a blue dog, a cat and a bird"
    assert marked(highlight_different(*texts)) == [["ball"], [], ["blue", "bird"]]
    assert marked(highlight_different("a tree under it", "the tree over her")) == [[], []]
    assert marked(highlight_different("红房子", "红房客")) == [["房子"], ["房客"]]


texts = st.text(st.characters(), max_size=80) | st.text("ab a'’s\n車红한 ก\u0301", max_size=40)


@given(texts, texts)
def test_pieces_joined_are_the_text(query: str, other: str) -> None:
    for passage, text in zip(highlight_shared(query, other), (query, other)):
        pieces = [piece for piece, _ in passage]
        assert all(pieces)
        assert "".join(pieces) == shorten(text)
        "".join(pieces).encode()


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("exactly eleven", 11, "exactly el…"),  # the last space is too far back
        ("x" * 90 + " and more words", 100, "x" * 90 + " and…"),
        ("红" * 30, 10, "红" * 9 + "…"),
        ("a\nb\tc\x00d\u2028e\ud800f\u202eg\x85", 20, "a b c d e f g "),
    ],
)
def test_long_texts_are_cut_between_words_and_unprintable_characters_are_spaces(
    text: str, limit: int, expected: str
) -> None:
    assert shorten(text, limit) == expected


@pytest.mark.parametrize("module", [tables, text_module])
def test_docstring_examples(module):
    assert doctest.testmod(module).failed == 0
