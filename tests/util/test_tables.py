"""Marks, rules and LaTeX: character by character, and escapes read back."""

from __future__ import annotations

import doctest
import re

from hypothesis import example, given
from hypothesis import strategies as st

from hnclip.util import tables
from hnclip.util.tables import latex_escape, latex_table, markdown_table, text_table

HEADERS, ROWS = ["model", "T→I R@1"], [["a", "9.50"], ["my_run", "10.00"], [], ["paper", "–"]]
MARKS = {(1, 1): "best", (0, 1): "second"}


def test_text_marks_leave_the_digits_under_each_other():
    assert text_table(HEADERS, ROWS, marks=MARKS).split("\n") == [
        "model   T→I R@1",
        "------  -------",
        "a         9.50+",
        "my_run   10.00*",
        "------  -------",
        "paper        –",
    ]


def test_columns_without_a_mark_are_as_before():
    table = text_table(["m", "a", "b"], [["x", "1.0", "2.0"], ["y", "3.0", "4.0"]], marks={(0, 2): "best"})
    assert table.split("\n") == ["m    a     b", "-  ---  ----", "x  1.0  2.0*", "y  3.0  4.0"]


def test_markdown_marks_and_rules():
    assert markdown_table(HEADERS, ROWS, marks=MARKS).split("\n") == [
        "| model | T→I R@1 |",
        "| :--- | ---: |",
        "| a | *9.50* |",
        "| my_run | **10.00** |",
        "|  |  |",
        "| paper | – |",
    ]


def test_latex_marks_and_rules():
    table = latex_table(HEADERS, ROWS, marks=MARKS, caption="c", label="tab:l")
    assert table.split("\n")[4:-1] == [
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


def test_latex_float_with_titles_over_columns():
    table = latex_table(
        ["model", "a", "b", "c"],
        [["x", "1", "2", "3"]],
        spans=[("DOCCI", 2), ("DCI & more", 1)],
        caption="100 % of it.",
        label="tab:it",
    )
    assert table.split("\n") == [
        r"\begin{table}",
        r"\centering",
        r"\caption{100 \% of it.}",
        r"\label{tab:it}",
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"& \multicolumn{2}{c}{DOCCI} & \multicolumn{1}{c}{DCI \& more} \\",
        r"\cmidrule(lr){2-3} \cmidrule(lr){4-4}",
        r"model & a & b & c \\",
        r"\midrule",
        r"x & 1 & 2 & 3 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


COMMANDS = {
    r"\textbackslash{}": "\\",
    r"\textasciitilde{}": "~",
    r"\textasciicircum{}": "^",
    r"\textless{}": "<",
    r"\textgreater{}": ">",
    r"\textbar{}": "|",
    r"\textendash{}": "–",
    r"\ldots{}": "…",
    r"$\rightarrow$": "→",
    r"$\times$": "×",
    r"$\pm$": "±",
    "$-$": "−",
    r"$\alpha$": "α",
    r"$\gamma$": "γ",
    r"$\lambda$": "λ",
    r"$\Delta$": "Δ",
    r"$\bar{G}$": "Ḡ",
    "-{}": "-",
    "{[}": "[",
    "{*}": "*",
    **{f"\\{character}": character for character in "&%$#_{}"},
}


def read_latex(text: str) -> str:
    """What LaTeX would print: known commands are characters, and nothing else may be special."""
    longest_first = sorted(COMMANDS, key=len, reverse=True)
    printed = ""
    while text:
        command = next((command for command in longest_first if text.startswith(command)), None)
        if command is None:
            assert text[0] not in "\\&%$#_{}~^<>|", text
            assert not text.startswith("--"), text
            printed, text = printed + text[0], text[1:]
        else:
            printed, text = printed + COMMANDS[command], text[len(command) :]
    return printed


@given(st.text(st.sampled_from([*r"ab1 .-[]*{}\&%$#_~^<>|", *"–…→×±−αγλΔḠé\n\t"]), max_size=12))
@example("a--b---c")
@example("[x] *")
@example("* [")
def test_escaped_text_prints_as_itself(text):
    escaped = latex_escape(text)
    assert read_latex(escaped) == " ".join(text.split())
    assert not re.match(r"[\[*]", escaped)  # it would belong to the line break of the row before


def test_docstring_examples():
    result = doctest.testmod(tables)
    assert (result.attempted > 0, result.failed) == (True, 0)


def test_plain_tables():
    assert text_table(["m", "long header"], [["wide name", "1"], ["b", "22"]]).split("\n") == [
        "m          long header",
        "---------  -----------",
        "wide name            1",
        "b                   22",
    ]
    assert text_table(["name"], [["a"]]) == "name\n----\na"  # no trailing space
    assert text_table(["a", "bb"], []) == "a  bb\n-  --"
    assert markdown_table(["m", "why"], [["x", "a sentence " * 5]]).split("\n")[1] == "| :--- | :--- |"
    assert markdown_table(["a|b"], [["c|d"]]) == "| a\\|b |\n| :--- |\n| c\\|d |"
