"""The views of a record by name: which pictures and which texts an objective may ask for.

A view that a record does not have is None. `hnclip.train.run_views` fills in what can be made of picture and caption
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hnclip.core import ImageSource, Record
from hnclip.data.views.derived import EdgeImage, crop_of, grey_of, map_crop_of
from hnclip.data.views.sentences import first_sentence

CROPS = 3  # most edge crops of a picture


@dataclass(frozen=True)
class TextView:
    """Texts of a record: one for each of its captions, or one for the record."""

    texts: Callable[[Record], tuple[str | None, ...]]
    by_caption: bool


def _region_picture(record: Record) -> ImageSource | None:
    return crop_of(record.image, record.regions[0].box) if record.regions else None


def _region_edges(number: int) -> Callable[[Record], ImageSource | None]:
    def view(record: Record) -> ImageSource | None:
        if number > len(record.regions):
            return None
        region = record.regions[number - 1]
        if region.edges is not None:
            return _grey(region.edges)
        if record.edges is None:
            return None
        if isinstance(record.edges, EdgeImage):  # made here, of the picture's own size
            return crop_of(record.edges, region.box)
        return map_crop_of(_grey(record.edges), region.box, record.image)

    return view


def _grey(edges: ImageSource) -> ImageSource:
    """Maps that are made here are grey already."""
    return edges if isinstance(edges, EdgeImage) else grey_of(edges)


def _captions(record: Record) -> tuple[str, ...]:
    if not record.captions:
        raise ValueError(f"record {record.id} has no text for this view: a caption is needed")
    return record.captions


IMAGE_VIEWS: dict[str, Callable[[Record], ImageSource | None]] = {
    "full": lambda record: record.image,
    "crop": _region_picture,
    "edge": lambda record: None if record.edges is None else _grey(record.edges),
    **{f"edge_crop_{number}": _region_edges(number) for number in range(1, CROPS + 1)},
}
TEXT_VIEWS: dict[str, TextView] = {
    "caption": TextView(_captions, by_caption=True),
    "short": TextView(
        lambda record: tuple(record.short or first_sentence(caption) for caption in _captions(record)), by_caption=True
    ),
    "sentence": TextView(lambda record: (record.regions[0].sentence if record.regions else None,), by_caption=False),
    "filtered": TextView(lambda record: record.filtered or (None,) * len(record.captions), by_caption=True),
}
