"""Images from files, tars and cells, crops and edge maps of them, and views; damage is reported."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from hnclip.core import ImageSource, InvalidImage, Record, Region
from hnclip.data.image_sources import (
    CellImage,
    CropImage,
    EdgeImage,
    FileImage,
    TarImage,
    decode_image,
    is_image_name,
    root,
)
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.parts import IMAGE_VIEWS, TEXT_VIEWS
from hnclip.data.validate import ERRORS

BOX = (5, 3, 25, 17)


def noise(width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def painting() -> Image.Image:
    """Large areas of one colour, so that there are lines."""
    return noise(5, 4).resize((40, 30), Image.Resampling.NEAREST)


def encoded(kind: str = "PNG") -> bytes:
    noise().save(file := io.BytesIO(), kind)
    return file.getvalue()


def save(path: Path, image: Image.Image, turn: int | None = None) -> FileImage:
    exif = Image.Exif()
    if turn is not None:
        exif[ExifTags.Base.Orientation] = turn
    image.save(path, exif=exif)
    return FileImage(path)


def array(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def bomb(width: int, height: int) -> bytes:
    """A small PNG that claims to be huge."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


def test_all_sources_give_the_same_bytes_and_pixels(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    with tarfile.open(tmp_path / "all.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(tmp_path / "a.png")
    tarred = TarImage(tmp_path / "all.tar", "a.png", tarfile.BLOCKSIZE, len(encoded()))
    sources = [FileImage(tmp_path / "a.png"), tarred, CellImage("table.parquet:3", "v1", encoded)]
    for source in sources:
        assert source.read() == encoded()
        assert np.array_equal(array(source.load()), array(noise()))
        assert pickle.loads(pickle.dumps(source)) == source
    assert len({source.key for source in sources}) == 3
    for source, name in zip(sources, ("a.png", "all.tar")):
        before = source.stamp()
        os.utime(tmp_path / name, (1, 1))
        assert source.stamp() != before


def test_a_file_is_one_image_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    images = [FileImage("a.png"), FileImage(tmp_path / "a.png"), FileImage("a.png", str(tmp_path))]
    assert len({*images}) == len({image.key for image in images}) == 1
    assert images[2].path == tmp_path / "a.png"
    assert all(is_image_name(name) for name in ("a.jpg", "b/c.JPEG", "d.e.webp", "a.avif", "a.jp2", "a.pcx"))
    assert not any(is_image_name(name) for name in ("a.txt", "jpg", ".hidden.jpg", "x/._a.jpg", "a.jpg.txt"))


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "corrupt image"),
        (b"this is not an image", "corrupt image"),
        (encoded("EPS"), "corrupt image"),  # Pillow would start Ghostscript
        (encoded("JPEG")[:-400], "truncated image"),
        (encoded("PNG")[:-900], "truncated image"),
        (bomb(13_378, 13_378), "oversized image"),  # more than 178,956,970 pixels
        (bomb(12_000, 12_000)[:33], "corrupt image"),  # large, allowed, and nothing after the header
    ],
)
def test_damage_is_reported_with_its_place(content: bytes, kind: str) -> None:
    with pytest.raises(InvalidImage, match="image 7") as caught:
        decode_image(content, "image 7")
    assert caught.value.kind == kind
    assert kind in ERRORS


def test_missing_files_directories_and_pipes_are_missing_images(tmp_path: Path) -> None:
    """A pipe is not opened: that would wait until something is written to it."""
    os.mkfifo(tmp_path / "pipe.png")
    names = ("no.png", "pipe.png", "", "a\0.png", "x" * 300, "pipe.png/a")
    sources = [source for name in names for source in family(FileImage(tmp_path / name))]
    for source in [*sources, TarImage(tmp_path / "no.tar", "a", 0, 1)]:
        for action in (source.stamp, source.read):
            with pytest.raises(InvalidImage) as caught:
                action()
            assert caught.value.kind == "missing image"


# Derived images


def family(file: ImageSource) -> list[ImageSource]:
    """An image and different ones that are derived from it."""
    crop, edges = CropImage(file, BOX), EdgeImage(file)
    others = [CropImage(file, (0, 0, 20, 14)), EdgeImage(file, 400, 900)]
    return [file, crop, edges, *others, CropImage(edges, BOX), EdgeImage(crop), CropImage(crop, BOX)]


@pytest.mark.parametrize(("turn", "suffix"), [(1, "png"), (5, "png"), (6, "jpg"), (3, "tiff")])
def test_boxes_and_maps_are_of_the_upright_image(tmp_path: Path, turn: int, suffix: str) -> None:
    file = save(tmp_path / f"a.{suffix}", painting(), turn)
    upright = ImageOps.exif_transpose(file.load())
    crop, edges = CropImage(file, BOX).load(), EdgeImage(file).load()
    assert np.array_equal(array(crop), array(upright)[3:17, 5:25])
    assert (edges.size, edges.mode) == (upright.size, "L")
    assert np.array_equal(array(edges), array(EdgeImage(save(tmp_path / "b.png", upright.convert("RGB"))).load()))
    plain = Image.fromarray(array(crop))  # without any EXIF
    assert torch.equal(preprocess_image(crop, ImageTransform(8)), preprocess_image(plain, ImageTransform(8)))


