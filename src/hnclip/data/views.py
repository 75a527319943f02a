"""The views of a record by name: the images and texts that an objective may declare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hnclip.core import ImageSource, Record
from hnclip.data.image_sources import CropImage, EdgeImage
from hnclip.data.texts import first_sentence

CROPS = 3  # most edge crops of an image


@dataclass(frozen=True)
class TextView:
    """Texts of a record: one for each of its captions, or one for the record; None where it has none."""

    texts: Callable[[Record], tuple[str | None, ...]]
    by_caption: bool


def _edge_crop(number: int) -> Callable[[Record], ImageSource | None]:
    def view(record: Record) -> ImageSource | None:
        regions = record.regions[number : number + 1]
        return CropImage(EdgeImage(record.image), regions[0].box) if regions else None

    return view


IMAGE_VIEWS: dict[str, Callable[[Record], ImageSource | None]] = {
    "full": lambda record: record.image,
    "crop": lambda record: CropImage(record.image, record.regions[0].box) if record.regions else None,
    "edge": lambda record: EdgeImage(record.image),
    **{f"edge_crop_{number + 1}": _edge_crop(number) for number in range(CROPS)},
}
TEXT_VIEWS: dict[str, TextView] = {
    "caption": TextView(lambda record: record.captions, by_caption=True),
    "short": TextView(
        lambda record: tuple(record.short or first_sentence(caption) for caption in record.captions), by_caption=True
    ),
    "sentence": TextView(lambda record: (record.regions[0].sentence if record.regions else None,), by_caption=False),
    "filtered": TextView(lambda record: record.filtered or (None,) * len(record.captions), by_caption=True),
}
