"""Boxes in pixels of a picture into those of another size of it, and into patches of what a model sees of it."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from hnclip.core import Box

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


def official_patches(box: Box, size: int, patch: int, side: int) -> tuple[range, range]:
    """Columns and rows of the patches that GOAL's released code chooses for a box.

    It scales the box as if the whole image were as large as the box, without the crop, rounds the corners to whole
    pixels and moves what lies outside to the edge.

    Args:
        size: side of the model's image in pixels.
        patch: side of a patch in pixels.
        side: patches along each side.
    """
    chosen = []
    for axis in (0, 1):
        length = max(1, box[axis + 2] - box[axis])
        start, stop = (round(box[axis + end] * size / length) for end in (0, 2))
        start, stop = min(max(start, 0), size - 1), min(max(stop, 0), size)
        chosen.append(range(start // patch, min(side, -(-stop // patch))))
    return chosen[0], chosen[1]


def patches_of(box: Placed, patch: int, side: int) -> tuple[range, range]:
    """Columns and rows of the patches that a box touches.

    Args:
        patch: side of a patch in pixels.
        side: patches along each side. Where they do not cover the picture, pixels beyond the last touch none.
    """
    left, top, right, bottom = box
    return _touched(left, right, patch, side), _touched(top, bottom, patch, side)


def _touched(start: Fraction, stop: Fraction, patch: int, side: int) -> range:
    return range(start // patch, min(side, -(-stop // patch)))


def _inside(place: Fraction, size: int) -> Fraction:
    return min(max(place, Fraction(0)), Fraction(size))
