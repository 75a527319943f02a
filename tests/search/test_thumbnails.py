"""Small pictures for people: upright, on white, and nothing in them but the picture."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import ExifTags, Image, PngImagePlugin

from hnclip.data.image_sources import decode_image
from hnclip.data.images import ImageTransform, preprocess_image, to_rgb
from hnclip.search.index.thumbnails import thumbnail

FOUR = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 0]]], np.uint8)  # a colour in every corner


def opened(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


def corners(width: int, height: int) -> Image.Image:
    return Image.fromarray(FOUR).resize((width, height), Image.Resampling.NEAREST)


def photo(width: int, height: int) -> Image.Image:
    coarse = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, format: str, **details: object) -> Image.Image:
    content = io.BytesIO()
    image.save(content, format, **details)
    return decode_image(content.getvalue(), "picture")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((640, 480), (320, 240)),
        ((481, 1000), (154, 320)),
        ((321, 320), (320, 319)),
        ((320, 320), (320, 320)),
        ((20, 7), (20, 7)),
        ((1, 1), (1, 1)),
        ((5000, 1), (320, 1)),
        ((3, 4001), (1, 320)),
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1", "I;16"])
def test_sizes(size: tuple[int, int], expected: tuple[int, int], mode: str) -> None:
    image = Image.new("I;16", size) if mode == "I;16" else Image.new("RGB", size, "teal").convert(mode)
    found = opened(thumbnail(image))
    assert (found.format, found.mode, found.size) == ("JPEG", "RGB", expected)
    assert image.size == size


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_upright_as_the_model_sees_it(format: str, turn: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turn
    image = saved(corners(900, 600), format, exif=exif)
    expected = to_rgb(image)  # what `preprocess_image` begins with
    found = opened(thumbnail(image))
    assert found.size == ((320, 213) if expected.width > expected.height else (213, 320))
    for x in (0.25, 0.75):
        for y in (0.25, 0.75):
            wanted, got = (one.getpixel((int(x * one.width), int(y * one.height))) for one in (expected, found))
            assert np.abs(np.subtract(wanted, got)).max() < 40


def test_colours_stay_and_the_original_too() -> None:
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (30, 40, 3), np.uint8)).resize(
        (1280, 960), Image.Resampling.BICUBIC
    )
    before = image.tobytes()
    small = np.asarray(opened(thumbnail(image)), np.float32)
    twin = np.asarray(image.resize((320, 240), Image.Resampling.LANCZOS), np.float32)
    assert np.abs(small - twin).mean() < 6
    assert image.tobytes() == before


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    image = Image.new("RGBA", (700, 500), (0, 0, 0, 0))
    image.paste((200, 0, 0, 255), (0, 0, 350, 500))
    if mode == "P":
        image = saved(image.convert("P"), "PNG", transparency=image.convert("P").getpixel((600, 250)))
    else:
        image = image.convert(mode)
    right = opened(thumbnail(image)).getpixel((300, 100))
    assert min(right) > 240


def test_nothing_but_the_picture() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Make] = "SECRET camera"
    exif.get_ifd(ExifTags.IFD.GPSInfo)[ExifTags.GPS.GPSLatitude] = (52.0, 31.0, 12.0)
    secret = b"SECRET"
    jpeg = saved(corners(640, 480), "JPEG", exif=exif, comment=secret, icc_profile=secret, xmp=secret)
    assert {"exif", "comment", "icc_profile"} <= jpeg.info.keys()
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Comment", "SECRET")
    png = saved(corners(640, 480).convert("RGBA"), "PNG", exif=exif, pnginfo=notes, icc_profile=secret)
    small = saved(corners(30, 20), "JPEG", exif=exif, comment=secret)
    for image in (jpeg, png, small):
        content = thumbnail(image)
        assert b"SECRET" not in content
        assert opened(content).info.keys() <= {"jfif", "jfif_version", "jfif_unit", "jfif_density"}
        assert not opened(content).getexif()


def test_small_pictures_take_little_room() -> None:
    random = np.random.default_rng(0)
    photo = Image.fromarray(random.integers(0, 256, (40, 60, 3), np.uint8)).resize(
        (3000, 2000), Image.Resampling.BICUBIC
    )
    assert len(thumbnail(photo)) < 40_000


def test_what_no_model_can_take_has_no_thumbnail_either() -> None:
    odd = Image.fromarray(np.full((400, 400), 1e9, np.float32))
    for make in (lambda: preprocess_image(odd, ImageTransform(48)), lambda: thumbnail(odd)):
        with pytest.raises(ValueError, match="0 to 255"):
            make()
