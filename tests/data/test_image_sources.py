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
from PIL import ExifTags, Image, ImageOps

from hnclip.core import ImageSource, InvalidImage, Record, Region
from hnclip.data.image_sources import CellImage, CropImage, EdgeImage, FileImage, TarImage, decode_image, root
from hnclip.data.parts import IMAGE_VIEWS, TEXT_VIEWS

BOX = (5, 3, 25, 17)
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
# Large areas of one colour, so that there are lines.
PAINTING = NOISE.crop((0, 0, 5, 4)).resize((40, 30), Image.Resampling.NEAREST)


def encoded(kind: str = "PNG") -> bytes:
    NOISE.save(file := io.BytesIO(), kind)
    return file.getvalue()


def save(path: Path, image: Image.Image, turn: int = 1) -> FileImage:
    exif = Image.Exif()
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
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100))


def family(file: ImageSource) -> list[ImageSource]:
    """An image and different ones that are derived from it."""
    crop, edges = CropImage(file, BOX), EdgeImage(file)
    others = [CropImage(file, (0, 0, 20, 14)), EdgeImage(file, 400, 900)]
    return [file, crop, edges, *others, CropImage(edges, BOX), EdgeImage(crop), CropImage(crop, BOX)]


def test_all_sources_give_the_same_bytes_and_pixels(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    with tarfile.open(tmp_path / "all.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(tmp_path / "a.png")
    tarred = TarImage(tmp_path / "all.tar", "a.png", tarfile.BLOCKSIZE, len(encoded()))
    sources = [FileImage(tmp_path / "a.png"), tarred, CellImage("table.parquet:3", "v1", encoded)]
    for source in sources:
        assert source.read() == encoded()
        assert np.array_equal(array(source.load()), array(NOISE))
    assert len({source.key for source in sources}) == 3
    for source, name in zip(sources, ("a.png", "all.tar")):
        before = source.stamp()
        os.utime(tmp_path / name, (1, 1))
        assert source.stamp() != before


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (encoded("EPS"), "corrupt image"),  # Pillow would start Ghostscript
        (encoded("JPEG")[:-400], "truncated image"),
        (bomb(13_378, 13_378), "oversized image"),  # more than 178,956,970 pixels
        (bomb(12_000, 12_000)[:33], "corrupt image"),  # large, allowed, and nothing after the header
    ],
)
def test_damage_is_reported_with_its_place(content: bytes, kind: str) -> None:
    with pytest.raises(InvalidImage, match="image 7") as caught:
        decode_image(content, "image 7")
    assert caught.value.kind == kind


def test_missing_files_directories_and_pipes_are_missing_images(tmp_path: Path) -> None:
    """A pipe is not opened: that would wait until something is written to it."""
    os.mkfifo(tmp_path / "pipe.png")
    sources = [source for name in ("no.png", "pipe.png", "a\0.png") for source in family(FileImage(tmp_path / name))]
    for source in [*sources, TarImage(tmp_path / "no.tar", "a", 0, 1)]:
        for action in (source.stamp, source.read):
            with pytest.raises(InvalidImage) as caught:
                action()
            assert caught.value.kind == "missing image"


# Derived images


@pytest.mark.parametrize(("turn", "suffix"), [(1, "png"), (5, "png"), (6, "jpg")])
def test_boxes_and_maps_are_of_the_upright_image_and_clipped_to_it(tmp_path: Path, turn: int, suffix: str) -> None:
    file = save(tmp_path / f"a.{suffix}", PAINTING, turn)
    upright = ImageOps.exif_transpose(file.load())
    edges = EdgeImage(file).load()
    for box, inside in {BOX: BOX, (-5, -6, 10, 12): (0, 0, 10, 12), (20, 20, 99, 99): (20, 20, *upright.size)}.items():
        assert np.array_equal(array(CropImage(file, box).load()), array(upright.crop(inside)))
    for box in ((5, 5, 5, 9), (9, 5, 5, 9), (40, 0, 50, 10), (0, -9, 10, 0)):
        with pytest.raises(InvalidImage, match=file.path.name):
            CropImage(file, box).load()
    assert (edges.size, edges.mode) == (upright.size, "L")
    assert np.array_equal(array(edges), array(EdgeImage(save(tmp_path / "b.png", upright.convert("RGB"))).load()))


def test_keys_and_bytes_tell_derived_images_apart(tmp_path: Path) -> None:
    file = save(tmp_path / "a.png", PAINTING)
    sources = family(file)
    for found in ({source.key for source in sources}, {source.read() for source in sources}, set(sources)):
        assert len(found) == len(sources)
    for source in sources:
        copy = pickle.loads(pickle.dumps(source))  # for the processes that decode
        assert source == copy
        assert (root(source), source.stamp()) == (file, file.stamp())
        assert np.array_equal(array(copy.load()), array(source.load()))


def test_views() -> None:
    image = CellImage("a", "1", bytes)
    first, second = Region((0, 0, 5, 5), "One."), Region((1, 1, 6, 6), "Two.")
    record = Record("a", image, ("A dog. It runs.", "A cat"), None, regions=(first, second), filtered=("a", "b"))
    edges, crop = EdgeImage(image), CropImage(image, first.box)
    views = [image, crop, edges, CropImage(edges, first.box), CropImage(edges, second.box), None]
    assert [view(record) for view in IMAGE_VIEWS.values()] == views
    texts = {"caption": [*record.captions], "short": ["A dog", "A cat"], "sentence": ["One."], "filtered": ["a", "b"]}
    assert {name: list(view.texts(record)) for name, view in TEXT_VIEWS.items()} == texts
    bare = replace(record, regions=(), filtered=(), short="short")
    assert [list(view.texts(bare)) for view in TEXT_VIEWS.values()][1:] == [["short"] * 2, [None], [None] * 2]
