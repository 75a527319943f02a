"""Crops, edge maps and the views made of them: against slices of pixels and properties of Canny."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from hnclip.core import ImageSource, InvalidImage, Record, Region
from hnclip.data.image_sources import CellImage, CropImage, EdgeImage, FileImage, root
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.parts import IMAGE_VIEWS, TEXT_VIEWS
from hnclip.data.validate import ERRORS

SMALL = ImageTransform(8)
BOX = (5, 3, 25, 17)


def noise(width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def painting() -> Image.Image:
    """Large areas of one colour, so that there are lines."""
    return noise(5, 4).resize((40, 30), Image.Resampling.NEAREST)


def save(path: Path, image: Image.Image, turn: int | None = None) -> FileImage:
    exif = Image.Exif()
    if turn is not None:
        exif[ExifTags.Base.Orientation] = turn
    image.save(path, exif=exif)
    return FileImage(path)


def array(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(("turn", "suffix"), [*((turn, "png") for turn in range(1, 9)), (6, "jpg"), (3, "tiff")])
def test_boxes_and_maps_are_of_the_upright_image(tmp_path, turn, suffix):
    file = save(tmp_path / f"a.{suffix}", painting(), turn)
    upright = ImageOps.exif_transpose(file.load())
    crop, edges = CropImage(file, BOX).load(), EdgeImage(file).load()
    assert np.array_equal(array(crop), array(upright)[3:17, 5:25])
    assert (edges.size, edges.mode) == (upright.size, "L")
    assert np.array_equal(array(edges), array(EdgeImage(save(tmp_path / "b.png", upright.convert("RGB"))).load()))
    plain = Image.fromarray(array(crop))  # without any EXIF
    assert torch.equal(preprocess_image(crop, SMALL), preprocess_image(plain, SMALL))


@pytest.mark.parametrize(
    ("box", "inside"),
    [
        ((-5, -6, 10, 12), (0, 0, 10, 12)),
        ((30, 20, 100, 99), (30, 20, 40, 30)),
        ((-1, 5, 41, 6), (0, 5, 40, 6)),
        ((0, 0, 40, 30), (0, 0, 40, 30)),
        *(((box), None) for box in [(5, 5, 5, 9), (5, 9, 9, 9), (9, 5, 5, 9), (40, 0, 50, 10), (0, -9, 10, 0)]),
    ],
)
def test_boxes_are_clipped_to_the_image_and_invalid_without_area(tmp_path, box, inside):
    crop = CropImage(save(tmp_path / "a.png", noise()), box)
    if inside is not None:
        assert np.array_equal(array(crop.load()), array(noise().crop(inside)))
        return
    with pytest.raises(InvalidImage, match=r"a\.png") as caught:
        crop.load()
    assert caught.value.kind in ERRORS


def test_transparent_grey_and_unusual_images(tmp_path):
    clear = noise().convert("RGBA")
    clear.putalpha(0)
    file = save(tmp_path / "clear.png", clear)
    assert (array(CropImage(file, BOX).load()) == 255).all()
    assert not array(EdgeImage(file).load()).any()
    grey = save(tmp_path / "grey.png", painting().convert("L"))
    assert np.array_equal(array(CropImage(grey, BOX).load()), array(painting().convert("L"))[3:17, 5:25])
    assert array(EdgeImage(grey).load()).any()
    floats = save(tmp_path / "a.tiff", Image.fromarray(np.full((30, 40), 1e6, dtype=np.float32)))
    for derived in (CropImage(floats, BOX), EdgeImage(floats)):
        with pytest.raises(InvalidImage) as caught:
            derived.load()
        assert caught.value.kind == "unusual image"


def family(file: ImageSource) -> list[ImageSource]:
    """An image and different ones that are derived from it."""
    return [
        file,
        CropImage(file, BOX),
        CropImage(file, (0, 0, 20, 14)),
        EdgeImage(file),
        EdgeImage(file, 400, 900),
        CropImage(EdgeImage(file), BOX),
        EdgeImage(CropImage(file, BOX)),
        CropImage(CropImage(file, BOX), BOX),
    ]


def test_keys_and_bytes_tell_derived_images_apart(tmp_path):
    file = save(tmp_path / "a.png", painting())
    sources = family(file)
    for found in ({source.key for source in sources}, {source.read() for source in sources}, set(sources)):
        assert len(found) == len(sources)
    for source, again in zip(sources, family(FileImage(tmp_path / "a.png"))):
        copy = pickle.loads(pickle.dumps(source))
        assert source == again == copy
        assert (root(source), source.stamp()) == (file, file.stamp())
        assert np.array_equal(array(copy.load()), array(source.load()))
    part, other = CropImage(EdgeImage(file), (8, 3, 25, 17)), EdgeImage(CropImage(file, (8, 3, 25, 17)))
    assert np.array_equal(array(part.load()), array(EdgeImage(file).load())[3:17, 8:25])
    assert not np.array_equal(array(other.load()), array(part.load()))  # has other edges at its border
    for source in family(FileImage(tmp_path / "none.png")):
        for action in (source.stamp, source.load):
            with pytest.raises(InvalidImage):
                action()


def edges_of(image: Image.Image, low: float = 100, high: float = 200) -> np.ndarray:
    return np.asarray(EdgeImage(FileImage(Path("unused")), low, high).apply(image))


def step(*levels: int) -> Image.Image:
    """Black on the left; on the right stripes of these levels from top to bottom."""
    image = Image.new("RGB", (40, 30 * len(levels)))
    for number, level in enumerate(levels):
        image.paste((level,) * 3, (20, 30 * number, 40, 30 * number + 30))
    return image


def test_edges_are_where_colours_change():
    image = Image.new("RGB", (60, 40), (20, 20, 20))
    image.paste((220, 220, 220), (20, 10, 45, 30))
    white = edges_of(image)
    assert set(np.unique(white)) == {0, 255}
    rows, columns = np.nonzero(white)
    across, down = (np.minimum(abs(at - a), abs(at - b)) for at, a, b in ((columns, 19.5, 44.5), (rows, 9.5, 29.5)))
    assert np.minimum(across, down).max() <= 2
    assert all(white[y, 18:22].any() and white[y, 43:47].any() for y in range(13, 27))
    for size in ((1, 1), (1, 9), (31, 17)):
        flat = edges_of(Image.new("RGB", size, (13, 200, 77)))
        assert (flat.shape, flat.any()) == (size[::-1], False)
    colours = Image.new("RGB", (40, 30), (200, 0, 0))
    colours.paste((0, 102, 0), (20, 0, 40, 30))  # of the same brightness
    assert edges_of(colours)[:, 18:22].any()


def test_thresholds_are_of_the_gradient_and_low_continues_high():
    """Sobel's gradient at a vertical step of h levels is 4·h."""
    assert [edges_of(step(60), 100, high).any() for high in (239, 241)] == [True, False]
    below = np.s_[40:, 15:25]
    assert [edges_of(step(200, 50), low, 500)[below].any() for low in (100, 300)] == [True, False]


