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
    found = Image.open(io.BytesIO(make_thumbnail(image)))
    found.load()
    return found


@pytest.mark.parametrize(
    ("size", "expected"),
    [((640, 480), (320, 240)), ((321, 320), (320, 319)), ((20, 7), (20, 7)), ((5000, 1), (320, 1))],
)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1", "I;16"])
def test_size(size: tuple[int, int], expected: tuple[int, int], mode: str) -> None:
    image = Image.new("I;16", size) if mode == "I;16" else Image.new("RGB", size, "teal").convert(mode)
    before = image.tobytes()
    found = thumbnail(image)
    assert (found.format, found.mode, found.size) == ("JPEG", "RGB", expected)
    assert image.tobytes() == before


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_upright_as_the_model_sees_it(format: str, turn: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turn
    image = saved(corners(900, 600), format, exif=exif)
    expected, found = to_rgb(image), thumbnail(image)  # `preprocess_image` begins with `to_rgb`
    assert found.size == ((320, 213) if expected.width > expected.height else (213, 320))
    for x in (0.25, 0.75):
        for y in (0.25, 0.75):
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


def test_no_metadata_of_the_original() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Make] = "SECRET camera"
    exif.get_ifd(ExifTags.IFD.GPSInfo)[ExifTags.GPS.GPSLatitude] = (52.0, 31.0, 12.0)
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Comment", "SECRET")
    details = {"exif": exif, "icc_profile": b"SECRET"}
    for size in ((640, 480), (30, 20)):  # also of one that is not made smaller
        jpeg = saved(corners(*size), "JPEG", comment=b"SECRET", xmp=b"SECRET", **details)
        png = saved(corners(*size).convert("RGBA"), "PNG", pnginfo=notes, **details)
        for image in (jpeg, png):
            assert {"exif", "icc_profile"} <= image.info.keys()
            assert b"SECRET" not in make_thumbnail(image)
            assert not thumbnail(image).getexif()


def test_few_bytes_and_the_same_colours() -> None:
    coarse = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    photo = Image.fromarray(coarse).resize((3200, 2400), Image.Resampling.BICUBIC)
    expected = np.asarray(photo.resize((320, 240), Image.Resampling.LANCZOS), np.float32)
    assert np.abs(np.asarray(thumbnail(photo), np.float32) - expected).mean() < 6
    assert len(make_thumbnail(photo)) < 40_000