@pytest.mark.parametrize(
    ("box", "inside"),
    [
        ((-5, -6, 10, 12), (0, 0, 10, 12)),
        ((30, 20, 100, 99), (30, 20, 40, 30)),
        ((-1, 5, 41, 6), (0, 5, 40, 6)),
        *(((box), None) for box in [(5, 5, 5, 9), (5, 9, 9, 9), (9, 5, 5, 9), (40, 0, 50, 10), (0, -9, 10, 0)]),
    ],
)
def test_boxes_are_clipped_to_the_image_and_invalid_without_area(tmp_path: Path, box: tuple, inside: tuple) -> None:
    crop = CropImage(save(tmp_path / "a.png", noise()), box)
    if inside is not None:
        assert np.array_equal(array(crop.load()), array(noise().crop(inside)))
        return
    with pytest.raises(InvalidImage, match=r"a\.png"):
        crop.load()


def test_derived_images_of_transparent_and_unusual_ones(tmp_path: Path) -> None:
    clear = noise().convert("RGBA")
    clear.putalpha(0)
    file = save(tmp_path / "clear.png", clear)
    assert (array(CropImage(file, BOX).load()) == 255).all()
    assert not array(EdgeImage(file).load()).any()
    floats = save(tmp_path / "a.tiff", Image.fromarray(np.full((30, 40), 1e6, dtype=np.float32)))
    for derived in (CropImage(floats, BOX), EdgeImage(floats)):
        with pytest.raises(InvalidImage) as caught:
            derived.load()
        assert caught.value.kind == "unusual image"


def test_keys_and_bytes_tell_derived_images_apart(tmp_path: Path) -> None:
    file = save(tmp_path / "a.png", painting())
    sources = family(file)
    for found in ({source.key for source in sources}, {source.read() for source in sources}, set(sources)):
        assert len(found) == len(sources)
    for source in sources:
        copy = pickle.loads(pickle.dumps(source))
        assert source == copy
        assert (root(source), source.stamp()) == (file, file.stamp())
        assert np.array_equal(array(copy.load()), array(source.load()))
    part, other = CropImage(EdgeImage(file), (8, 3, 25, 17)), EdgeImage(CropImage(file, (8, 3, 25, 17)))
    assert np.array_equal(array(part.load()), array(EdgeImage(file).load())[3:17, 8:25])
    assert not np.array_equal(array(other.load()), array(part.load()))  # has other edges at its border


def test_edges_are_where_colours_change_by_the_threshold() -> None:
    def edges_of(image: Image.Image, high: float = 200) -> np.ndarray:
        return np.asarray(EdgeImage(FileImage("unused"), 100, high).apply(image))

    colours = Image.new("RGB", (40, 30), (200, 0, 0))
    assert not edges_of(colours).any()
    colours.paste((0, 102, 0), (20, 0, 40, 30))  # of the same brightness
    white = edges_of(colours)
    assert set(np.unique(white)) == {0, 255}
    assert np.isin(np.nonzero(white)[1], range(18, 22)).all()
    # Sobel's gradient at a vertical step of h levels is 4·h.
    assert [edges_of(colours, high).any() for high in (799, 801)] == [True, False]


def test_views() -> None:
    image = CellImage("a", "1", bytes)
    first, second = Region((0, 0, 5, 5), "One."), Region((1, 1, 6, 6), "Two.")
    record = Record("a", image, ("A dog. It runs.", "A cat"), None, regions=(first, second), filtered=("a", "b"))
    assert {name: view(record) for name, view in IMAGE_VIEWS.items()} == {
        "full": image,
        "crop": CropImage(image, first.box),
        "edge": EdgeImage(image),
        "edge_crop_1": CropImage(EdgeImage(image), first.box),
        "edge_crop_2": CropImage(EdgeImage(image), second.box),
        "edge_crop_3": None,
    }
    texts = {"caption": [*record.captions], "short": ["A dog", "A cat"], "sentence": ["One."], "filtered": ["a", "b"]}
    assert {name: list(view.texts(record)) for name, view in TEXT_VIEWS.items()} == texts
    bare = replace(record, regions=(), filtered=(), short="short")
    assert {name for name, view in IMAGE_VIEWS.items() if view(bare) is not None} == {"full", "edge"}
    found = [list(TEXT_VIEWS[name].texts(bare)) for name in ("short", "sentence", "filtered")]
    assert found == [["short", "short"], [None], [None, None]]
    assert [name for name, view in TEXT_VIEWS.items() if not view.by_caption] == ["sentence"]