IMAGE = CellImage("a", "1", bytes)
FIRST, SECOND = Region((0, 0, 5, 5), "One."), Region((1, 1, 6, 6), "Two.")
RECORD = Record("a", IMAGE, ("A dog. It runs.", "A cat"), None, regions=(FIRST, SECOND), filtered=("a", "b"))


def test_image_views():
    found = {name: view(RECORD) for name, view in IMAGE_VIEWS.items()}
    assert found == {
        "full": IMAGE,
        "crop": CropImage(IMAGE, FIRST.box),
        "edge": EdgeImage(IMAGE),
        "edge_crop_1": CropImage(EdgeImage(IMAGE), FIRST.box),
        "edge_crop_2": CropImage(EdgeImage(IMAGE), SECOND.box),
        "edge_crop_3": None,
    }
    without = {name for name, view in IMAGE_VIEWS.items() if view(replace(RECORD, regions=())) is None}
    assert without == {"crop", "edge_crop_1", "edge_crop_2", "edge_crop_3"}


def test_text_views():
    found = {name: view.texts(RECORD) for name, view in TEXT_VIEWS.items()}
    assert found == {
        "caption": RECORD.captions,
        "short": ("A dog", "A cat"),
        "sentence": ("One.",),
        "filtered": ("a", "b"),
    }
    bare = replace(RECORD, regions=(), filtered=(), short="short")
    assert [TEXT_VIEWS[name].texts(bare) for name in ("short", "sentence", "filtered")] == [
        ("short", "short"),
        (None,),
        (None, None),
    ]
    assert [name for name, view in TEXT_VIEWS.items() if not view.by_caption] == ["sentence"]
