"""Sentences and chunks of captions as spans of tokens."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter

from hnclip.data.texts import TextTransform

Span = tuple[int, int]  # [start, stop)
NOTHING: Span = (0, 0)

CHUNKS = 64  # most chunks of a caption
WINDOW = 3  # words of a chunk in a clause of ordinary length
_CLAUSE = re.compile(r"[^.,;!?]+")
_WORD = re.compile(r"\b\w+\b")


def find_sentence(caption: str, sentence: str) -> int | None:
    """Where a sentence first stands in a caption, and is not the middle of words; None if it does not."""
    start = caption.find(sentence) if sentence else -1
    while start >= 0:
        before, after = caption[:start][-1:], caption[start + len(sentence) :][:1]
        if not (before.isalnum() and sentence[0].isalnum()) and not (after.isalnum() and sentence[-1].isalnum()):
            return start
        start = caption.find(sentence, start + 1)
    return None


def token_span(
    offsets: Sequence[Span], start: int, stop: int, transform: TextTransform, *, whole: bool = False
) -> Span:
    """The tokens of a text that hold any of its characters start … stop−1, as positions in its ids.

    Args:
        offsets: as `TextTransform.offsets` gives them.
        whole: what the context cuts is nothing, and not what is left of it.
    """
    before, after = transform.edges
    room = transform.context - before - after
    # Some tokenizers give a word the space before it, so a token need not lie inside to belong to a part.
    first = bisect_right(offsets, start, key=itemgetter(1))  # tokens that end before
    last = bisect_left(offsets, stop, key=itemgetter(0))  # and those that begin before the end
    if first >= last or first >= room or (whole and last > room):
        return NOTHING
    return before + first, before + min(last, room)


def late_span(before: str, sentence: str, transform: TextTransform, *, found: bool) -> Span:
    """The tokens of a sentence as GOAL's released code counts them: after those of the text before it including its
    special tokens, so one late where there is a start and an end token; the last position of the context is left out.

    A sentence that starts beyond the context takes as many positions before that last one. An empty span, and a
    sentence that is not in the caption, where the released code fails, take the first positions after the start token.

    Args:
        before: the caption up to the sentence.
    """
    special, last = sum(transform.edges), transform.context - 1
    counts = [len(ids) for ids in transform.tokenizer([before, sentence], verbose=False)["input_ids"]]
    start, length = counts[0], max(1, counts[1] - special)
    if start > last:
        start, stop = max(1, last - length), last
    else:
        stop = min(start + length, last)
    return (start, stop) if found and start < stop else (1, min(1 + length, transform.context))


def chunk_windows(text: str) -> Iterator[Span]:
    """Where the chunks of a text are, in characters: windows of a few words that slide through each clause, word by
    word. Longer clauses have longer windows; a clause of one word has none. At most 64.

    Reference:
        StructXLIP's spans: clauses end at [.,;!?]; 2 words of a clause of up to 4, 3 up to 10, 4 up to 20, 5 up to 40,
        then 6.
    """
    return islice(_windows(text), CHUNKS)


def _windows(text: str) -> Iterator[Span]:
    for clause in _CLAUSE.finditer(text):
        words = [(clause.start() + word.start(), clause.start() + word.end()) for word in _WORD.finditer(clause[0])]
        window = _window(len(words))
        for first in range(len(words) - window + 1):
            yield words[first][0], words[first + window - 1][1]


def _window(words: int) -> int:
    if words <= 4:
        return 2
    return WINDOW + sum(words > limit for limit in (10, 20, 40))
