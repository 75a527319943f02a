"""Duplicates and near-duplicates among records, by their images and their captions.

A group of near-duplicates is connected by similar pairs. Captions are compared as sets of runs of three words (Jaccard
similarity), images by a fingerprint of 64 slow waves. Every similar pair is found, although only pairs that share a
rare run, or a part of the fingerprint, are compared.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hnclip.core import Problem, Record
from hnclip.data.images import ImageTransform

_IN_TWO_SPLITS = {"same image": "shared image", "same caption": "shared caption"}

MOST_CAPTIONS = 200_000  # more are not searched
MOST_CAPTION_PAIRS = 20_000_000  # a limit for captions that all share their runs: about a minute
MOST_IMAGE_PAIRS = 1_000_000_000

# Scripts without spaces between words (kana, Han) are read letter by letter.
_LETTER = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_LETTER}]|[^\W{_LETTER}]+")
_WORD_BITS = 21  # three words in 63 bits; only beyond two million different words do some share a number
_ROUNDING = 1e-9

SIDE = 32
THUMBNAIL = ImageTransform(SIDE, squash=True, resample="bilinear")
_FAINT = 0.25  # grey levels; the sign of a weaker wave is noise
_PLAIN = 16  # strong waves that an image needs; flat images and gradients have fewer, and all look the same
_CORRELATION = 0.96  # of 100 crops of 2 % 98 are above, other drawings on one background are below
_GREY = (0.299, 0.587, 0.114)
_STEPS = np.arange(SIDE)
_WAVES = np.cos(np.pi / SIDE * _STEPS[:, None] * (_STEPS + 0.5)) * 2**0.5 / SIDE  # [wave, pixel]
_SLOWEST = np.array(sorted(np.ndindex(SIDE, SIDE), key=lambda wave: (sum(wave), wave))[1:65])  # [64, 2]
_SPEED = _SLOWEST.sum(1)  # [64]


@dataclass(frozen=True)
class ImageInfo:
    """A valid image without its pixels: hash of its bytes, fingerprint (None: too plain), size when upright."""

    content: bytes
    fingerprint: bytes | None
    width: int
    height: int
    format: str
    mode: str
    rotated: bool

    @property
    def shortest(self) -> int:
        return min(self.width, self.height)

    @property
    def megapixels(self) -> float:
        return self.width * self.height / 1e6


@dataclass(frozen=True)
class DuplicateGroup:
    """Ids of records with equal or nearly equal images or captions, in the order of the data, and their declared
    splits. `example` is one of the captions."""

    kind: str
    ids: tuple[str, ...]
    splits: tuple[str, ...]
    example: str | None = None

    def to_problem(self) -> Problem:
        first, *others = self.ids
        text = "" if self.example is None else f"“{self.example[:50]}{'…' * (len(self.example) > 50)}” "
        more = f" and {len(others) - 2} more" if len(others) > 2 else ""
        splits = f" ({', '.join(self.splits)})" if len(self.splits) > 1 else ""
        return Problem(self.kind, first, f"{text}like {', '.join(others[:2])}{more}{splits}")


def find_duplicates(
    records: Sequence[Record], images: Mapping[str, ImageInfo], captions: Sequence[tuple[int, str]]
) -> tuple[list[DuplicateGroup], tuple[str, ...]]:
    """Records with the same or nearly the same image or caption, and the kinds of which there may be more.

    Records that name one image by one key are its captions, no duplicates, unless they are in two splits. Equal
    captions (but for case and white space) count if their images differ. Near-duplicates that the source declares
    itself, by one `group`, do not count.

    Args:
        images: valid ones by their key; others are known by their key alone.
        captions: valid ones, with the index of their record.
    """
    keys = [record.image.key for record in records]
    identity = [images[key].content if key in images else key for key in keys]
    by_image, by_text = defaultdict[bytes | str, list[int]](list), defaultdict[str, list[int]](list)
    for index, image in enumerate(identity):
        by_image[image].append(index)
    texts: dict[str, str] = {}
    for index, text in captions:
        normal = " ".join(text.split()).casefold()
        by_text[normal].append(index)
        texts.setdefault(normal, text)
    prints = {info.content: info.fingerprint for info in images.values() if info.fingerprint is not None}
    contents, normals = list(prints), list(texts)
    similar_images, all_images = near_duplicate_images(list(prints.values()))
    similar_texts, all_texts = near_duplicate_captions(normals)

    groups = [
        _group("same image", members, records) for members in by_image.values() if _differ(members, keys, records)
    ]
    for numbers in similar_images:
        members = [index for number in numbers for index in by_image[contents[number]]]
        groups += [_group("similar image", members, records)] if _undeclared(members, records) else []
    for normal, members in by_text.items():
        if len({identity[index] for index in members}) > 1:
            groups.append(_group("same caption", members, records, texts[normal]))
    for numbers in similar_texts:
        members = [index for number in numbers for index in by_text[normals[number]]]
        if len({identity[index] for index in members}) > 1 and _undeclared(members, records):
            groups.append(_group("similar caption", members, records, texts[normals[numbers[0]]]))
    groups.sort(key=lambda group: (len(group.splits) < 2, -len(group.ids)))  # leaks between splits, then large groups
    return groups, ("similar image",) * (not all_images) + ("similar caption",) * (not all_texts)


def _group(kind: str, members: Iterable[int], records: Sequence[Record], example: str | None = None) -> DuplicateGroup:
    found = [records[index] for index in sorted(set(members))]
    splits = tuple(dict.fromkeys(record.split for record in found if record.split is not None))
    kind = _IN_TWO_SPLITS.get(kind, kind) if len(splits) > 1 else kind
    return DuplicateGroup(kind, tuple(record.id for record in found), splits, example)


def _differ(members: Sequence[int], keys: Sequence[str], records: Sequence[Record]) -> bool:
    """Whether an image has two keys or is in two declared splits."""
    splits = {records[index].split for index in members} - {None}
    return len(splits) > 1 or len({keys[index] for index in members}) > 1


def _undeclared(members: Sequence[int], records: Sequence[Record]) -> bool:
    """Whether the source does not declare these records as near-duplicates."""
    names = {records[index].group for index in members}
    return len(names) > 1 or None in names


class _Groups:
    """Union-find: connected components of numbers from 0."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def find(self, number: int) -> int:
        while (above := self.parent[number]) != number:
            self.parent[number] = number = self.parent[above]
        return number

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.find(one), self.find(other)))
        self.parent[high] = low

    def lists(self) -> list[list[int]]:
        """Groups of two and more, in ascending order."""
        found = defaultdict(list)
        for number in range(len(self.parent)):
            found[self.find(number)].append(number)
        return [members for members in found.values() if len(members) > 1]


