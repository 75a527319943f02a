"""Numbers, durations and names for people; the words of texts, and which of them texts share."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import groupby

Passage = tuple[tuple[str, bool], ...]
"""A text in pieces, each with whether it is highlighted; joined they are the text."""

SHOWN = 700  # characters of a caption that are shown
_STOP_WORDS = """
a about above along also an and are as at be been behind below beneath but by can from has have he her his i in into is
it its just near next no not of off on one or other others out over she so some than that the their them there these
they this those through to under up very was we were which while who with you
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""English words that any two captions share, whatever they are about."""

# Thai, Lao, Burmese, Khmer, kana and ideographs: scripts without spaces between words.
_UNSPACED = (
    "\u0e01-\u0eff\u1000-\u1049\u1050-\u109f\u1780-\u17d3\u3005-\u3007\u3041-\u30fa\u30fc-\u30ff\u3400-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
# Accents, and vowel signs of Arabic and Indian scripts, are parts of words that \w does not match.
_LETTER = rf"(?:(?![{_UNSPACED}])[\w\u0300-\u036f\u064b-\u065f\u0900-\u0963\u0966-\u0dff])"
_WORD = re.compile(rf"(?P<unspaced>[{_UNSPACED}]+)|{_LETTER}+(?:['’-]{_LETTER}+)*")
# Control characters, line ends, halves of surrogate pairs, and what changes the direction of the text around it.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "record"), counted(1200, "record")
    ('1 record', '1,200 records')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A duration in one or two units.

    >>> duration(40), duration(700), duration(12_000)
    ('40 s', '12 min', '3 h 20 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def readable_size(count: int) -> str:
    """A number of bytes in a decimal unit.

    >>> readable_size(40), readable_size(1_530_000), readable_size(120_000_000_000)
    ('40 B', '1.5 MB', '120 GB')
    """
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}" if size < 9.95 and units[0] != "B" else f"{size:.0f} {units[0]}"


def parse_share(text: str) -> tuple[int, int]:
    """K − 1 and N of a share spelled K/N: the K-th of N parts of some work.

    >>> parse_share("1/4"), parse_share("4/4")
    ((0, 4), (3, 4))
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"a share of the work is K/N with K from 1 to N, for example 1/4, 2/4, 3/4, 4/4; got {text!r}")
    return int(number) - 1, int(count)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The end of a message about an unknown name.

    >>> did_you_mean("gama", ["gamma", "lr"]), did_you_mean("x", ["gamma"])
    ("; did you mean 'gamma'?", '')
    """
    close = get_close_matches(name, list(choices), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def slugify(*names: str) -> str:
    """Names joined into a file name, of which the last 60 characters are kept.

    >>> slugify("convergence", "scenes/park")
    'convergence-scenes-park'
    """
    plain = ("".join(letter if letter.isalnum() else "-" for letter in name).strip("-") for name in names)
    return "-".join(plain)[-60:].strip("-")


def word_spans(text: str) -> Iterator[tuple[int, int, bool]]:
    """Start and end of each word, and whether its script puts spaces between words; where it does not, of each run of
    letters.

    >>> [("A dog's mid-sized ball."[start:stop]) for start, stop, _ in word_spans("A dog's mid-sized ball.")]
    ['A', "dog's", 'mid-sized', 'ball']
    """
    for match in _WORD.finditer(text):
        yield *match.span(), match["unspaced"] is None


def comparison_key(word: str) -> str:
    """What a word is compared by: without case and 's.

    >>> comparison_key("Dog’s")
    'dog'
    """
    return unicodedata.normalize("NFC", word.casefold()).replace("’", "'").removesuffix("'s")


def highlight_shared(query: str, *others: str) -> tuple[Passage, ...]:
    """All texts, shortened: in the query those content words are highlighted that any other text has, in the others
    those of the query. In scripts without spaces two characters in a row are compared instead of words."""
    query, *rest = map(shorten, (query, *others))
    content = _content(query)
    shared = {word for text in rest for word in _content(text)}
    return _highlight(query, content & shared), *(_highlight(text, content) for text in rest)


def highlight_different(*texts: str, limit: int = SHOWN) -> tuple[Passage, ...]:
    """All texts, shortened to `limit`: in each those content words are highlighted that no other text has, beyond the
    limit neither."""
    content = [_content(text) for text in texts] if len(texts) > 1 else [set()]
    alone = [own.difference(*content[:row], *content[row + 1 :]) for row, own in enumerate(content)]
    return tuple(_highlight(shorten(text, limit), words) for text, words in zip(texts, alone))


def shorten(text: str, limit: int = SHOWN) -> str:
    """At most `limit` characters of a text, cut between words with an ellipsis; unprintable characters are spaces.

    >>> shorten("an apple and a pear", 9)
    'an apple…'
    """
    start = text[:limit]  # the rest is not read: a caption may have megabytes
    if len(text) > limit:
        start = start[: limit - 1]
        space = start.rfind(" ")
        # A long word, or a script without spaces, is cut anywhere.
        start = (start[:space] if space > 0.9 * limit else start) + "…"
    return _UNPRINTABLE.sub(" ", start)


def _words(text: str) -> Iterator[tuple[int, int, str]]:
    """Start and end of what is compared, and its key."""
    for start, stop, spaced in word_spans(text):
        if spaced:
            yield start, stop, comparison_key(text[start:stop])
            continue
        for first in range(start, max(start + 1, stop - 1)):
            last = min(first + 2, stop)
            yield first, last, comparison_key(text[first:last])


def _content(text: str) -> set[str]:
    return {word for _, _, word in _words(text)} - STOP_WORDS


def _highlight(text: str, words: set[str]) -> Passage:
    marked = [False] * len(text)
    for start, stop, word in _words(text):
        if word in words:
            marked[start:stop] = [True] * (stop - start)
    pieces = groupby(zip(text, marked), key=lambda pair: pair[1])
    return tuple(("".join(letter for letter, _ in piece), flag) for flag, piece in pieces)
