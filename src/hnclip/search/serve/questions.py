"""What clients ask for that has to be computed, once it is known to be well-formed."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from hnclip.search.index.layout import Kind

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Search:
    """Find by a text or by a picture.

    Args:
        pixels: [3, H, W] uint8, as the model's transform makes them of the picture.
        asked: when, for the time that the answer took.
    """

    k: int
    find: Kind
    text: str | None = None
    pixels: Tensor | None = None
    rerank: bool = False
    asked: float = field(default_factory=perf_counter)


@dataclass(frozen=True)
class Explain:
    """Which words of a text match which parts of a picture."""

    text: str
    id: int


@dataclass(frozen=True)
class Separate:
    """Which words of a text separate pictures that are nearly the same."""

    text: str
    ids: tuple[int, ...]
