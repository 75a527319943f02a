"""Captions that share nearly all their wording: an exact join of sets of word shingles.

A caption is the set of its runs of three words, with two empty words before and behind it, so that a word counts the
same wherever it stands. Two captions are alike when the Jaccard similarity of their sets, the shingles they share over
those they hold together, reaches a threshold t. Let n ≤ m be the sizes of two that are alike. Then they share at least
s = t/(1 + t)·(n + m), which is at least 2t/(1 + t)·n and at least t·m. Three bounds follow, so no pair is missed:

- Prefix: put the shingles of all captions into one order, rare ones first. The first one that both hold is at most
  number n - s of the one and number m - s of the other, counted from 0. Captions are filed under these few, and rare
  shingles are shared by few captions.
- Position: if it is number i of the one and j of the other, they share at most n - i and m - j.
- Histogram: they differ in n + m - 2s shingles at most, so do the histograms that count them in a few bins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hnclip.data.check.linking import Linked, link

# Scripts without spaces between words (kana, Han) are read letter by letter.
_LETTER = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_LETTER}]|[^\W{_LETTER}]+")
_WORD_BITS = 21  # three numbers in 63 bits; only beyond two million different words do some share a number
_BIN_BITS = 5  # of the histograms
_RARITY_BITS = 24  # of the table that counts shingles; two that share a place there count as more frequent
_MOST = 2**15 - 1  # counts of a bin in 16 bits
_SLACK = 1e-6  # so that rounding never makes a bound stricter than it is


@dataclass(frozen=True)
class ShingleSets:
    """The shingles of N captions: those of caption i are shingles[starts[i]:starts[i + 1]], ascending.

    Shape:
        shingles [S] int64, starts [N + 1]
    """

    shingles: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.shingles[self.starts[index] : self.starts[index + 1]]

    @cached_property
    def sizes(self) -> np.ndarray:
        return np.diff(self.starts)  # [N]

    @cached_property
    def places(self) -> np.ndarray:
        """[S] int32: a well-mixed number of each shingle, for tables and bins."""
        mixed = self.shingles.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ over the golden ratio
        return (mixed >> np.uint64(64 - _RARITY_BITS)).astype(np.int32)


@dataclass(frozen=True)
class _Filed:
    """Captions under their rarest shingles: entries by shingle, under one shingle by the caption's size.

    Shape:
        all [E]: the caption, the shingle, the caption's shingles from this one on, and whether a caption can be the
        smaller one of a pair whose first common shingle is this
    """

    captions: np.ndarray
    shingles: np.ndarray
    rest: np.ndarray
    leads: np.ndarray


def similar_texts(texts: Sequence[str], threshold: float) -> Linked:
    """Groups of texts that are connected by pairs whose Jaccard similarity is at least `threshold`."""
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be above 0 and at most 1, got {threshold}")
    if not texts:
        return Linked([], complete=True)
    sets = shingle_sets(texts)
    filed = _file(sets, threshold)
    histograms = _histograms(sets)
    held = sets.sizes[filed.captions]  # [E]
    least = threshold / (1 + threshold)

    def alike(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        rest = np.minimum(filed.rest[left], filed.rest[right])
        found = rest >= least * (held[left] + held[right]) - _SLACK  # [P]
        found[found] = compare(filed.captions[left[found]], filed.captions[right[found]])
        return found

    def compare(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        pairs, where = np.unique(one * len(texts) + other, return_inverse=True)  # two share more than one shingle
        one, other = np.divmod(pairs, len(texts))
        together = sets.sizes[one] + sets.sizes[other]
        apart = np.abs(histograms[one] - histograms[other]).sum(1)
        found = apart <= together - 2 * least * together + _SLACK
        for pair in np.flatnonzero(found).tolist():
            found[pair] = jaccard(sets[one[pair]], sets[other[pair]]) >= threshold
        return found[where]

    return link(len(texts), filed.captions, filed.shingles, alike, filed.leads)


def shingle_sets(texts: Sequence[str]) -> ShingleSets:
    """Runs of three words; case and punctuation do not count. A text without words has none."""
    numbers: dict[str, int] = {}
    most = (1 << _WORD_BITS) - 1
    sets = [np.zeros(0, np.int64)]
    for text in texts:
        words = [numbers.setdefault(word, len(numbers) % most + 1) for word in _WORD.findall(text.casefold())]
        padded = np.array([0, 0, *words, 0, 0])
        runs = (padded[:-2] << 2 * _WORD_BITS) | (padded[1:-1] << _WORD_BITS) | padded[2:]
        sets.append(np.unique(runs) if words else sets[0])
    return ShingleSets(np.concatenate(sets), np.cumsum([len(found) for found in sets]))


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """What two ascending sets share over what they hold together."""
    place = np.searchsorted(other, one)
    place[place == len(other)] = 0
    shared = int(np.count_nonzero(other[place] == one))
    return shared / (len(one) + len(other) - shared)


def _file(sets: ShingleSets, threshold: float) -> _Filed:
    frequency = np.bincount(sets.places)
    captions, shingles, rest, leads = [], [], [], []
    for caption in np.argsort(sets.sizes, kind="stable").tolist():
        found = sets[caption]
        size = len(found)
        counts = frequency[sets.places[sets.starts[caption] : sets.starts[caption + 1]]]
        order = np.lexsort((found, counts))[: int(size - threshold * size + _SLACK) + 1]
        number = np.flatnonzero(counts[order] > 1)  # nobody shares what a caption has alone
        captions.append(np.full(len(number), caption))
        shingles.append(found[order[number]])
        rest.append(size - number)
        leads.append(number <= size - 2 * threshold / (1 + threshold) * size + _SLACK)
    order = np.argsort(np.concatenate(shingles), kind="stable")
    return _Filed(*(np.concatenate(column)[order] for column in (captions, shingles, rest, leads)))


def _histograms(sets: ShingleSets) -> np.ndarray:
    """[N, bins] int16: how many shingles of each caption fall into each bin."""
    bins = 1 << _BIN_BITS
    counts = np.empty((len(sets), bins), np.int16)
    for caption in range(len(sets)):
        places = sets.places[sets.starts[caption] : sets.starts[caption + 1]]
        # Cutting the counts off only makes histograms more alike, and the bound stays true.
        counts[caption] = np.minimum(np.bincount(places & (bins - 1), minlength=bins), _MOST)
    return counts
