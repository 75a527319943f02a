"""Captions into sentences, as spans of characters: with care, or at every dot as the released code does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, get_args

Splitting = Literal["careful", "dots"]
SPLITTERS: tuple[str, ...] = get_args(Splitting)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Abbreviations without their dots, in small letters. These always have something to follow:
_LEADS_ON = _words(
    "mr mrs ms messrs dr prof rev hon gen col capt lt sgt maj sen gov pres mt vs eg ie approx ca cf viz incl excl esp "
    "est misc"
)
_BEFORE_NUMBER = _words("no nos nr fig figs vol ch pp p pg art")  # "No. 5", but "She says no."
_AFTER_NUMBER = _words("ft in oz lb lbs cm mm km kg mi hr hrs min mins sec sq yd yds")  # "6 ft. tall"
# These may end a sentence. Before a capital they do:
_ENDS_BEFORE_CAPITAL = _words("etc al am pm bc ad")
# … and these only before a word that often begins a sentence: "Main St. The", but "St. Louis", "U.S. Army".
_ENDS_BEFORE_STARTER = _words("st ave blvd rd ln hwy inc ltd co corp bros jr sr dept apt")
_STARTERS = _words(
    "a above across after all also an and another around as at atop away because before behind below beneath beside "
    "between beyond both but by directly down due during each every everything farther few for from further he her "
    "here his however if in inside it its just many more most near next no nothing on one only other our outside over "
    "part several she since slightly so some surrounding the their there these they this those three through to "
    "toward towards two under underneath up upon visible we what when where which while with within you"
)
_ENDINGS = _words("com org net edu uk jpg jpeg png")  # "example. com": a space too many

_OPENERS = "\"'“‘«([{「『（*"
# A stop with what closes after it, a stop of a script without spaces, or the end of a line. No part of a match is ever
# given back, so that a megabyte of dots takes no longer than one of words.
_STOP = re.compile(r"""([.!?…]+)["'”’»)\]}*]*|[。！？｡]+["'”’»」』）)]*|\n\s*""")
_WORD_BEFORE = re.compile(r"[^\W_]+(?:[.'’-][^\W_]+)*\Z")
_WORD_AFTER = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_GLUED = re.compile(r"[A-Z](?:[a-z]|\s)")  # "the left.A man": the space was forgotten
_ADDRESS = re.compile(r"://|www\.|[@/\\_]")
_LONGEST = 40  # characters of a word that are looked at


def sentence_spans(text: str, how: Splitting = "careful") -> list[tuple[int, int]]:
    """Where the sentences of a caption are: [start, stop) in characters, in order, without white space around them.

    Args:
        how: "careful" knows decimals, abbreviations, initials, ellipses, names of files, quotes, brackets, lines and
            the stops of Chinese and Japanese; a sentence keeps its stop, and what holds no word stays with the sentence
            before. "dots" ends a sentence at every dot and leaves the dot out, which breaks "3.5 m" and "e.g.".

    Reference:
        GOAL's released code splits at dots (`caption.split('.')`, stripped, empty pieces dropped).
    """
    if how == "careful":
        return list(_careful(text))
    if how == "dots":
        return [span for match in re.finditer(r"[^.]+", text) if (span := _stripped(text, *match.span()))]
    raise ValueError(f"sentences are split by one of {', '.join(SPLITTERS)}, not {how!r}")


def split_sentences(text: str, how: Splitting = "careful") -> list[str]:
    """The sentences of a caption as they stand there; see `sentence_spans`."""
    return [text[start:stop] for start, stop in sentence_spans(text, how)]


def first_sentence(text: str) -> str:
    """The short caption of a long one: all before the first dot with a space after it, without the dot.

    Reference:
        Long-CLIP's released trainer cuts at ". ", after lines were joined by spaces.
    """
    return text.replace("\n", " ").split(". ")[0].strip() or text.strip()


def _careful(text: str) -> Iterator[tuple[int, int]]:
    """Spans between the stops that end a sentence. A piece without a word joins the one before it."""
    held: tuple[int, int] | None = None
    for start, stop in _pieces(text):
        span = _stripped(text, start, stop)
        if span is None:
            continue
        if held is None:
            held = span
        elif _has_word(text, *span) and _has_word(text, *held):
            yield held
            held = span
        else:
            held = held[0], span[1]
    if held is not None:
        yield held


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for stop in _STOP.finditer(text):
        if _ends(text, start, stop):
            yield start, stop.end()
            start = stop.end()
    yield start, len(text)


def _ends(text: str, start: int, stop: re.Match[str]) -> bool:
    """Whether a sentence that began at `start` ends with this stop."""
    after = stop.end()
    marks = stop[1]
    if marks is None:
        # A line that goes on in small letters was only wrapped; an empty line is always an end.
        return "\n" not in stop[0] or stop[0].count("\n") > 1 or not text[after : after + 1].islower()
    if after == len(text):
        return True
    if not text[after].isspace():
        return marks == "." and stop[0] == "." and _glued(text, stop.start(), after)
    follower = _next_word(text, after)
    begins_small = follower[:1].islower()
    if marks != ".":
        return not begins_small
    if begins_small and stop[0] != ".":  # '… reads "No parking." in red'
        return False
    before = _word_before(text, stop.start())
    if before.isdigit() and _is_only_word(text, start, stop.start(), before):  # "1. A dog": the number of a list
        return False
    return _ends_after(before, follower, text, stop.start())


def _ends_after(before: str, follower: str, text: str, dot: int) -> bool:
    """Whether a dot after this word, before that one, ends a sentence."""
    if follower in _ENDINGS:
        return False
    name = before.replace(".", "").lower()
    starter = follower[:1].isupper() and follower.lower() in _STARTERS
    number_before = text[max(0, dot - len(before) - 2) : dot - len(before)].strip()[-1:].isdigit()
    if name in _AFTER_NUMBER and number_before:
        return not follower[:1].islower()
    if name in _BEFORE_NUMBER and follower[:1].isdigit():
        return False
    if name in _LEADS_ON:
        return False
    if name in _ENDS_BEFORE_CAPITAL and ("." in before or name in ("etc", "al")):
        return not follower[:1].islower()
    capital = before[:1].isupper()
    if (name in _ENDS_BEFORE_STARTER and capital) or "." in before:
        return starter or not follower
    if len(before) == 1 and capital and before != "I":  # "John F. Kennedy", but "the letter C. Below"
        return starter or not follower[:1].isupper()
    return True


def _glued(text: str, dot: int, after: int) -> bool:
    """Whether a dot without a space after it is a stop all the same."""
    if not _GLUED.match(text, after):
        return False
    before = _word_before(text, dot)
    around = text[max(0, dot - _LONGEST) : after + _LONGEST]
    left = around[: min(dot, _LONGEST)].split(" ")[-1]
    right = around[min(dot, _LONGEST) + 1 :].split(" ")[0]
    return (
        len(before) > 1
        and before.replace("'", "").replace("-", "").isalnum()
        and (before[-1].islower() or before[-1].isdigit())
        and not _ADDRESS.search(left + right)
        and not re.search(r"\.\w", right)
    )


def _word_before(text: str, stop: int) -> str:
    found = _WORD_BEFORE.search(text[max(0, stop - _LONGEST) : stop])
    return found[0] if found else ""


def _next_word(text: str, start: int) -> str:
    """The next word, brackets and quotes passed over; "" if something else comes."""
    while start < len(text) and (text[start].isspace() or text[start] in _OPENERS):
        start += 1
    found = _WORD_AFTER.match(text, start, start + _LONGEST)
    return found[0] if found else ""


def _is_only_word(text: str, start: int, stop: int, word: str) -> bool:
    return len(word) < 3 and text[max(start, stop - _LONGEST) : stop].strip() == word


def _has_word(text: str, start: int, stop: int) -> bool:
    return any(text[place].isalnum() for place in range(start, stop))


def _stripped(text: str, start: int, stop: int) -> tuple[int, int] | None:
    """The span without white space at its ends; None if nothing is left."""
    while start < stop and text[start].isspace():
        start += 1
    while start < stop and text[stop - 1].isspace():
        stop -= 1
    return (start, stop) if start < stop else None
