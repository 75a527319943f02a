"""Words that users bring into a figure: names and captions in any script, of any length, drawn as they are.

A `$` in them starts no formula, a character that no font here can draw becomes `MISSING`, without the warning that
matplotlib has for it, and a text is wrapped by the width of its letters, cut where it is too long.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from itertools import groupby
from typing import Any

from hnclip.analysis.shown import Passage

OWN = "DejaVu Sans"  # comes with matplotlib
MISSING = "□"
ELLIPSIS = "…"
# What it lacks, above all Chinese, Japanese and Korean, one of these has where it is installed.
FALLBACKS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "PingFang SC",
    "Hiragino Sans",
    "Arial Unicode MS",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Noto Emoji",
)
_POINTS = 72  # of an inch
_HINTED = 1.04  # how much wider than measured a line gets when few pixels make its letters


def look() -> dict[str, Any]:
    """What every text that a user wrote is drawn with."""
    return {"parse_math": False, "fontfamily": list(_families(FALLBACKS))}


def drawable(text: str) -> str:
    """The text on one line, with `MISSING` for each character that no font here has.

    Marks and signs that take no place of their own are left out instead.
    """
    known = _characters(FALLBACKS)
    line = (" " if character.isspace() else character for character in text)
    return "".join(character if ord(character) in known else _stand_in(character) for character in line)


@lru_cache(maxsize=65536)
def width(text: str, size: float) -> float:
    """Inches that a drawable text of this size in points takes on one line."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=list(_families(FALLBACKS)), size=size)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / _POINTS


def wrap(passage: Passage, room: float, size: float, lines: int) -> list[Passage]:
    """The passage in lines of at most `room` inches, cut with an ellipsis after so many lines.

    Lines end at spaces and beside characters of East Asian scripts, which have none; a longer word is broken.
    """
    most = lines * (int(4 * room * _POINTS / size) + 2)  # even the narrowest letters: no more than this is looked at
    text, marked = _flat(passage, most)
    broken: list[Passage] = []
    start = 0
    while start < len(text):
        end = _line_end(text, start, room, size)
        if len(broken) == lines - 1 and text[end:].strip():
            end = _line_end(text, start, room - _HINTED * width(ELLIPSIS, size), size)
            return [*broken, (*_runs(text[start:end].rstrip(), marked[start:]), (ELLIPSIS, False))]
        broken.append(_runs(text[start:end].rstrip(), marked[start:]))
        start = end + len(text[end:]) - len(text[end:].lstrip())
    return broken


def wrapped(text: str, room: float, size: float, lines: int) -> str:
    """A plain text, wrapped as `wrap` does."""
    return "\n".join(joined(line) for line in wrap(((text, False),), room, size, lines))


def joined(passage: Passage) -> str:
    return "".join(text for text, _ in passage)


def right_to_left(text: str) -> bool:
    """Whether the first letter with a direction, as Unicode has it, belongs to a script that runs to the left."""
    directions = (unicodedata.bidirectional(character) for character in text)
    return next((direction for direction in directions if direction in ("L", "R", "AL")), "L") != "L"


def _flat(passage: Passage, most: int) -> tuple[str, list[bool]]:
    """The passage's first `most` characters, whether each is highlighted; runs of spaces are one, a cut is shown."""
    text: list[str] = []
    marked: list[bool] = []
    for piece, highlighted in passage:
        for character in drawable(piece[: most - len(text)]):
            if character == " " and (not text or text[-1] == " "):
                continue
            text.append(character)
            marked.append(highlighted)
    if sum(len(piece) for piece, _ in passage) > most:
        text.append(ELLIPSIS)
        marked.append(False)
    return "".join(text).rstrip(), marked


def _line_end(text: str, start: int, room: float, size: float) -> int:
    """Where the line that begins at `start` ends: at least one character after it."""
    taken, end = 0.0, start
    while end < len(text):
        taken += _HINTED * width(text[end], size)
        if taken > room and text[end] != " ":
            break
        end += 1
    if end == len(text):
        return end
    for place in range(end, start, -1):
        if text[place - 1] == " " or _wide(text[place - 1]) or _wide(text[place]):
            return place
    return max(end, start + 1)


def _runs(text: str, marked: list[bool]) -> Passage:
    pairs = groupby(zip(text, marked), key=lambda pair: pair[1])
    return tuple(("".join(character for character, _ in run), highlighted) for highlighted, run in pairs)


def _wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in ("W", "F")


def _stand_in(character: str) -> str:
    return "" if unicodedata.category(character) in ("Cc", "Cf", "Mn", "Me") else MISSING


@lru_cache(maxsize=4)
def _families(fallbacks: tuple[str, ...]) -> tuple[str, ...]:
    """matplotlib's own family, then those of `fallbacks` that are installed: it complains about others."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return (OWN, *(family for family in fallbacks if family in installed))


@lru_cache(maxsize=4)
def _characters(fallbacks: tuple[str, ...]) -> frozenset[int]:
    """The code points that one of the fonts can draw."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    files = (findfont(FontProperties(family=[family])) for family in _families(fallbacks))
    return frozenset(code for file in files for code in get_font(file).get_charmap())
