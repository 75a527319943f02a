"""Thumbnails: upright, on white, small, and without the metadata of the original."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import ExifTags, Image

from hnclip.data.image_sources import decode_image
from hnclip.data.images import to_rgb
from hnclip.search.indexer import make_thumbnail

CORNERS = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 0]]], np.uint8)  # a colour in each


def thumbnail(image: Image.Image) -> Image.Image:
    return decode_image(make_thumbnail(image), "thumbnail")


@pytest.mark.parametrize("mode", ["RGB", "P", "CMYK", "I;16"])
def test_the_longer_side_has_at_most_320_pixels(mode: str) -> None:
    for size, expected in (((321, 320), (320, 319)), ((20, 7), (20, 7)), ((5000, 1), (320, 1))):
        found = thumbnail(Image.new(mode, size))
        assert (found.format, found.mode, found.size) == ("JPEG", "RGB", expected)


@pytest.mark.parametrize("turn", range(1, 9))
def test_thumbnails_are_upright_and_without_metadata(turn: int) -> None:
    exif, content = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = turn
    exif[ExifTags.Base.Make] = "SECRET camera"
    corners = Image.fromarray(CORNERS).resize((900, 600), Image.Resampling.NEAREST)
    corners.save(content, "JPEG", exif=exif, icc_profile=b"SECRET", comment=b"SECRET", xmp=b"SECRET")
    image = decode_image(content.getvalue(), "image")
    expected, found = to_rgb(image), thumbnail(image)
    assert found.size == ((320, 213) if expected.width > expected.height else (213, 320))
    for x, y in ((0.25, 0.25), (0.25, 0.75), (0.75, 0.25), (0.75, 0.75)):
        colours = [one.getpixel((int(x * one.width), int(y * one.height))) for one in (expected, found)]
        assert np.abs(np.subtract(*colours)).max() < 40
    assert b"SECRET" not in make_thumbnail(image)
    assert not found.getexif()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparent_pixels_are_white(mode: str) -> None:
    image = Image.new("RGBA", (700, 500), (0, 0, 0, 0))
    image.paste((200, 0, 0, 255), (0, 0, 350, 500))
    found = thumbnail(image.convert(mode))
    assert min(found.getpixel((300, 100))) > 240
    assert min(found.getpixel((20, 100))) < 128
