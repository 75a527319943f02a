"""What a writer is told, and what it tells the next run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hnclip.core import Problem


@dataclass(frozen=True)
class NewPicture:
    """Content that the index does not have yet.

    Shape:
        vector [D] of length 1; tokens [P, D] if the index keeps them
    """

    content: bytes
    vector: np.ndarray
    shape: tuple[int, int]
    thumbnail: bytes
    tokens: np.ndarray | None = None


@dataclass(frozen=True)
class NewItem:
    """A picture under a name; one that had the name before ends. Its content and captions are in the index, or come
    with the same change."""

    name: str
    content: bytes
    place: str
    stamp: str
    captions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """What a version does to the one before.

    Args:
        captions: vectors [D] of texts that the index does not have yet.
        gone: names of items that end.
        stamps: of items whose file has another stamp but the same content.
        problems: by stamp, what could not be indexed; a problem of the same name goes.
        solved: names of problems that are none any more.
    """

    pictures: Sequence[NewPicture] = ()
    captions: Mapping[str, np.ndarray] = field(default_factory=dict)
    items: Sequence[NewItem] = ()
    gone: Collection[str] = ()
    stamps: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[tuple[Problem, str]] = ()
    solved: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """A living item as the next run compares it; `captions` is their `texts_hash`."""

    stamp: str
    place: str
    content: bytes
    captions: bytes
