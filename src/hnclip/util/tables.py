"""Tables for a terminal, for Markdown and for LaTeX."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

Mark = Literal["best", "second"]
Marks = Mapping[tuple[int, int], Mark]
"""Marked cells by row and column, both counted from 0 below the header."""

TEXT_MARKS: dict[Mark, str] = {"best": "*", "second": "+"}

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": r"\textendash{}",
    "…": r"\ldots{}",
    "→": r"$\rightarrow$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "−": "$-$",
    "α": r"$\alpha$",
    "γ": r"$\gamma$",
    "λ": r"$\lambda$",
    "Δ": r"$\Delta$",
    "Ḡ": r"$\bar{G}$",
}


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, marks: Marks | None = None) -> str:
    """Aligned plain text: first column to the left, the others to the right. An empty row is a rule.

    >>> print(text_table(["model", "R@1"], [["a", "9.5"], ["longer", "10.0"]]))
    model    R@1
    ------  ----
    a        9.5
    longer  10.0

    The best cell is marked with *, the second with +:

    >>> print(text_table(["model", "R@1"], [["a", "9.5"], [], ["b", "10.0"]], marks={(2, 1): "best"}))
    model    R@1
    -----  -----
    a       9.5
    -----  -----
    b      10.0*
    """
    _check_rows(headers, rows, marks)
    marked = {column for _, column in marks or {}}

    def draw(row: int, column: int, cell: str) -> str:
        mark = (marks or {}).get((row, column))
        # Cells above and below a mark leave its place free, so that the digits stay under each other.
        return cell + (TEXT_MARKS[mark] if mark else " " if column in marked else "")

    drawn = [[draw(row, column, cell) for column, cell in enumerate(cells)] for row, cells in enumerate(rows)]
    widths = [max(map(len, column)) for column in zip(headers, *(cells for cells in drawn if cells))]
    rule = ["-" * width for width in widths]

    def line(cells: Sequence[str]) -> str:
        others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:])]
        return "  ".join([cells[0].ljust(widths[0]), *others]).rstrip()

    return "\n".join([line(headers), line(rule), *(line(cells or rule) for cells in drawn)])


def markdown_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, marks: Marks | None = None, words: bool = False
) -> str:
    """A Markdown table with the same alignment, or with `words` all to the left; a bar inside a cell is escaped, an
    empty row is one of empty cells.

    >>> print(markdown_table(["model", "R@1"], [["a", "9.5"]], marks={(0, 1): "best"}))
    | model | R@1 |
    | :--- | ---: |
    | a | **9.5** |
    """
    _check_rows(headers, rows, marks)
    styles = {"best": "**{}**", "second": "*{}*"}

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def draw(row: int, column: int, cell: str) -> str:
        mark = (marks or {}).get((row, column))
        escaped = cell.replace("|", r"\|")
        return styles[mark].format(escaped) if mark else escaped

    head = [draw(-1, column, cell) for column, cell in enumerate(headers)]
    body = [
        line([draw(row, column, cell) for column, cell in enumerate(cells or [""] * len(headers))])
        for row, cells in enumerate(rows)
    ]
    others = ":---" if words else "---:"
    return "\n".join([line(head), line([":---", *[others] * (len(headers) - 1)]), *body])


def latex_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    marks: Marks | None = None,
    spans: Sequence[tuple[str, int]] = (),
    caption: str | None = None,
    label: str | None = None,
) -> str:
    """A LaTeX table that needs the package booktabs and nothing else. An empty row is a rule.

    Args:
        headers, rows: plain text; what LaTeX would read as commands is escaped.
        marks: the best cell becomes bold, the second underlined.
        spans: titles above the headers from the second column on, each with the number of columns it spans.
        caption: plain text; with one the table floats, without one it is the tabular alone.
        label: to refer to the floating table by.
    """
    _check_rows(headers, rows, marks)
    if spans and sum(columns for _, columns in spans) != len(headers) - 1:
        raise ValueError(f"spans must cover the {len(headers) - 1} columns after the first, got {list(spans)}")
    if label is not None and caption is None:
        raise ValueError("label needs a caption: a tabular alone cannot be referred to")
    styles = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"}

    def draw(row: int, column: int, cell: str) -> str:
        mark = (marks or {}).get((row, column))
        return styles[mark].format(latex_escape(cell)) if mark else latex_escape(cell)

    def line(row: int, cells: Sequence[str]) -> str:
        return " & ".join(draw(row, column, cell) for column, cell in enumerate(cells)) + r" \\"

    lines = [f"\\begin{{tabular}}{{l{'r' * (len(headers) - 1)}}}", r"\toprule"]
    if spans:
        titles = [f"\\multicolumn{{{columns}}}{{c}}{{{latex_escape(title)}}}" for title, columns in spans]
        lines += [" & ".join(["", *titles]).lstrip() + r" \\", " ".join(_span_rules(spans))]
    lines += [line(-1, headers), r"\midrule"]
    lines += [line(row, cells) if cells else r"\midrule" for row, cells in enumerate(rows)]
    lines += [r"\bottomrule", r"\end{tabular}"]
    if caption is None:
        return "\n".join(lines)
    names = [f"\\caption{{{latex_escape(caption)}}}", *([f"\\label{{{label}}}"] if label else [])]
    return "\n".join([r"\begin{table}", r"\centering", *names, *lines, r"\end{table}"])


def latex_escape(text: str) -> str:
    """Plain text for LaTeX: its commands as characters, and the signs of this house that its fonts lack.

    >>> print(latex_escape("T→I R@1 of 100 % & runs/my_run"))
    T$\\rightarrow$I R@1 of 100 \\% \\& runs/my\\_run
    """
    escaped = "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
    # Two hyphens would become a dash; a bracket or star at the start of a row would belong to the \\ before it.
    return re.sub(r"^[\[*]", r"{\g<0>}", re.sub("-(?=-)", "-{}", escaped))


def _span_rules(spans: Sequence[tuple[str, int]]) -> list[str]:
    rules, first = [], 2
    for _, columns in spans:
        rules.append(f"\\cmidrule(lr){{{first}-{first + columns - 1}}}")
        first += columns
    return rules


def _check_rows(headers: Sequence[str], rows: Sequence[Sequence[str]], marks: Marks | None) -> None:
    if not headers:
        raise ValueError("headers must name at least one column")
    for cells in rows:
        if cells and len(cells) != len(headers):
            raise ValueError(f"rows must have {len(headers)} cells like headers, got {list(cells)}")
    for row, column in marks or {}:
        if not (0 <= row < len(rows) and 0 <= column < len(rows[row])):
            raise ValueError(f"marks names the cell {row, column}, which the table does not have")
