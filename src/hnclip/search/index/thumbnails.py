"""Small pictures for people: what a list of results shows."""

from __future__ import annotations

import io

from PIL import Image

LONGEST = 320  # pixels
QUALITY = 80


def thumbnail(image: Image.Image) -> bytes:
    """A small JPEG of a picture: upright, on white, and without anything else that its file may tell, such as where it
    was taken.

    Args:
        image: decoded; left as it is.
    """
    from hnclip.data.images import to_rgb

    if image.mode in ("RGB", "L") and "transparency" not in image.info:
        image = _small(image)  # first, so that few pixels are left to be turned; others must be flat before
    small = _small(to_rgb(image))
    small.info.clear()  # Pillow would write comments and XMP of the original
    content = io.BytesIO()
    small.save(content, "JPEG", quality=QUALITY)
    return content.getvalue()


def _small(image: Image.Image) -> Image.Image:
    scale = LONGEST / max(image.size)
    if scale >= 1:
        return image
    width, height = (max(1, round(scale * side)) for side in image.size)
    # Averages over blocks first, which takes a fraction of the time.
    return image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=1.0)
