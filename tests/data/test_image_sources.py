"""Images from files, tars and cells: damage is reported, and nothing too large is decoded."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hnclip.core import ImageSource, InvalidImage
from hnclip.data import image_sources
from hnclip.data.image_sources import FORMATS, CellImage, FileImage, TarImage, decode_image, is_image_name
from hnclip.data.validate import ERRORS


def encoded(kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(file, kind)
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
    """The same image as a file, in a tar, and in a cell."""
    (tmp_path / "a.png").write_bytes(encoded())
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(tmp_path / "a.png", "first.png")
        tar.add(tmp_path / "a.png", "deep/second.png")
    with tarfile.open(tmp_path / "all.tar") as tar:
        member = tar.getmember("deep/second.png")
    return [
        FileImage(tmp_path / "a.png"),
        TarImage(tmp_path / "all.tar", member.name, member.offset_data, member.size),
        CellImage("table.parquet:3", "v1", encoded),
    ]


def test_all_sources_give_the_same_bytes_and_pixels(sources: list[ImageSource], tmp_path: Path) -> None:
    expected = Image.open(io.BytesIO(encoded()))
    for source in sources:
        assert source.read() == encoded()
        assert np.array_equal(np.asarray(source.load()), np.asarray(expected))
        assert pickle.loads(pickle.dumps(source)) == source
    assert len({source.key for source in sources}) == 3
    before = [source.stamp() for source in sources[:2]]
    for name in ("a.png", "all.tar"):
        os.utime(tmp_path / name, (1, 1))
    assert all(old != source.stamp() for old, source in zip(before, sources))


def test_a_file_is_one_image_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    images = [FileImage("a.png"), FileImage(tmp_path / "a.png"), FileImage("a.png", str(tmp_path))]
    assert len({*images}) == len({image.key for image in images}) == 1
    assert images[2].path == tmp_path / "a.png"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "corrupt image"),
        (b"this is not an image", "corrupt image"),
        (encoded("JPEG")[:-400], "truncated image"),
        (encoded("PNG")[:-900], "truncated image"),
        (bomb(60_000, 60_000), "oversized image"),
        (bomb(12_000, 12_000)[:33], "corrupt image"),  # large, allowed, and nothing after the header
    ],
)
def test_damage_is_reported_with_its_place(content: bytes, kind: str) -> None:
    with pytest.raises(InvalidImage, match="photo 7") as caught:
        decode_image(content, "photo 7")
    assert caught.value.kind == kind
    assert kind in ERRORS


def test_formats_that_start_other_programs_and_large_images_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.BytesIO()
    Image.new("RGB", (9, 9)).save(drawn, "EPS")  # Pillow would start Ghostscript
    with pytest.raises(InvalidImage, match="format"):
        CellImage("x", "1", drawn.getvalue).load()
    content = encoded()
    monkeypatch.setattr(image_sources, "MAX_PIXELS", 1199)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(InvalidImage, match="1,199"):
        decode_image(content, "photo 7")


def test_missing_files_directories_and_pipes(tmp_path: Path) -> None:
    """A pipe is not opened: that would wait until something is written to it."""
    os.mkfifo(tmp_path / "pipe.png")
    sources = [FileImage(tmp_path / name) for name in ("no.png", "pipe.png", "", "a\0.png", "x" * 300, "pipe.png/a")]
    for source in [*sources, TarImage(tmp_path / "no.tar", "a", 0, 1)]:
        for action in (source.stamp, source.read):
            with pytest.raises(InvalidImage) as caught:
                action()
            assert caught.value.kind == "missing image"


def test_names_of_images() -> None:
    assert all(is_image_name(name) for name in ("a.jpg", "b/c.JPEG", "d.e.webp", "a.avif", "a.jp2", "a.pcx"))
    assert not any(is_image_name(name) for name in ("a.txt", "jpg", ".hidden.jpg", "x/._a.jpg", "a.jpg.txt"))
    extensions = Image.registered_extensions()
    assert all(extensions.get(suffix, kind) == kind for kind, suffixes in FORMATS.items() for suffix in suffixes)
