"""What a reader of a report is shown, on the page and in figures alike: captions beside their pictures, findings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from PIL.Image import Image

Passage = tuple[tuple[str, bool], ...]
"""A text in pieces, each with whether it is highlighted; joined they are the text."""


@dataclass(frozen=True)
class Shown:
    """A caption with its picture, or None where that cannot be shown; `label` says what it is: "cosine 0.934"."""

    label: str
    text: Passage
    picture: Image | None = None


@dataclass(frozen=True)
class CompanionRow:
    """A caption and the other captions that are nearest to it, words that they share highlighted."""

    query: Shown
    companions: tuple[Shown, ...]


@dataclass(frozen=True)
class Finding:
    """One thing that an analysis found: the number itself, what it means, what to do.

    `level`: "good" needs nothing, "note" is worth knowing, "act" should be dealt with first.
    """

    level: Literal["good", "note", "act"]
    title: str
    number: str
    meaning: str
    advice: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)
