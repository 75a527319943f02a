"""Marks, rules and LaTeX: character by character, and escapes read back."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from hnclip.util.tables import LATEX, latex_escape, latex_table, markdown_table, text_table

HEADERS, ROWS = ["model", "T→I R@1"], [["a", "9.50"], ["my_run", "10.00"], [], ["paper", "–"]]
MARKS = {(1, 1): "best", (0, 1): "second"}


def test_marks_rules_and_titles_over_columns():
    assert text_table(HEADERS, ROWS, marks=MARKS).split("\n") == [
        "model   T→I R@1",
        "------  -------",
        "a         9.50+",  # digits stay under each other
        "my_run   10.00*",
        "------  -------",
        "paper        –",
    ]
    markdown = markdown_table(HEADERS, ROWS, marks=MARKS).split("\n")
    assert markdown[2:] == ["| a | *9.50* |", "| my_run | **10.00** |", "|  |  |", "| paper | – |"]
    spans, options = [("DOCCI & more", 1)], {"caption": "100 % of it.", "label": "tab:it"}
    assert latex_table(HEADERS, ROWS, marks=MARKS, spans=spans, **options).split("\n") == [
        r"\begin{table}",
        r"\centering",
        r"\caption{100 \% of it.}",
        r"\label{tab:it}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"& \multicolumn{1}{c}{DOCCI \& more} \\",
        r"\cmidrule(lr){2-2}",
        r"model & T$\rightarrow$I R@1 \\",
        r"\midrule",
        r"a & \underline{9.50} \\",
        r"my\_run & \textbf{10.00} \\",
        r"\midrule",
        r"paper & \textendash{} \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    wide = latex_table(["model", *"abc"], [], spans=[("x", 2), ("y", 1)], **options)
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-4}" in wide


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
