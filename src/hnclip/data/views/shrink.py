"""Large pictures made smaller for tools that are slow or hungry on them."""

from __future__ import annotations

from PIL import Image


def shrunk(image: Image.Image, most: tuple[int, int], resample: Image.Resampling) -> Image.Image:
    """The picture with its shape kept, no wider and no higher than `most`; itself, if it is that already."""
    ratio = min(most[0] / image.width, most[1] / image.height)
    if ratio >= 1:
        return image
    # A very thin picture keeps a pixel.
    return image.resize((max(1, round(image.width * ratio)), max(1, round(image.height * ratio))), resample)
