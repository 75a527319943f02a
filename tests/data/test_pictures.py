"""Pictures from files, tars and cells; damage is named, and nothing large is decoded."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import threading
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hnclip.core import ImageSource, InvalidImage
from hnclip.data import pictures
from hnclip.data.image_sources import CellImage, FileImage, TarImage, decode_image, is_image_name
from hnclip.data.problems import ERRORS


def encoded(kind: str = "PNG", size: tuple[int, int] = (40, 30)) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, kind)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A small PNG that claims to be huge."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


@pytest.fixture
def sources(tmp_path: Path) -> list[ImageSource]:
    """The same picture as a file, in a tar, and in a cell."""
    content = encoded()
    (tmp_path / "a.png").write_bytes(content)
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(tmp_path / "a.png", "first.png")
        tar.add(tmp_path / "a.png", "deep/second.png")
    with tarfile.open(tmp_path / "all.tar") as tar:
        member = tar.getmember("deep/second.png")
    return [
        FileImage(tmp_path / "a.png"),
        TarImage(tmp_path / "all.tar", member.name, member.offset_data, member.size),
        CellImage("table.parquet:3", "v1", lambda: content),
    ]


def test_all_sources_give_the_same_bytes_and_pixels(sources: list[ImageSource]) -> None:
    expected = Image.open(io.BytesIO(encoded()))
    for source in sources:
        assert source.read() == encoded()
        assert np.array_equal(np.asarray(source.load()), np.asarray(expected))
        assert source.stamp() == source.stamp()
    assert len({source.key for source in sources}) == 3


def test_a_changed_file_has_another_stamp(sources: list[ImageSource], tmp_path: Path) -> None:
    before = [source.stamp() for source in sources[:2]]
    for name in ("a.png", "all.tar"):
        os.utime(tmp_path / name, (1, 1))
    assert all(old != source.stamp() for old, source in zip(before, sources))


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "corrupt image"),
        (b"this is no picture", "corrupt image"),
        (encoded("JPEG")[:-400], "truncated image"),
        (encoded("PNG")[:-900], "truncated image"),
        (bomb(60_000, 60_000), "oversized image"),
        (bomb(12_000, 12_000)[:33], "corrupt image"),  # large, allowed, and nothing behind the header
    ],
)
def test_damage_is_named_with_its_place(content: bytes, kind: str) -> None:
    with pytest.raises(InvalidImage, match="photo 7") as caught:
        decode_image(content, "photo 7")
    assert caught.value.kind == kind
    assert kind in ERRORS


def test_formats_that_start_other_programs_are_no_pictures(tmp_path: Path) -> None:
    drawn = io.BytesIO()
    Image.new("RGB", (9, 9)).save(drawn, "EPS")  # Pillow would start Ghostscript
    (tmp_path / "x.png").write_bytes(drawn.getvalue())
    for look in (FileImage(tmp_path / "x.png").load, FileImage(tmp_path / "x.png").shape):
        with pytest.raises(InvalidImage, match="is no picture that Pillow knows"):
            look()


def test_a_large_picture_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded()
    monkeypatch.setattr(pictures, "MAX_PIXELS", 1199)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(InvalidImage, match="40 × 30 pixels; at most 1,199"):
        decode_image(content, "photo 7")


def test_a_pipe_is_no_picture_and_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "x.png"
    os.mkfifo(pipe)
    # Whoever opens it waits until it is written to: then what is read is no picture, and the message another one.
    writer = threading.Timer(2, lambda: pipe.write_bytes(b"late"))
    writer.daemon = True
    writer.start()
    for action in (FileImage(pipe).stamp, FileImage(pipe).read, FileImage(pipe).shape):
        with pytest.raises(InvalidImage, match=r"x\.png is no file") as caught:
            action()
        assert caught.value.kind == "missing image"
    writer.cancel()


def test_missing_files_are_named(tmp_path: Path) -> None:
    for source in (FileImage(tmp_path / "no.png"), TarImage(tmp_path / "no.tar", "a", 0, 1), FileImage(tmp_path)):
        with pytest.raises(InvalidImage, match=r"no\.png|no\.tar|is no file") as caught:
            source.read()
        assert caught.value.kind == "missing image"
    with pytest.raises(InvalidImage, match="does not exist"):
        FileImage(tmp_path / "no.png").stamp()


def turned(kind: str) -> bytes:
    """A picture of 40 × 30 pixels that its camera held on its side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.open(io.BytesIO(encoded())).save(file, kind, exif=exif)
    return file.getvalue()


def test_shapes_are_those_of_upright_pictures(sources: list[ImageSource]) -> None:
    for source in sources:
        assert source.shape() == ImageSource.shape(source) == (40, 30)
    for kind in ("JPEG", "PNG", "TIFF", "WEBP"):
        source = CellImage("table.parquet:3", "v1", lambda kind=kind: turned(kind))
        assert source.shape() == ImageSource.shape(source) == (30, 40)


def test_shapes_are_read_from_the_head_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    content = turned("JPEG")
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    assert CellImage("a", "v1", lambda: content[:-400]).shape() == (30, 40)


def test_shapes_of_files_cost_their_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = turned("JPEG") + b"x" * 10_000_000
    (tmp_path / "a.jpg").write_bytes(content)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "a.jpg", "a.jpg")
    with tarfile.open(tmp_path / "a.tar") as tar:
        place = tar.getmember("a.jpg")
    sources = [
        FileImage(tmp_path / "a.jpg"),
        TarImage(tmp_path / "a.tar", "a.jpg", place.offset_data, place.size),
    ]
    monkeypatch.setattr(FileImage, "read", lambda self: pytest.fail("read as a whole"))
    monkeypatch.setattr(TarImage, "read", lambda self: pytest.fail("read as a whole"))
    for source in sources:
        tracemalloc.start()
        assert source.shape() == (30, 40)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()
    for missing in (FileImage(tmp_path / "no.jpg"), TarImage(tmp_path / "no.tar", "a", 0, 1), FileImage(tmp_path)):
        with pytest.raises(InvalidImage) as caught:
            missing.shape()
        assert caught.value.kind == "missing image"


def test_a_shape_inside_a_tar_ends_with_its_picture(tmp_path: Path) -> None:
    """What comes behind a truncated picture is another file's."""
    for cut in (0, 10):
        (tmp_path / "a.bin").write_bytes(b"before" + turned("JPEG")[:cut] + turned("JPEG"))
        with pytest.raises(InvalidImage, match=r"a\.bin!a"):
            TarImage(tmp_path / "a.bin", "a", 6, cut).shape()


@pytest.mark.parametrize("content", [b"", b"this is no picture", encoded("PNG")[:-900], bomb(60_000, 60_000)])
def test_shapes_of_damaged_pictures_are_refused(content: bytes) -> None:
    with pytest.raises(InvalidImage, match="table 7"):
        CellImage("table 7", "v1", lambda: content).shape()


def test_names_of_pictures() -> None:
    assert all(is_image_name(name) for name in ("a.jpg", "b/c.JPEG", "d.e.webp"))
    assert not any(is_image_name(name) for name in ("a.txt", "jpg", ".hidden.jpg", "x/._a.jpg", "a.jpg.txt"))