def near_duplicate_captions(texts: Sequence[str], threshold: float = 0.8) -> tuple[list[list[int]], bool]:
    """Groups of captions, and whether the search is complete: above 200,000 captions there is none.

    Args:
        threshold: least share of their runs of three words that two captions have in common, of all that they have.
            0.8 is up to four changed words in 120, or one in 25.

    Relations:
        Two sets that reach the threshold t share at least t·n of the n runs of each. In one order of all runs, rare
        ones first, they therefore share one of the first n - t·n + 1 (prefix filter).
    """
    if len(texts) > MOST_CAPTIONS:
        return [], False
    runs, common = _ranked_runs(texts)
    groups = _Groups(len(texts))
    index: dict[int, list[int]] = defaultdict(list)
    pairs = 0
    for number in sorted(range(len(texts)), key=lambda number: len(runs[number])):
        least = threshold * len(runs[number]) - _ROUNDING
        prefix = [run for run in runs[number][: len(runs[number]) - math.ceil(least) + 1].tolist() if run >= common]
        pairs += sum(len(index[run]) for run in prefix)
        if pairs > MOST_CAPTION_PAIRS:
            return groups.lists(), False
        candidates = {other for run in prefix for other in index[run] if len(runs[other]) >= least}
        own = set(runs[number].tolist()) if candidates else set()
        for other in candidates:
            if groups.find(other) != groups.find(number):
                shared = len(own.intersection(runs[other].tolist()))
                if shared / (len(own) + len(runs[other]) - shared) >= threshold:
                    groups.join(other, number)
        for run in prefix:
            index[run].append(number)
    return groups.lists(), True


