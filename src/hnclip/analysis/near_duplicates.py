"""Captions beside the captions nearest to them, with the words that they share: what near-duplicates look like."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby

import torch
from PIL.Image import Image
from torch import Tensor

from hnclip.analysis.caption_pairs import CaptionPairs, caption_pairs
from hnclip.analysis.false_negatives import Suspect
from hnclip.analysis.geometry import CaptionGeometry
from hnclip.analysis.shown import CompanionRow, Passage, Shown

LIMIT, NAME = 700, 60
"""Characters of a caption and of a record's name that are shown."""

_STOP_WORDS = """
a about above along also an and are as at be been behind below beneath but by can from has have he her his i in into is
it its just near next no not of off on one or other others out over she so some than that the their them there these
they this those through to under up very was we were which while who with you
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""English words that any two captions share, whatever they are about."""

# Scripts that put no spaces between words, as ranges of code points, and how many characters in a row are compared
# instead of words: a pair of ideographs or kana says as much as four letters.
_UNSPACED = (
    (0x3005, 0x3007, 2),  # ideographic iteration mark and zero
    (0x3040, 0x30FF, 2),  # Hiragana, Katakana
    (0x31F0, 0x31FF, 2),
    (0x3400, 0x9FFF, 2),  # Han
    (0xF900, 0xFAFF, 2),
    (0xFF66, 0xFF9F, 2),
    (0x20000, 0x3FFFF, 2),
    (0x0E00, 0x0EFF, 4),  # Thai, Lao
    (0x1000, 0x109F, 4),  # Myanmar
    (0x1780, 0x17FF, 4),  # Khmer
)
WORD = 0  # kind of the characters of words between spaces; that of unspaced scripts is the length compared
_APOSTROPHES = "'’"
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def near_duplicate_rows(
    text: Tensor,
    owner: Tensor,
    captions: Sequence[str],
    geometry: CaptionGeometry,
    *,
    quantile: float = 0.9,
    rows: int = 4,
    companions: int = 3,
    names: Sequence[str],
    picture: Callable[[int], Image | None],
) -> list[CompanionRow]:
    """Captions whose hardest companion is about as similar as this quantile of all says, with their nearest companions.

    The paper's 0.9 is striking but not extreme; 1 gives the most similar pairs of all. No picture is a query twice,
    and no two rows show the same query and hardest companion the other way round. Companions in a row are of different
    pictures, each with its nearest caption. In the query those words are highlighted that any of them shares.

    Args:
        text, owner: as of `caption_geometry`, which gave `geometry`.
        captions: the texts of all captions.
        rows: the highest number of queries.
        companions: the highest number of companions of each.
        names: what to call each record, so that it is found again in the data.
        picture: gives the picture of a record, or None if it cannot be shown.

    Shape:
        text [T, D]; owner [T]; T captions.

    Reference:
        HN-CLIP, appendix A, figures "Near-duplicate caption pairs".
    """
    pairs = caption_pairs(text, owner)
    if not len(captions) == len(pairs) == geometry.captions:
        raise ValueError(
            f"text ({len(pairs)}), captions ({len(captions)}) and geometry ({geometry.captions}) must be of the same "
            "captions"
        )
    records = owner.tolist()
    return [
        _row(row, list(_nearest(pairs, records, row, companions)), records, captions, names, picture)
        for row in _queries(geometry, records, quantile, rows)
    ]


def pair_rows(
    suspects: Iterable[Suspect],
    owner: Tensor,
    captions: Sequence[str],
    *,
    names: Sequence[str],
    picture: Callable[[int], Image | None],
) -> list[CompanionRow]:
    """Suspected false negatives, each a caption with one companion; arguments as of `near_duplicate_rows`."""
    records = owner.tolist()
    return [_row(pair.first, [(pair.second, pair.similarity)], records, captions, names, picture) for pair in suspects]


def highlight_shared(query: str, *others: str, limit: int = LIMIT) -> tuple[Passage, ...]:
    """All texts as they are shown (`shorten`), the query first: in it those content words are highlighted that any of
    the others shares, in each of them those of the query.

    Upper and lower case are the same, stop words are no content, and 's is no part of a word. In scripts without spaces
    a character is highlighted if it and its neighbours, two or four in all, are also in the other text.
    """
    query, *rest = (shorten(text, limit) for text in (query, *others))
    content = _content(query)
    shared = {word for text in rest for word in _content(text)}
    return _highlight(query, content & shared), *(_highlight(text, content) for text in rest)


def highlight_different(*texts: str, limit: int = LIMIT) -> tuple[Passage, ...]:
    """All texts as they are shown (`shorten`): in each those content words are highlighted that none of the others has.

    What is compared are the whole texts, so a word that another text only has beyond the limit is no difference. A
    single text differs from nothing.
    """
    content = [_content(text) for text in texts]
    alone = [
        own.difference(*content[:place], *content[place + 1 :]) if len(texts) > 1 else set[str]()
        for place, own in enumerate(content)
    ]
    return tuple(_highlight(shorten(text, limit), words) for text, words in zip(texts, alone))


