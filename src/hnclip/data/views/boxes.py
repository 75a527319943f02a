"""Boxes in pixels of a picture into those of another size of it, and into patches of what a model sees of it."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from hnclip.data.records import Box

if TYPE_CHECKING:
    from hnclip.data.images import ImageTransform

Placed = tuple[Fraction, Fraction, Fraction, Fraction]  # a box in pixels of the model's picture


def mapped(box: Box, size: tuple[int, int], other: tuple[int, int]) -> Box:
    """The box of a picture of this width and height in the pixels of another size of it: all that show some of it."""
    left, top, right, bottom = box
    return (
        left * other[0] // size[0],
        top * other[1] // size[1],
        -(-right * other[0] // size[0]),
        -(-bottom * other[1] // size[1]),
    )


def model_box(box: Box, shape: tuple[int, int], transform: ImageTransform) -> Placed | None:
    """Where a box of the upright picture is in the square that the model sees; None if nothing of it is there.

    Follows `preprocess_image`: resized to whole pixels, then the centre cut out. Fractions, because a box that ends on
    the edge of a patch must not touch the next one.

    Args:
        shape: width and height of the upright picture.
    """
    resized = transform.resized(*shape)
    edges = []
    for axis in (0, 1):
        cut = (resized[axis] - transform.size) // 2
        start, stop = (
            _inside(Fraction(box[axis + end] * resized[axis], shape[axis]) - cut, transform.size) for end in (0, 2)
        )
        if start >= stop:
            return None
        edges.append((start, stop))
    (left, right), (top, bottom) = edges
    return left, top, right, bottom


def region_box(box: Box, size: int) -> Placed | None:
    """Where GOAL's released code takes a box to be: scaled as if the whole picture were as large as the box, and not
    cut; what lies outside then, is moved to the edge. None for a box without area, which has no scale.

    Args:
        size: side of the model's picture.
    """
    width, height = box[2] - box[0], box[3] - box[1]
    if width <= 0 or height <= 0:
        return None
    left, right = (_inside(Fraction(x * size, width), size) for x in (box[0], box[2]))
    top, bottom = (_inside(Fraction(y * size, height), size) for y in (box[1], box[3]))
    return left, top, right, bottom


def patches_of(box: Placed, patch: int, side: int, *, at_least_one: bool = False) -> tuple[range, range]:
    """Columns and rows of the patches that a box touches.

    Args:
        patch: side of a patch in pixels.
        side: patches along each side. Where they do not cover the picture, pixels beyond the last touch none.
        at_least_one: a box without area, on the edge of the picture, touches the patch there.
    """
    left, top, right, bottom = box
    return _touched(left, right, patch, side, at_least_one), _touched(top, bottom, patch, side, at_least_one)


def _touched(start: Fraction, stop: Fraction, patch: int, side: int, at_least_one: bool) -> range:
    first, last = start // patch, min(side, -(-stop // patch))
    if at_least_one:
        first = min(first, side - 1)
        last = max(last, first + 1)
    return range(first, last)


def _inside(place: Fraction, size: int) -> Fraction:
    return min(max(place, Fraction(0)), Fraction(size))