def _ranked_runs(texts: Sequence[str]) -> tuple[list[np.ndarray], int]:
    """The runs of three words of each text as ascending numbers, rare runs first, and the first number of a run that
    several texts have. Case and punctuation do not count. Two empty words stand before and after a text, so that every
    word is in three runs."""
    numbers: dict[str, int] = {}
    most = (1 << _WORD_BITS) - 1
    sets = []
    for text in texts:
        words = [numbers.setdefault(word, len(numbers) % most + 1) for word in _WORD.findall(text.casefold())]
        padded = np.array([0, 0, *words, 0, 0] if words else [0, 0], np.int64)
        sets.append(np.unique((padded[:-2] << 2 * _WORD_BITS) | (padded[1:-1] << _WORD_BITS) | padded[2:]))
    flat = np.concatenate([np.zeros(0, np.int64), *sets])
    _, inverse, counts = np.unique(flat, return_inverse=True, return_counts=True)
    rank = np.empty(len(counts), np.int64)
    rank[np.argsort(counts, kind="stable")] = np.arange(len(counts))
    ranked = np.split(rank[inverse], np.cumsum([len(runs) for runs in sets])[:-1]) if sets else []
    return [np.sort(runs) for runs in ranked], int((counts == 1).sum())


def image_fingerprint(thumbnail: np.ndarray) -> bytes | None:
    """The 64 slowest waves of an image: the cosine transform of its grey levels, without the mean.

    Returns:
        The bytes of [64] float16, in grey levels; None if the image is too plain to be told from others.

    Shape:
        thumbnail [3, 32, 32] uint8, by `THUMBNAIL`
    """
    grey = np.tensordot(_GREY, thumbnail, 1)  # [32, 32]
    waves = (_WAVES @ grey @ _WAVES.T)[tuple(_SLOWEST.T)]  # [64]
    return None if np.count_nonzero(np.abs(waves) > _FAINT) < _PLAIN else waves.astype(np.float16).tobytes()


def near_duplicate_images(fingerprints: Sequence[bytes], bits: int = 4) -> tuple[list[list[int]], bool]:
    """Groups of fingerprints, and whether the search is complete.

    Compression, another size, other light or a small mark change 0 to 4 of the 64 signs, a crop by 2 % about 4; two
    photographs differ in 32 on average. Signs alone would not tell drawings on one background apart, so the strengths
    must correlate as well.

    Args:
        bits: most signs in which two near-duplicates differ. Divided into `bits` + 1 parts, the signs of two
            near-duplicates agree in at least one part.
    """
    waves = np.frombuffer(b"".join(fingerprints), np.float16).reshape(-1, 64).astype(np.float32)  # [N, 64]
    positive = waves > 0
    groups = _Groups(len(waves))
    pairs = 0
    for start, end in pairwise(64 * part // (bits + 1) for part in range(bits + 2)):
        buckets = defaultdict(list)
        for number, part in enumerate(np.packbits(positive[:, start:end], axis=1)):
            buckets[part.tobytes()].append(number)
        for members in map(np.array, buckets.values()):
            pairs += len(members) ** 2 // 2
            if pairs > MOST_IMAGE_PAIRS:
                return groups.lists(), False
            for place, one in enumerate(members[:-1].tolist()):
                others = members[place + 1 :]
                others = others[(positive[others] != positive[one]).sum(1) <= bits]
                for other in others[_correlation(waves[one], waves[others]) >= _CORRELATION].tolist():
                    groups.join(one, other)
    return groups.lists(), True


def _correlation(one: np.ndarray, others: np.ndarray) -> np.ndarray:
    """[P] of waves [64] with waves [P, 64]; images have more of the slow waves, so fast ones have more weight."""
    return (one * others) @ _SPEED / np.sqrt((one**2 @ _SPEED) * (others**2 @ _SPEED))
