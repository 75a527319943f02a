"""The one record type behind every data source: an image reference and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from PIL import Image


class ImageSource(Protocol):
    """Where a picture comes from. `key` names it: two records with the same key show the same picture."""

    @property
    def key(self) -> str: ...

    def load(self) -> Image.Image: ...


@dataclass(frozen=True)
class Region:
    """A part of the picture, (left, top, right, bottom) in its own pixels, and the sentence that describes it."""

    box: tuple[int, int, int, int]
    sentence: str


@dataclass(frozen=True)
class Record:
    """One picture with its captions. `group` names its family of near-duplicates, if the source knows one: recalls
    are resampled by group, because members of a family succeed and fail together."""

    id: str
    image: ImageSource
    captions: tuple[str, ...]
    split: str
    short: str | None = None
    regions: tuple[Region, ...] = ()
    group: str | None = None
