"""Crops and edge maps as sources of pictures: what they show, what they are called, and their way through the cache."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hnclip.data.views.derived import grey_of, map_crop_of
from hnclip.data.views.edges import Canny, EdgeMethod, LaplacianOfGaussian
from PIL import ExifTags, Image, ImageOps

from hnclip.core import ImageSource, InvalidImage, Record, Region
from hnclip.data.derived_images import CropImage, EdgeImage
from hnclip.data.image_cache import load_images
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.pictures import CellImage, FileImage
from hnclip.data.problems import ERRORS
from hnclip.data.scenes import scene_records
from hnclip.data.views import IMAGE_VIEWS

SMALL = ImageTransform(8)
BOX = (5, 3, 25, 17)


@dataclass(frozen=True)
class Threshold:
    """Not edges, but easily foretold: white where red is bright."""

    level: int = 128
    release: str = "1"
    name = "threshold"

    @property
    def version(self) -> str:
        return f"{self.release} level={self.level}"

    def __call__(self, image: Image.Image) -> Image.Image:
        assert image.mode == "RGB"
        return image.getchannel("R").point(lambda red: 255 * (red > self.level))


def noise(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def painting(width: int = 40, height: int = 30) -> Image.Image:
    """Large patches, so that edge methods see lines."""
    return noise(5, 4).resize((width, height), Image.Resampling.NEAREST)


def saved(path: Path, picture: Image.Image, turn: int | None = None) -> FileImage:
    exif = Image.Exif()
    if turn is not None:
        exif[ExifTags.Base.Orientation] = turn
    picture.save(path, exif=exif)
    return FileImage(path)


def array(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture.convert("RGB"))


def test_a_crop_is_a_slice_of_the_picture(tmp_path: Path) -> None:
    picture = noise()
    crop = CropImage(saved(tmp_path / "a.png", picture), BOX).load()
    assert crop.size == (20, 14)
    assert np.array_equal(array(crop), array(picture)[3:17, 5:25])


@pytest.mark.parametrize("turn", range(1, 9))
def test_boxes_are_of_the_upright_picture(tmp_path: Path, turn: int) -> None:
    file = saved(tmp_path / "a.png", noise(), turn)
    upright = ImageOps.exif_transpose(Image.open(tmp_path / "a.png"))
    expected = upright.crop(BOX)
    crop = CropImage(file, BOX)
    assert np.array_equal(array(crop.load()), array(expected))
    # and whoever looks at the crop must not turn it again
    assert torch.equal(preprocess_image(crop.load(), SMALL), preprocess_image(Image.fromarray(array(expected)), SMALL))
    edges = EdgeImage(file, Threshold())
    assert edges.load().size == upright.size
    assert np.array_equal(array(edges.load())[..., 0], 255 * (array(upright)[..., 0] > 128))


@pytest.mark.parametrize(
    ("box", "inside"),
    [
        ((-5, -6, 10, 12), (0, 0, 10, 12)),
        ((30, 20, 100, 99), (30, 20, 40, 30)),
        ((-1, 5, 41, 6), (0, 5, 40, 6)),
        ((0, 0, 40, 30), (0, 0, 40, 30)),
    ],
)
def test_an_overhanging_box_is_cut_to_the_picture(
    tmp_path: Path, box: tuple[int, int, int, int], inside: tuple[int, int, int, int]
) -> None:
    file = saved(tmp_path / "a.png", noise())
    assert np.array_equal(array(CropImage(file, box).load()), array(noise().crop(inside)))


@pytest.mark.parametrize(
    ("box", "message"),
    [
        ((5, 5, 5, 9), "no area"),
        ((5, 9, 9, 9), "no area"),
        ((9, 5, 5, 9), "no area"),
        ((40, 0, 50, 10), r"\(40, 0, 50, 10\) lies outside the picture of 40 × 30"),
        ((0, 30, 10, 40), "outside"),
        ((-9, 0, 0, 10), "outside"),
        ((0, -9, 10, 0), "outside"),
    ],
)
def test_a_box_that_shows_nothing_is_a_bad_picture(
    tmp_path: Path, box: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(InvalidImage, match=message) as caught:
        CropImage(saved(tmp_path / "a.png", noise()), box).load()
    assert caught.value.kind in ERRORS
    assert "a.png" in str(caught.value)


def test_transparent_pictures_lie_on_white(tmp_path: Path) -> None:
    picture = noise().convert("RGBA")
    picture.putalpha(0)
    file = saved(tmp_path / "a.png", picture)
    assert (array(CropImage(file, BOX).load()) == 255).all()
    assert (array(EdgeImage(file, Threshold()).load()) == 255).all()


def test_grey_pictures_have_edges_and_crops(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.png", noise().convert("L"))
    assert np.array_equal(array(CropImage(file, BOX).load()), array(noise().convert("L"))[3:17, 5:25])
    assert EdgeImage(file, Canny()).load().mode == "L"


def test_values_without_a_meaning_are_a_bad_picture(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.tiff", Image.fromarray(np.full((30, 40), 1e6, dtype=np.float32)))
    for derived in (CropImage(file, BOX), EdgeImage(file, Threshold())):
        with pytest.raises(InvalidImage, match=r"a\.tiff.*only 0 to 255") as caught:
            derived.load()
        assert caught.value.kind == "unusual image"


def test_a_part_of_the_map_is_not_the_map_of_the_part(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.png", painting())
    whole = array(EdgeImage(file, Canny()).load())
    part = CropImage(EdgeImage(file, Canny()), (8, 3, 25, 17))
    assert np.array_equal(array(part.load()), whole[3:17, 8:25])
    other = EdgeImage(CropImage(file, (8, 3, 25, 17)), Canny())
    assert not np.array_equal(array(other.load()), array(part.load()))
    assert other.key != part.key
    assert other.read() != part.read()


def family(file: ImageSource) -> list[ImageSource]:
    """A picture and what can be made from it, each unlike the others."""
    return [
        file,
        CropImage(file, BOX),
        CropImage(file, (0, 0, 20, 14)),
        EdgeImage(file, Canny()),
        EdgeImage(file, Canny(400, 900)),
        EdgeImage(file, LaplacianOfGaussian()),
        CropImage(EdgeImage(file, Canny()), BOX),
        EdgeImage(CropImage(file, BOX), Canny()),
        CropImage(CropImage(file, BOX), BOX),
    ]


def test_names_and_bytes_tell_all_of_them_apart(tmp_path: Path) -> None:
    sources = family(saved(tmp_path / "a.png", painting()))
    for what in ({source.key for source in sources}, {source.read() for source in sources}, set(sources)):
        assert len(what) == len(sources)
    assert all(source.key.startswith(str(tmp_path / "a.png")) for source in sources)


def test_equal_ones_are_equal_also_after_pickling(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.png", painting())
    for source, again in zip(family(file), family(FileImage(tmp_path / "a.png"))):
        copy = pickle.loads(pickle.dumps(source))
        assert source == again == copy
        assert hash(source) == hash(again) == hash(copy)
        assert np.array_equal(array(copy.load()), array(source.load()))


def test_without_the_picture_there_is_nothing_to_derive(tmp_path: Path) -> None:
    for source in family(FileImage(tmp_path / "none.png")):
        with pytest.raises(InvalidImage, match="does not exist"):
            source.stamp()
        with pytest.raises(InvalidImage, match="does not exist"):
            source.load()


@pytest.mark.parametrize("cached", [False, True])
def test_all_of_them_go_through_the_cache(tmp_path: Path, cached: bool) -> None:
    sources = [
        source
        for number in range(2)
        for source in family(saved(tmp_path / f"{number}.png", noise(seed=number), turn=6))
    ]
    expected = torch.stack([preprocess_image(source.load(), SMALL) for source in sources])
    assert len({row.numpy().tobytes() for row in expected}) == len(sources)
    cache = tmp_path / "cache" if cached else None
    loaded = load_images(sources, SMALL, cache=cache, workers=2)
    assert loaded.kept == tuple(range(len(sources)))
    assert torch.equal(loaded.pixels[list(range(len(sources)))], expected)


def test_what_is_in_the_cache_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(tmp_path / "a.png", noise())
    sources = family(file)
    first = load_images(sources, SMALL, cache=tmp_path / "cache").pixels[:]
    reads: list[Path] = []
    read = FileImage.read
    monkeypatch.setattr(FileImage, "read", lambda image: reads.append(image.path) or read(image))
    assert torch.equal(load_images(sources, SMALL, cache=tmp_path / "cache").pixels[:], first)
    assert not reads
    # a picture that has changed is read, and so is everything that is made from it
    saved(file.path, noise(seed=1))
    os.utime(file.path, (1, 1))
    second = load_images(sources, SMALL, cache=tmp_path / "cache").pixels[:]
    assert len(reads) >= len(sources)
    assert torch.equal(second, torch.stack([preprocess_image(source.load(), SMALL) for source in sources]))
    assert not torch.equal(second, first)


def test_another_release_of_the_tool_makes_the_map_anew(tmp_path: Path) -> None:
    class Later(Threshold):
        def __call__(self, image: Image.Image) -> Image.Image:
            return Image.new("L", image.size, 77)

    def load(method: EdgeMethod) -> int:
        file = saved(tmp_path / "a.png", Image.new("RGB", (20, 20), "white"))
        os.utime(file.path, (1, 1))
        return int(load_images([EdgeImage(file, method)], SMALL, cache=tmp_path / "cache").pixels[:].float().mean())

    assert load(Threshold()) == 255
    assert load(Later()) == 255  # it claims to be the same
    assert load(Later(release="2")) == 77


@pytest.mark.parametrize("cached", [False, True])
def test_bad_boxes_are_problems_and_the_others_stay(tmp_path: Path, cached: bool) -> None:
    file = saved(tmp_path / "a.png", noise())
    boxes = [BOX, (50, 50, 60, 60), (3, 3, 3, 9)]
    cache = tmp_path / "cache" if cached else None
    loaded = load_images([CropImage(file, box) for box in boxes], SMALL, cache=cache)
    assert loaded.kept == (0,)
    assert set(loaded.problems) == {1, 2}
    assert "lies outside" in loaded.problems[1].detail
    assert loaded.problems[1].where.endswith("a.png#crop=50,50,60,60")


def test_scenes_and_cells_are_bases_too(tmp_path: Path) -> None:
    record = scene_records("park", "train", families=1, members=4)[0]
    region = record.regions[0]
    whole = array(record.image.load())
    left, top, right, bottom = region.box
    crop = CropImage(record.image, region.box)
    assert np.array_equal(array(crop.load()), whole[top:bottom, left:right])
    content = saved(tmp_path / "a.png", noise()).read()
    cell = CellImage("table:3", "v1", lambda: content)
    assert np.array_equal(array(CropImage(cell, BOX).load()), array(noise())[3:17, 5:25])
    sources = [*family(record.image), *family(cell)]
    loaded = load_images(sources, SMALL, cache=tmp_path / "cache")
    assert torch.equal(loaded.pixels[:], torch.stack([preprocess_image(source.load(), SMALL) for source in sources]))
    assert pickle.loads(pickle.dumps(crop)) == crop
    assert crop.stamp() == record.image.stamp()


def test_grey_pictures(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.png", noise())
    grey = grey_of(file)
    assert np.array_equal(np.asarray(grey.load()), np.asarray(noise().convert("L")))
    assert torch.equal(preprocess_image(grey.load(), SMALL)[0], preprocess_image(grey.load(), SMALL)[2])
    assert grey.key != file.key
    assert grey.read() != file.read()


@pytest.mark.parametrize("size", [(40, 30), (80, 60), (20, 15), (26, 20), (27, 20), (13, 10)])
def test_crops_of_maps_of_another_size(tmp_path: Path, size: tuple[int, int]) -> None:
    """White where the box of the picture is: also in the crop of the map, but for what its coarser pixels show."""
    picture = saved(tmp_path / "a.png", noise())
    shown = Image.new("L", (40, 30))
    shown.paste(255, BOX)
    large = shown.resize((40 * 12, 30 * 12), Image.Resampling.NEAREST)
    edges = saved(tmp_path / "map.png", large.resize(size, Image.Resampling.BOX))
    crop = map_crop_of(edges, BOX, picture).load()
    for side, (start, stop) in enumerate(((5, 25), (3, 17))):
        exact = (stop - start) * size[side] / (40, 30)[side]
        assert exact <= crop.size[side] < exact + 2
    inner = np.asarray(crop.convert("L"))[1:-1, 1:-1]
    assert inner.min() > 200
    rest = (
        np.asarray(Image.open(tmp_path / "map.png"), dtype=int).sum() - np.asarray(crop.convert("L"), dtype=int).sum()
    )
    assert abs(rest) <= 255  # nothing of the box is outside, but for rounding of grey levels


@pytest.mark.parametrize("size", [(40, 40), (30, 40), (41, 28), (20, 17)])
def test_a_map_of_another_shape_is_a_bad_picture(tmp_path: Path, size: tuple[int, int]) -> None:
    edges, picture = saved(tmp_path / "map.png", noise(*size)), saved(tmp_path / "a.png", noise())
    with pytest.raises(InvalidImage, match=rf"map\.png.*{size[0]} × {size[1]} .*40 × 30") as caught:
        map_crop_of(edges, BOX, picture).load()
    assert caught.value.kind in ERRORS


def test_crops_of_maps_know_both_files(tmp_path: Path) -> None:
    """The cache must see when either changes, and look at neither as long as nothing does."""
    edges, picture = saved(tmp_path / "map.png", noise(20, 15)), saved(tmp_path / "a.png", noise())
    crop = map_crop_of(edges, BOX, picture)
    stamp, content = crop.stamp(), crop.read()
    saved(tmp_path / "a.png", noise(80, 60))
    os.utime(tmp_path / "a.png", ns=(1, 1))
    assert crop.stamp() != stamp
    assert crop.read() != content
    assert crop.load().size == (6, 5)  # BOX is a quarter as large now: 1.25 … 6.25 and 0.75 … 4.25
    (tmp_path / "a.png").write_bytes(b"no picture")
    assert str(picture.path) in crop.key  # which reads nothing


def test_views_of_maps_that_the_source_brings_along(tmp_path: Path) -> None:
    picture = saved(tmp_path / "a.png", noise())
    whole = saved(tmp_path / "map.png", painting(80, 60))
    part = saved(tmp_path / "part.png", noise(9, 7))
    regions = (Region(BOX, "One."), Region(BOX, "Two.", edges=part))
    record = Record("a", picture, ("A.",), None, regions=regions, edges=whole)
    grey = painting(80, 60).convert("L")
    shown = {name: IMAGE_VIEWS[name](record) for name in ("edge", "edge_crop_1", "edge_crop_2")}
    expected = (grey, grey.crop((10, 6, 50, 34)), noise(9, 7).convert("L"))
    for view, right in zip(shown.values(), expected):
        assert view is not None
        assert np.array_equal(array(view.load()), array(right))
    assert IMAGE_VIEWS["edge_crop_3"](record) is None
    # Maps that are made here have the size of the picture, whose file nobody has to look at for that.
    made = EdgeImage(picture, Canny())
    derived = Record("a", picture, ("A.",), None, regions=regions[:1], edges=made)
    assert IMAGE_VIEWS["edge"](derived) == made
    assert IMAGE_VIEWS["edge_crop_1"](derived) == CropImage(made, BOX)
