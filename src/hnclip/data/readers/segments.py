"""Regions and edge maps in the rows of GOAL's and StructXLIP's lists."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from html import unescape
from typing import Any

from hnclip.core import Box, ImageSource, Record, Region
from hnclip.data.readers.locate import Pictures, plain_name, shared_end

IMAGE, CAPTION, REGIONS, EDGES = "original_filename", "original_caption", "segment", "original_filename_structure"

# The edge map that a path means, if it is there; the other path is that of the picture that the map was made of.
FindMap = Callable[[str, str], ImageSource | None]


def is_segment_list(names: Collection[str]) -> bool:
    """Whether rows with these keys are of such a list."""
    return IMAGE in names and CAPTION in names


def regions_of(segments: Any, find: FindMap) -> tuple[Region, ...]:
    """The segments that have a sentence and a box, the most similar first: GOAL trains on that one alone. Of the box
    only the corners count: whether width and height are the picture's or the region's depends on who wrote the list."""
    if not isinstance(segments, Sequence) or isinstance(segments, str):
        return ()
    regions = []
    for segment in segments:
        if not isinstance(segment, Mapping):
            continue
        corners = segment.get("bbox_coordinates")
        box = box_of(*(corners.get(key) for key in ("x1", "y1", "x2", "y2"))) if isinstance(corners, Mapping) else None
        sentence = segment.get("caption")
        if box and isinstance(sentence, str) and unescape(sentence).strip():
            edges = map_of(segment.get("filename_structure_cropped"), segment.get("filename"), find)
            regions.append(Region(box, sentence.strip(), _score(segment.get("similarity_score")), edges))
    return best_first(regions)


def best_first(regions: Sequence[Region]) -> tuple[Region, ...]:
    return tuple(sorted(regions, key=lambda region: -math.inf if region.score is None else region.score, reverse=True))


def map_of(written: Any, of: Any, find: FindMap) -> ImageSource | None:
    """The edge map that a cell names; None if it names none, or one that is not here."""
    if not isinstance(written, str) or not written.strip() or "\0" in written:
        return None
    return find(written.strip(), of if isinstance(of, str) else "")


def map_finder(places: Sequence[Pictures], picture: ImageSource) -> FindMap:
    """Looks for edge maps in these places, by path or by the end of it.

    Maps often have the base names of the pictures they were made of, which must not be taken for them: `picture`
    itself never is, nor what ends more like the path of the picture than like that of the map. The base name alone is
    enough only outside the place where the picture lies; among the pictures the directory must fit too, or another
    picture of that name would do. Two that fit equally well are none: a map is left out rather than mistaken.

    Relations:
        `without_pictures` takes out, when all rows are read, maps that turned out to be another row's picture.
    """
    home = next((place for place in places if _lies_in(picture, place)), None)

    def find(written: str, of: str) -> ImageSource | None:
        for place in places:
            exact = place.exact(written)
            if exact is not None and exact.key != picture.key:
                return exact
        path = plain_name(written)
        found: dict[str, tuple[int, ImageSource]] = {}
        for place in places:
            for lies, image in place.same_name(written):
                shared = shared_end(path, lies)
                if shared == 1 and home is not None and _lies_in(image, home):
                    continue
                if image.key != picture.key and shared >= shared_end(plain_name(of), lies):
                    found[image.key] = (shared, image)
        best = max((shared for shared, _ in found.values()), default=0)
        fitting = [image for shared, image in found.values() if shared == best]
        return fitting[0] if len(fitting) == 1 else None

    return find


def without_pictures(records: Iterable[Record]) -> list[Record]:
    """The records without edge maps that are the picture of one of them."""
    records = list(records)
    pictures = {record.image.key for record in records}

    def kept(edges: ImageSource | None) -> ImageSource | None:
        return None if edges is None or edges.key in pictures else edges

    return [
        replace(
            record,
            edges=kept(record.edges),
            regions=tuple(replace(region, edges=kept(region.edges)) for region in record.regions),
        )
        if record.edges or any(region.edges for region in record.regions)
        else record
        for record in records
    ]


def _lies_in(image: ImageSource, place: Pictures) -> bool:
    root = os.path.abspath(place.root)
    return image.key.startswith((os.path.join(root, ""), f"{root}!"))


def box_of(*corners: Any) -> Box | None:
    """(left, top, right, bottom) in whole pixels; None if these are not four numbers or enclose nothing."""
    try:
        left, top, right, bottom = (int(corner) for corner in corners)
    except (TypeError, ValueError, OverflowError):
        return None
    return (left, top, right, bottom) if left < right and top < bottom else None


def _score(score: Any) -> float | None:
    usable = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
    return float(score) if usable else None