def shorten(text: str, limit: int = LIMIT) -> str:
    """At most `limit` characters of a text, cut between words with an ellipsis; what cannot be printed is a space.

    The rest of the text is never looked at.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    start = text[:limit]
    if len(text) > limit:
        start = start[: limit - 1]
        space = start.rfind(" ")
        # A long word, or a script without spaces, is cut anywhere.
        start = (start[:space] if space > 0.9 * limit else start) + "…"
    return "".join(" " if _unprintable(character) else character for character in start)


@lru_cache(2**16)
def _unprintable(character: str) -> bool:
    """Control characters, line ends, halves of surrogate pairs, and what turns the direction of the text around it."""
    return unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs") or character in _DIRECTIONS


def _row(
    row: int,
    nearest: Sequence[tuple[int, float]],
    records: Sequence[int],
    captions: Sequence[str],
    names: Sequence[str],
    picture: Callable[[int], Image | None],
) -> CompanionRow:
    query, *others = highlight_shared(captions[row], *(captions[other] for other, _ in nearest))
    return CompanionRow(
        Shown(shorten(names[records[row]], NAME), query, picture(records[row])),
        tuple(
            Shown(
                f"cosine {cosine:.3f}: {shorten(names[records[other]], NAME)}",
                text,
                picture(records[other]),
            )
            for (other, cosine), text in zip(nearest, others)
        ),
    )


def _queries(geometry: CaptionGeometry, records: Sequence[int], quantile: float, limit: int) -> list[int]:
    """Rows whose hardest companion is nearest in similarity to the quantile, the nearest first."""
    distance = (geometry.similarity - geometry.hardest.quantile(quantile)).abs()  # [S]
    found: list[int] = []
    asked: set[int] = set()
    met: set[frozenset[int]] = set()
    for place in distance.argsort(stable=True).tolist():
        if len(found) >= limit:
            break
        row, companion = int(geometry.rows[place]), int(geometry.nearest[place])
        pair = frozenset((records[row], records[companion]))
        if records[row] not in asked and pair not in met:
            found.append(row)
            asked.add(records[row])
            met.add(pair)
    return found


def _nearest(pairs: CaptionPairs, records: Sequence[int], row: int, limit: int) -> Iterator[tuple[int, float]]:
    """The rows and cosines of the nearest captions of `limit` other pictures."""
    similarity = pairs.similarities(torch.tensor([row], device=pairs.text.device), slice(None))[0]  # [T]
    seen: set[int] = set()
    for other in similarity.argsort(descending=True, stable=True).tolist():
        if len(seen) >= limit or similarity[other] == -torch.inf:  # its own picture's captions come last
            return
        if records[other] not in seen:
            seen.add(records[other])
            yield other, float(similarity[other])


def _highlight(text: str, shared: set[str]) -> Passage:
    marked = [False] * len(text)
    for start, end, word in _words(text):
        if word in shared:
            marked[start:end] = [True] * (end - start)
    pieces = groupby(zip(text, marked), key=lambda pair: pair[1])
    return tuple(("".join(character for character, _ in piece), flag) for flag, piece in pieces)


def _content(text: str) -> set[str]:
    return {word for _, _, word in _words(text)} - STOP_WORDS


def _words(text: str) -> Iterator[tuple[int, int, str]]:
    """Where each word begins and ends, and what it is compared by."""
    for start, end, kind in letter_runs(text, _APOSTROPHES):
        if kind == WORD:
            yield start, end, compared(text[start:end])
        elif kind is not None:
            for first in range(start, max(start + 1, end - kind + 1)):
                last = min(first + kind, end)
                yield first, last, compared(text[first:last])


def letter_runs(text: str, joiners: str) -> Iterator[tuple[int, int, int | None]]:
    """Where each run of characters of one `letter_kind` begins and ends, and its kind; all of the text is in one.

    Args:
        joiners: characters that are part of a word which has letters on both sides of them.
    """
    kinds = [letter_kind(character) for character in text]
    for place in range(1, len(text) - 1):
        if text[place] in joiners and kinds[place - 1] == kinds[place + 1] == WORD:
            kinds[place] = WORD
    start = 0
    for kind, run in groupby(kinds):
        end = start + len(list(run))
        yield start, end, kind
        start = end


@lru_cache(2**16)  # of each character there are many
def letter_kind(character: str) -> int | None:
    """`WORD` for characters of words between spaces, the length that is compared for those of scripts without spaces,
    None between words. Marks are letters here: without its vowel signs a Hindi word falls into pieces."""
    if unicodedata.category(character)[0] not in "LNM":
        return None
    code = ord(character)
    return next((length for low, high, length in _UNSPACED if low <= code <= high), WORD)


def compared(word: str) -> str:
    """What a word is compared by: case does not matter, and 's is no part of it."""
    key = unicodedata.normalize("NFC", word.casefold()).replace("’", "'")
    return key.removesuffix("'s")
