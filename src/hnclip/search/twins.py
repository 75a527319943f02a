"""Near-twins among results, and what tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from hnclip.analysis.near_duplicates import STOP_WORDS, compared, highlight_different
from hnclip.report.document import Passage
from hnclip.search.explain import explain
from hnclip.search.find import CaptionHit, Finder, Hit
from hnclip.search.index.layout import Kind
from hnclip.search.index.reader import Index, Item

CLOSE = 0.8
SAMPLE = 1024  # rows that say how alike any two are
NARROWEST = 0.9  # mean cosine at most, so that 0.98 is always close: where all is alike, all are near-twins
FEW, NARROWEST_OF_FEW = 24, 0.5  # fewer rows say little of the model: two twins alone have the mean of a narrow cone
LETTERS = 2000  # of a caption that are shown
SEPARATORS = 8
LEAST_SPREAD = 0.001  # between scores that separate; the same picture in two files differs by rounding

_usual: WeakKeyDictionary[Index, dict[Kind, float]] = WeakKeyDictionary()


@dataclass(frozen=True)
class TwinCaption:
    """The caption of the result at `place`, counted from 0; words highlighted that no other member's has."""

    place: int
    item: Item
    passage: Passage


@dataclass(frozen=True)
class TwinGroup:
    """Results that are nearly the same to the model, best first.

    Args:
        items: the pictures; of captions that were found the first picture that each is said of.
        similarity: the smallest cosine of a member with the first one.
        captions: of those members that have one.
        places: of the members among the results, counted from 0.
    """

    items: tuple[Item, ...]
    similarity: float
    captions: tuple[TwinCaption, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Separator:
    """A word of a description, and its best patch's score in each of some pictures; `approximate` if a thumbnail stood
    in for one of them."""

    word: str
    scores: tuple[float, ...]
    approximate: bool = False


def twin_groups(finder: Finder, hits: Sequence[Hit | CaptionHit]) -> list[TwinGroup]:
    """Groups of two or more results that are near-twins, in the order of their best members.

    Pictures, or captions if these were found, are near-twins if (cos − m) / (1 − m) ≥ `CLOSE`, m being the mean cosine
    of any two of the index (`usual_cosine`): models differ in how alike all pictures are to them. Each group is made of
    what is near its best member, so members are never far from each other by way of others.
    """
    members = [found for place, hit in enumerate(hits) if (found := _member(place, hit)) is not None]
    if len(members) < 2:
        return []
    kind: Kind = "images" if isinstance(hits[0], Hit) else "captions"
    rows = np.array([member.row for member in members])  # [n]
    vectors = _unit(finder.index, kind, rows)  # [n, D]
    usual = usual_cosine(finder.index, kind)
    left, groups = list(range(len(members))), []
    while left:
        first = left[0]
        cosines = np.where(rows[left] == rows[first], 1.0, vectors[left] @ vectors[first])  # [left]
        near = cosines - usual >= CLOSE * (1 - usual)  # the first is near itself
        if near.sum() > 1:
            some = [members[place] for place, close in zip(left, near) if close]
            groups.append(_group(some, float(cosines[near].min())))
        left = [place for place, close in zip(left, near) if not close]
    return groups


def separators(finder: Finder, text: str, items: Sequence[Item]) -> list[Separator]:
    """The words of a description that some pictures show most unequally, the most unequal first.

    Stop words are left out, and words that all of them show alike; of a word that is said more than once, the place
    counts where it separates best.
    """
    different = {item.row: item for item in items}  # files of the same content are looked at once
    if len(different) < 2:
        return []
    explained = dict(zip(different, explain(finder, text, list(different.values()))))
    approximate = any(explanation.approximate for explanation in explained.values())
    best: dict[str, Separator] = {}
    for matches in zip(*(explained[item.row].words for item in items)):
        word = compared(matches[0].text)
        found = Separator(matches[0].text, tuple(match.score for match in matches), approximate)
        if word not in STOP_WORDS and (word not in best or _spread(found) > _spread(best[word])):
            best[word] = found
    separating = [found for found in best.values() if _spread(found) >= LEAST_SPREAD]
    return sorted(separating, key=_spread, reverse=True)[:SEPARATORS]


def usual_cosine(index: Index, kind: Kind) -> float:
    """The mean cosine of two different rows of an index, over rows spread evenly through the living ones, but at most
    `NARROWEST`, and of few rows `NARROWEST_OF_FEW`; 0 of fewer than two."""
    known = _usual.setdefault(index, {})  # an open index is one version, for good
    if kind not in known:
        living = np.setdiff1d(np.arange(len(index.vectors(kind))), index.dead(kind))
        chosen = living[np.linspace(0, len(living) - 1, min(SAMPLE, len(living))).astype(np.int64)]
        count = len(chosen)
        if count < 2:
            return known.setdefault(kind, 0.0)
        total = _unit(index, kind, chosen).sum(axis=0)  # [D]; ‖Σx‖² is n ones and the cosines of all pairs, twice
        mean = float((total @ total - count) / (count * (count - 1)))
        known[kind] = min(mean, NARROWEST if count >= FEW else NARROWEST_OF_FEW)
    return known[kind]


@dataclass(frozen=True)
class _Member:
    """A result: its place, its row, the item that stands for it, and its caption, or nothing."""

    place: int
    row: int
    item: Item
    text: str


def _member(place: int, hit: Hit | CaptionHit) -> _Member | None:
    if isinstance(hit, Hit):
        return _Member(place, hit.item.row, hit.item, next(iter(hit.item.captions), ""))
    if not hit.caption.items:
        return None
    return _Member(place, hit.caption.row, hit.caption.items[0], hit.caption.text)


def _group(members: Sequence[_Member], similarity: float) -> TwinGroup:
    said = [member for member in members if member.text]
    passages = highlight_different(*(member.text for member in said), limit=LETTERS)
    return TwinGroup(
        items=tuple(member.item for member in members),
        similarity=similarity,
        captions=tuple(TwinCaption(member.place, member.item, passage) for member, passage in zip(said, passages)),
        places=tuple(member.place for member in members),
    )


def _unit(index: Index, kind: Kind, rows: np.ndarray) -> np.ndarray:
    """Rows [n, D] at length 1, which bf16 and codes of 8 bits have changed."""
    vectors = index.vectors(kind).rows(rows).astype(np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _spread(separator: Separator) -> float:
    return max(separator.scores) - min(separator.scores)
