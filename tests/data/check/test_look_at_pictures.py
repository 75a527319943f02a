from __future__ import annotations

import struct
import threading
import warnings
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image
from small_records import blobs, picture_file

from hnclip.core import ImageSource, Problem
from hnclip.data.check.pictures import Picture, look_at
from hnclip.data.image_sources import FileImage


def png_of_size(width, height):
    """A PNG whose header promises this many pixels."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


def see(*sources, workers=2, progress=iter):
    return look_at(sources, None, workers=workers, progress=progress)


def test_a_sound_picture(tmp_path):
    [found] = see(picture_file(tmp_path, "a.png", blobs(1, 90, 70)))
    assert isinstance(found, Picture)
    assert (found.width, found.height, found.shortest) == (90, 70, 70)
    assert (found.format, found.mode, found.rotated) == ("PNG", "RGB", False)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_seen_as_its_camera_held_it(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    blobs(1, 90, 70).save(tmp_path / "a.jpg", exif=exif)
    [found] = see(FileImage(tmp_path / "a.jpg"))
    assert (found.width, found.height) == ((90, 70) if orientation < 5 else (70, 90))
    assert found.rotated == (orientation > 1)


def test_damaged_exif_counts_as_none(tmp_path):
    blobs(1).save(tmp_path / "a.jpg", exif=b"Exif\0\0no exif")
    [found] = see(FileImage(tmp_path / "a.jpg"))
    assert not found.rotated


def test_each_kind_of_damage(tmp_path):
    whole = picture_file(tmp_path, "whole.jpg", blobs(1, 300, 300)).read()
    floats = Image.fromarray(np.array([[0.5, 1e4]], np.float32))
    sources = {
        "missing image": FileImage(tmp_path / "nowhere.jpg"),
        "corrupt image": picture_file(tmp_path, "text.jpg", b"no picture"),
        "truncated image": picture_file(tmp_path, "half.jpg", whole[: len(whole) // 2]),
        "oversized image": picture_file(tmp_path, "bomb.png", png_of_size(60_000, 60_000)),
        "unusual image": picture_file(tmp_path, "floats.tiff", floats),
    }
    found = see(*sources.values())
    assert all(isinstance(bad, Problem) for bad in found)
    assert [(bad.kind, bad.where) for bad in found] == [(kind, source.key) for kind, source in sources.items()]
    for bad, source in zip(found, sources.values()):
        assert str(source.path) in bad.detail
    [empty] = see(picture_file(tmp_path, "empty.jpg", b""))
    assert (empty.kind, empty.detail) == ("corrupt image", f"{tmp_path / 'empty.jpg'} is empty")


def test_a_bomb_is_refused_by_its_header(tmp_path, monkeypatch):
    def load(self):
        raise AssertionError("decoded")

    source = picture_file(tmp_path, "bomb.png", png_of_size(15_000, 15_000))  # between Pillow's warning and its error
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    [found] = see(source)
    assert found.kind == "oversized image"


def test_large_pictures_raise_no_warning_in_any_thread(tmp_path):
    """Pillow warns from 89 million pixels on; this one promises them and has none."""
    sources = [picture_file(tmp_path, f"{number}.png", png_of_size(10_000, 10_000)) for number in range(8)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = see(*sources, workers=4)
    assert {bad.kind for bad in found} <= {"truncated image", "corrupt image"}


def test_the_same_bytes_are_the_same_content_under_any_name(tmp_path):
    one, other = picture_file(tmp_path, "a.png", 1), picture_file(tmp_path, "b.png", 1)
    third = picture_file(tmp_path, "c.png", 2)
    found = see(one, other, third)
    assert found[0] == found[1]
    assert found[0].content != found[2].content


@dataclass(frozen=True)
class Counted(ImageSource):
    """A picture that knows how many of its kind are open at once."""

    number: int
    open: list
    most: list
    lock: threading.Lock

    @property
    def key(self):
        return str(self.number)

    def stamp(self):
        return ""

    def read(self):
        with self.lock:
            self.open.append(self.number)
            self.most.append(len(self.open))
        return str(self.number).encode()

    def decode(self, content):
        picture = blobs(self.number, 20 + self.number, 50)
        with self.lock:
            self.open.remove(self.number)
        return picture


def test_pictures_stream_in_order_and_no_more_at_a_time_than_workers():
    shared = ([], [], threading.Lock())
    steps = []

    def progress(numbers):
        for number in numbers:
            steps.append(number)
            yield number

    found = see(*(Counted(number, *shared) for number in range(300)), workers=3, progress=progress)
    assert [picture.width for picture in found] == list(range(20, 320))
    assert steps == list(range(300))
    assert max(shared[1]) <= 3
    assert found[0].format == "no format"  # not from a file


def test_no_pictures_and_no_workers():
    assert see() == []
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        see(workers=0)
