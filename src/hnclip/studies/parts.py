"""The pieces of a study's outcome, before anyone says how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hnclip.util.tables import Marks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TablePart:
    """A table.

    Args:
        headers, rows: plain text; an empty row is a rule.
        marks: cells that stand out, by row and column.
        spans: titles above the headers from the second column on, each with the number of columns it spans.
        notes: below it; `{best}` and `{second}` become what the form marks them with.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marks: Marks = field(default_factory=dict)
    spans: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FigurePart:
    """A figure. `name` is that of its file, without an ending."""

    name: str
    title: str
    figure: Figure
    caption: str


@dataclass(frozen=True)
class WordsPart:
    """Sentences, one below the other."""

    sentences: tuple[str, ...]


Part = TablePart | FigurePart | WordsPart


@dataclass(frozen=True)
class Shown:
    """What one show made of a study: parts for people, `data` for programs (ready for JSON)."""

    parts: tuple[Part, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
