"""Marks, rules and LaTeX: character by character, and escapes read back."""

from __future__ import annotations

import doctest
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hnclip.util import tables, text
from hnclip.util.tables import LATEX, latex_escape, latex_table, markdown_table, text_table

HEADERS, ROWS = ["model", "T→I R@1"], [["a", "9.50"], ["my_run", "10.00"], [], ["paper", "–"]]
MARKS = {(1, 1): "best", (0, 1): "second"}


def test_marks_and_rules():
    assert text_table(HEADERS, ROWS, marks=MARKS).split("\n") == [
        "model   T→I R@1",
        "------  -------",
        "a         9.50+",  # digits stay under each other
        "my_run   10.00*",
        "------  -------",
        "paper        –",
    ]
    assert markdown_table(HEADERS, ROWS, marks=MARKS).split("\n") == [
        "| model | T→I R@1 |",
        "| :--- | ---: |",
        "| a | *9.50* |",
        "| my_run | **10.00** |",
        "|  |  |",
        "| paper | – |",
    ]
    assert latex_table(HEADERS, ROWS, marks=MARKS, caption="c", label="tab:l").split("\n")[4:-1] == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"model & T$\rightarrow$I R@1 \\",
        r"\midrule",
        r"a & \underline{9.50} \\",
        r"my\_run & \textbf{10.00} \\",
        r"\midrule",
        r"paper & \textendash{} \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_titles_over_columns_of_latex():
    spans = [("DOCCI", 2), ("DCI & more", 1)]
    table = latex_table(["model", *"abc"], [["x", *"123"]], spans=spans, caption="100 % of it.", label="tab:it")
    lines = table.split("\n")
    assert lines[:4] == [r"\begin{table}", r"\centering", r"\caption{100 \% of it.}", r"\label{tab:it}"]
    assert lines[6:9] == [
        r"& \multicolumn{2}{c}{DOCCI} & \multicolumn{1}{c}{DCI \& more} \\",
        r"\cmidrule(lr){2-3} \cmidrule(lr){4-4}",
        r"model & a & b & c \\",
    ]


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


@pytest.mark.parametrize("module", [tables, text])
def test_docstring_examples(module):
    result = doctest.testmod(module)
    assert (result.attempted > 0, result.failed) == (True, 0)


def test_plain_tables():
    assert text_table(["m", "long header"], [["wide name", "1"]]).split("\n")[2] == "wide name            1"
    assert text_table(["name"], [["a"]]) == "name\n----\na"  # no trailing space
    assert text_table(["a", "bb"], []) == "a  bb\n-  --"
    assert markdown_table(["m", "why"], [["x", "a sentence " * 5]]).split("\n")[1] == "| :--- | :--- |"
    assert markdown_table(["a|b"], [["c|d"]]) == "| a\\|b |\n| :--- |\n| c\\|d |"
