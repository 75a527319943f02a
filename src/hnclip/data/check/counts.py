"""How many captions and pictures there are, and how long and how large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hnclip.core import Record
from hnclip.data.check.captions import Caption
from hnclip.data.check.pictures import Picture


@dataclass(frozen=True)
class Spread:
    """How numbers are spread: their mean, the least, three percentiles (5, 50, 95), and the greatest."""

    mean: float
    least: float
    low: float
    median: float
    high: float
    greatest: float


@dataclass(frozen=True)
class Counts:
    """Records and their readable captions. `tokens` and `cut` are None without a model."""

    records: int
    captions: int
    words: Spread | None
    tokens: Spread | None
    cut: int | None


@dataclass(frozen=True)
class ImageSizes:
    """The pictures that can be decoded, each counted once. `small` is None without a model."""

    width: Spread | None
    height: Spread | None
    megapixels: Spread | None
    formats: Mapping[str, int]
    modes: Mapping[str, int]
    rotated: int
    small: int | None


def spread(values: Sequence[float]) -> Spread | None:
    """None if there are no values."""
    if not values:
        return None
    return Spread(float(np.mean(values)), *np.quantile(values, [0, 0.05, 0.5, 0.95, 1]).tolist())


def count_captions(records: int, captions: Sequence[Caption], context: int | None) -> Counts:
    tokens = [caption.tokens for caption in captions if caption.tokens is not None]
    return Counts(
        records=records,
        captions=len(captions),
        words=spread([caption.words for caption in captions]),
        tokens=spread(tokens),
        cut=None if context is None else sum(count > context for count in tokens),
    )


def count_by_split(records: Sequence[Record], captions: Sequence[Caption], context: int | None) -> dict[str, Counts]:
    """Declared splits, in the order of their first record."""
    sizes = Counter(record.split for record in records)
    said: dict[str | None, list[Caption]] = {}
    for caption in captions:
        said.setdefault(records[caption.record].split, []).append(caption)
    return {
        split: count_captions(size, said.get(split, []), context) for split, size in sizes.items() if split is not None
    }


def count_pictures(pictures: Iterable[Picture], needed: int | None) -> ImageSizes:
    """`needed` is the shortest side that a model wants."""
    found = list(pictures)
    return ImageSizes(
        width=spread([picture.width for picture in found]),
        height=spread([picture.height for picture in found]),
        megapixels=spread([picture.width * picture.height / 1e6 for picture in found]),
        formats=_tally(picture.format for picture in found),
        modes=_tally(picture.mode for picture in found),
        rotated=sum(picture.rotated for picture in found),
        small=None if needed is None else sum(picture.shortest < needed for picture in found),
    )


def _tally(names: Iterable[str]) -> dict[str, int]:
    """Frequent ones first, equally frequent ones by name."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))
