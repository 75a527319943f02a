"""Duplicates and near-duplicates among records, by their images and their captions.

A group of near-duplicates is connected by similar pairs. Captions are compared as sets of runs of three words (Jaccard
similarity), images by a fingerprint of 64 slow waves. Every similar pair is found.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hnclip.core import Problem, Record
from hnclip.data.images import ImageTransform

MOST = 200_000  # images or captions; more are not compared
MOST_CAPTION_PAIRS = 20_000_000  # a limit for captions that all share their runs: about a minute
BLOCK = 128  # images that are compared with all others at once

# Scripts without spaces between words (kana, Han) are read letter by letter.
_LETTER = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_LETTER}]|[^\W{_LETTER}]+")
_ROUNDING = 1e-9

SIDE = 32
THUMBNAIL = ImageTransform(SIDE, squash=True, resample="bilinear")
_FAINT = 0.25  # grey levels; the sign of a weaker wave is noise
_PLAIN = 16  # strong waves that an image needs; flat images and gradients have fewer, and all look the same
_GREY = (0.299, 0.587, 0.114)
_STEPS = np.arange(SIDE)
_WAVES = np.cos(np.pi / SIDE * _STEPS[:, None] * (_STEPS + 0.5)) * 2**0.5 / SIDE  # [wave, pixel]
_SLOWEST = np.array(sorted(np.ndindex(SIDE, SIDE), key=lambda wave: (sum(wave), wave))[1:65])  # [64, 2]
_SPEED = _SLOWEST.sum(1)  # [64]


@dataclass(frozen=True)
class DuplicateGroup:
    """Ids of records with equal or nearly equal images or captions, in the order of the data, and their declared
    splits. `example` is one of the captions, in lower case."""

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
    records: Sequence[Record],
    contents: Mapping[str, bytes],
    fingerprints: Mapping[bytes, bytes],
    captions: Iterable[tuple[int, str]],
) -> tuple[list[DuplicateGroup], list[str]]:
    """Records with the same or nearly the same image or caption, and the kinds that were not searched completely.

    Records that name one image by one key are its captions, no duplicates, unless they are in two splits. Equal
    captions (but for case and white space) count if their images differ. Near-duplicates of one declared `group` do
    not count.

    Args:
        contents: hash of the bytes of each valid image by its key, and `fingerprints` by those hashes.
        captions: valid ones, with the index of their record.
    """
    by_image, by_text = defaultdict[Hashable, list[int]](list), defaultdict[str, list[int]](list)
    image_of = [contents.get(record.image.key, record.image.key) for record in records]
    for index, image in enumerate(image_of):
        by_image[image].append(index)
    for index, text in captions:
        by_text[" ".join(text.split()).casefold()].append(index)
    groups: list[DuplicateGroup] = []

    def report(kind: str, found: Iterable[int], differ: Sequence[Hashable], example: str | None = None) -> None:
        """Add a group, if its members differ in this respect and the source does not declare it."""
        members = sorted(set(found))
        splits = tuple(dict.fromkeys(split for index in members if (split := records[index].split) is not None))
        declared = {records[index].group for index in members}
        if kind.startswith("similar") and len(declared) == 1 and None not in declared:
            return
        if len({differ[index] for index in members}) > 1 or (kind == "same image" and len(splits) > 1):
            kind = kind.replace("same", "shared") if len(splits) > 1 else kind
            groups.append(DuplicateGroup(kind, tuple(records[index].id for index in members), splits, example))

    keys = [record.image.key for record in records]
    for members in by_image.values():
        report("same image", members, keys)
    similar, all_images = near_duplicate_images(list(fingerprints.values()))
    hashes, texts = list(fingerprints), list(by_text)
    for numbers in similar:
        report("similar image", (index for number in numbers for index in by_image[hashes[number]]), image_of)
    for text, members in by_text.items():
        report("same caption", members, image_of, text)
    similar, all_texts = near_duplicate_captions(texts)
    for numbers in similar:
        found = (index for number in numbers for index in by_text[texts[number]])
        report("similar caption", found, image_of, texts[numbers[0]])
    groups.sort(key=lambda group: (len(group.splits) < 2, -len(group.ids)))  # leaks between splits, then large groups
    return groups, ["similar image"] * (not all_images) + ["similar caption"] * (not all_texts)


def near_duplicate_captions(texts: Collection[str], threshold: float = 0.8) -> tuple[list[list[int]], bool]:
    """Groups of captions, and whether the search is complete. `threshold` is the least share of their runs of three
    words that two captions have in common; 0.8 is up to four changed words in 120, or one in 25."""
    # Two sets that reach the threshold t share at least t·n of the n runs of each. In one order of all runs, rare ones
    # first, they therefore share one of the first n - t·n + 1 (prefix filter).
    if not 0 < len(texts) <= MOST:
        return [], not texts
    runs = [_runs(text) for text in texts]
    _, inverse, counts = np.unique(np.concatenate(runs), return_inverse=True, return_counts=True)
    frequency = np.split(counts[inverse], np.cumsum([len(own) for own in runs])[:-1])
    labels, index, pairs = np.arange(len(runs)), defaultdict[int, list[int]](list), 0
    for number in sorted(range(len(runs)), key=lambda number: len(runs[number])):
        own, often = set(runs[number].tolist()), frequency[number]
        least = threshold * len(own) - _ROUNDING
        rare = np.argsort(often, kind="stable")[: len(own) - math.ceil(least) + 1]
        prefix = runs[number][rare[often[rare] > 1]].tolist()  # without runs of this text alone
        pairs += sum(len(index[run]) for run in prefix)
        if pairs > MOST_CAPTION_PAIRS:
            return _groups(labels), False
        for other in {other for run in prefix for other in index[run] if len(runs[other]) >= least}:
            if labels[other] != labels[number]:
                shared = len(own.intersection(runs[other].tolist()))
                if shared / (len(own) + len(runs[other]) - shared) >= threshold:
                    _join(labels, [other, number])
        for run in prefix:
            index[run].append(number)
    return _groups(labels), True


def _runs(text: str) -> np.ndarray:
    """Hashes of the runs of three words of a text, ascending. Case and punctuation do not count. Two empty words stand
    before and after, so that every word is in three runs."""
    words = ["", "", *_WORD.findall(text.casefold()), "", ""]
    return np.unique(np.array([hash(run) for run in zip(words, words[1:], words[2:]) if any(run)], np.int64))


def image_fingerprint(thumbnail: np.ndarray) -> bytes | None:
    """The 64 slowest waves of an image [3, 32, 32] by `THUMBNAIL`: the cosine transform of its grey levels without the
    mean, as bytes of [64] float16. None if the image is too plain to be told from others."""
    grey = np.tensordot(_GREY, thumbnail, 1)  # [32, 32]
    waves = (_WAVES @ grey @ _WAVES.T)[tuple(_SLOWEST.T)]  # [64]
    return None if np.count_nonzero(np.abs(waves) > _FAINT) < _PLAIN else waves.astype(np.float16).tobytes()


def near_duplicate_images(
    fingerprints: Sequence[bytes], bits: int = 4, correlation: float = 0.96
) -> tuple[list[list[int]], bool]:
    """Groups of fingerprints, and whether the search is complete.

    Compression, another size, other light or a small mark change 0 to 4 of the 64 signs, a crop by 2 % about 4; two
    photographs differ in 32 on average. At most `bits` of them may differ. Signs alone would not tell drawings on one
    background apart, so the strengths must correlate as well, with more weight on fast waves, which are weaker in
    images: 98 of 100 crops of 2 % are above 0.96, other drawings on one background are below.
    """
    if len(fingerprints) > MOST:
        return [], False
    waves = np.frombuffer(b"".join(fingerprints), np.float16).reshape(-1, 64).astype(np.float32)  # [N, 64]
    signs = np.where(waves > 0, np.float32(1), np.float32(-1))
    waves *= np.sqrt(_SPEED)
    waves /= np.linalg.norm(waves, axis=1, keepdims=True)
    labels = np.arange(len(waves))
    for start in range(0, len(waves), BLOCK):
        block = slice(start, start + BLOCK)
        near = (waves[block] @ waves[start:].T >= correlation) & (signs[block] @ signs[start:].T >= 64 - 2 * bits)
        for row in near:  # [N - start], each image itself included
            _join(labels, start + np.flatnonzero(row))
    return _groups(labels), True


def _join(labels: np.ndarray, members: Sequence[int] | np.ndarray) -> None:
    found = labels[members]
    if (found != found[0]).any():
        labels[np.isin(labels, found)] = found.min()


def _groups(labels: np.ndarray) -> list[list[int]]:
    """Numbers with the same label, two and more, in ascending order."""
    found = defaultdict(list)
    for number, label in enumerate(labels.tolist()):
        found[label].append(number)
    return [members for members in found.values() if len(members) > 1]
