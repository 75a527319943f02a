"""Tables for a terminal, for Markdown and for LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal

Mark = Literal["best", "second"]
MISSING = "–"  # a cell for which there is no number
LONG_CELL = 40  # characters beyond which a column holds sentences, not numbers or names
TEXT_MARKS: dict[Mark, str] = {"best": "*", "second": "+"}

LATEX = {
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


class Marked(str):
    """A cell of a table that stands out if it has a mark."""

    mark: Mark | None

    def __new__(cls, text: str, mark: Mark | None) -> Marked:
        cell = super().__new__(cls, text)
        cell.mark = mark
        return cell


def mark_of(cell: str) -> Mark | None:
    return cell.mark if isinstance(cell, Marked) else None


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned plain text: first column to the left, the others to the right. An empty row is a rule.

    >>> print(text_table(["model", "R@1"], [["a", "9.5"], ["longer", "10.0"]]))
    model    R@1
    ------  ----
    a        9.5
    longer  10.0

    The best cell is marked with *, the second with +:

    >>> print(text_table(["model", "R@1"], [["a", "9.5"], [], ["b", Marked("10.0", "best")]]))
    model    R@1
    -----  -----
    a       9.5
    -----  -----
    b      10.0*
    """
    marked = {column for cells in rows for column, cell in enumerate(cells) if mark_of(cell)}
    # Cells above and below a mark leave its place free, so that the digits stay under each other.
    drawn = [
        [cell + (TEXT_MARKS[mark] if (mark := mark_of(cell)) else " " * (column in marked)) for column, cell in line]
        for line in map(enumerate, rows)
    ]
    widths = [max(map(len, column)) for column in zip(headers, *(cells for cells in drawn if cells))]
    rule = ["-" * width for width in widths]

    def line(cells: Sequence[str]) -> str:
        others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:])]
        return "  ".join([cells[0].ljust(widths[0]), *others]).rstrip()

    return "\n".join([line(headers), line(rule), *(line(cells or rule) for cells in drawn)])


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: numbers to the right, names and sentences to the left; an empty row is one of empty
    cells.

    >>> print(markdown_table(["model", "R@1"], [["a", Marked("9.5", "best")]]))
    | model | R@1 |
    | :--- | ---: |
    | a | **9.5** |
    """

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells or [''] * len(headers))} |"

    def escape(cell: str) -> str:
        return " ".join(cell.split()).replace("|", r"\|")

    columns = zip(headers, *(cells for cells in rows if cells))
    long = [any(len(cell) > LONG_CELL for cell in column) for column in columns]
    sides = [":---" if not column or long[column] else "---:" for column in range(len(headers))]
    drawn = _draw(rows, {"best": "**{}**", "second": "*{}*"}, escape)
    return "\n".join(map(line, [[*map(escape, headers)], sides, *drawn]))


def latex_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    spans: Sequence[tuple[str, int]] = (),
    caption: str,
    label: str,
) -> str:
    """A floating LaTeX table that needs the package booktabs and nothing else. An empty row is a rule.

    Args:
        headers, rows: plain text; what LaTeX would read as commands is escaped. The best cell becomes bold, the second
            underlined.
        spans: titles above the headers from the second column on, each with the number of columns it spans.
        caption: plain text.
        label: to refer to the table by.
    """

    def line(cells: Sequence[str]) -> str:
        return " & ".join(cells).lstrip() + r" \\" if cells else r"\midrule"

    lines = [f"\\begin{{tabular}}{{l{'r' * (len(headers) - 1)}}}", r"\toprule"]
    if spans:
        titles = [f"\\multicolumn{{{columns}}}{{c}}{{{latex_escape(title)}}}" for title, columns in spans]
        stops = [*accumulate((columns for _, columns in spans), initial=1)]
        rules = [f"\\cmidrule(lr){{{first + 1}-{last}}}" for first, last in pairwise(stops)]
        lines += [line(["", *titles]), " ".join(rules)]
    drawn = _draw(rows, {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"}, latex_escape)
    lines += [line([*map(latex_escape, headers)]), r"\midrule", *map(line, drawn)]
    lines += [r"\bottomrule", r"\end{tabular}"]
    names = [f"\\caption{{{latex_escape(caption)}}}", f"\\label{{{label}}}"]
    return "\n".join([r"\begin{table}", r"\centering", *names, *lines, r"\end{table}"])


def latex_escape(text: str) -> str:
    """Plain text for LaTeX: its commands as characters, and the signs of this house that its fonts lack.

    >>> print(latex_escape("T→I R@1 of 100 % & runs/my_run"))
    T$\\rightarrow$I R@1 of 100 \\% \\& runs/my\\_run
    """
    escaped = "".join(LATEX.get(character, character) for character in " ".join(text.split()))
    # Two hyphens would become a dash; a bracket or star at the start of a row would belong to the \\ before it.
    return re.sub(r"^[\[*]", r"{\g<0>}", re.sub("-(?=-)", "-{}", escaped))


def _draw(rows: Sequence[Sequence[str]], styles: Mapping[Mark, str], escape: Callable[[str], str]) -> list[list[str]]:
    """Cells as a format writes them."""

    def draw(cell: str) -> str:
        mark = mark_of(cell)
        return styles[mark].format(escape(cell)) if mark else escape(cell)

    return [[*map(draw, cells)] for cells in rows]
