"""Thumbnails: upright, on white, small, and without the metadata of the original."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import ExifTags, Image, PngImagePlugin

from hnclip.data.image_sources import decode_image
from hnclip.data.images import to_rgb
from hnclip.search.indexer import make_thumbnail

CORNERS = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 0]]], np.uint8)  # a colour in each


def corners(width: int, height: int) -> Image.Image:
    return Image.fromarray(CORNERS).resize((width, height), Image.Resampling.NEAREST)


def saved(image: Image.Image, format: str, **details: object) -> Image.Image:
    content = io.BytesIO()
    image.save(content, format, **details)
    return decode_image(content.getvalue(), "image")


def thumbnail(image: Image.Image) -> Image.Image:
    return decode_image(make_thumbnail(image), "thumbnail")


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1", "I;16"])
def test_the_longer_side_has_at_most_320_pixels(mode: str) -> None:
    for size, expected in {
        (640, 480): (320, 240),
        (321, 320): (320, 319),
        (20, 7): (20, 7),
        (5000, 1): (320, 1),
    }.items():
        image = Image.new("I;16", size) if mode == "I;16" else Image.new("RGB", size, "teal").convert(mode)
        before = image.tobytes()
        found = thumbnail(image)
        assert (found.format, found.mode, found.size) == ("JPEG", "RGB", expected)
        assert image.tobytes() == before


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_thumbnails_are_upright(format: str, turn: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turn
    image = saved(corners(900, 600), format, exif=exif)
    expected, found = to_rgb(image), thumbnail(image)
    assert found.size == ((320, 213) if expected.width > expected.height else (213, 320))
    for x, y in ((0.25, 0.25), (0.25, 0.75), (0.75, 0.25), (0.75, 0.75)):
        colours = [one.getpixel((int(x * one.width), int(y * one.height))) for one in (expected, found)]
        assert np.abs(np.subtract(*colours)).max() < 40


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparent_pixels_are_white(mode: str) -> None:
    image = Image.new("RGBA", (700, 500), (0, 0, 0, 0))
    image.paste((200, 0, 0, 255), (0, 0, 350, 500))
    if mode == "P":
        palette = image.convert("P")
        image = saved(palette, "PNG", transparency=palette.getpixel((600, 250)))
    found = thumbnail(image.convert(mode))
    assert min(found.getpixel((300, 100))) > 240
    assert min(found.getpixel((20, 100))) < 128


@pytest.mark.parametrize("size", [(640, 480), (30, 20)])
def test_metadata_of_the_original_is_dropped(size: tuple[int, int]) -> None:
    exif, notes = Image.Exif(), PngImagePlugin.PngInfo()
    exif[ExifTags.Base.Make] = "SECRET camera"
    exif.get_ifd(ExifTags.IFD.GPSInfo)[ExifTags.GPS.GPSLatitude] = (52.0, 31.0, 12.0)
    notes.add_text("Comment", "SECRET")
    details = {"exif": exif, "icc_profile": b"SECRET"}
    jpeg = saved(corners(*size), "JPEG", comment=b"SECRET", xmp=b"SECRET", **details)
    png = saved(corners(*size).convert("RGBA"), "PNG", pnginfo=notes, **details)
    for image in (jpeg, png):
        assert {"exif", "icc_profile"} <= image.info.keys()
        assert b"SECRET" not in make_thumbnail(image)
        assert not thumbnail(image).getexif()
