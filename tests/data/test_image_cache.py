"""The image cache: the right pixels, decoded once, whatever happens to the process, the disk or the files."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from hnclip.core import ImageSource
from hnclip.data.decoding import AHEAD
from hnclip.data.image_cache import list_caches, load_images
from hnclip.data.image_sources import CellImage, CropImage, EdgeImage, FileImage
from hnclip.data.images import ImageTransform, preprocess_image

SMALL = ImageTransform(8)
ROW, ENTRY = 3 * 8 * 8, 56  # bytes of an image and of its entry
NOISE = np.random.default_rng(0)


def encoded(size: tuple[int, int] = (12, 9), format: str = "png", **options) -> bytes:
    """An image of noise, unlike any other."""
    file = io.BytesIO()
    Image.fromarray(NOISE.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(file, format, **options)
    return file.getvalue()


def files(directory: Path, number: int) -> list[FileImage]:
    directory.mkdir(exist_ok=True)
    paths = [directory / f"{index:03}.png" for index in range(number)]
    for path in paths:
        path.write_bytes(encoded())
    return [FileImage(path) for path in paths]


def literal(images: list[ImageSource], transform: ImageTransform = SMALL) -> torch.Tensor:
    return torch.stack([preprocess_image(image.load(), transform) for image in images])


def store(cache: Path) -> tuple[Path, Path]:
    (info,) = list_caches(cache)
    return info.path / "pixels.u8", info.path / "index.bin"


@pytest.fixture
def work(monkeypatch) -> dict[str, list[str]]:
    """The files that were read and decoded."""
    done: dict[str, list[str]] = {"read": [], "decoded": []}
    read, decode = FileImage.read, FileImage.decode
    monkeypatch.setattr(FileImage, "read", lambda image: done["read"].append(image.path.name) or read(image))
    monkeypatch.setattr(
        FileImage, "decode", lambda image, content: done["decoded"].append(image.path.name) or decode(image, content)
    )
    return done


def test_memory_and_disk_hold_the_preprocessed_images(tmp_path):
    """More than are decoded ahead, some of them duplicates or derived, with the sizes of the upright images."""
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    images: list[ImageSource] = [*files(tmp_path / "images", 70)]
    images += [CellImage("cell \udcff", n, "1", lambda row: images[row].read()) for n in range(3)]
    images += [FileImage(tmp_path / "turned.jpg"), images[5]]
    images[-2].path.write_bytes(encoded((30, 20), "jpeg", exif=turned))
    images += [view for image in (images[1], images[-2]) for view in (CropImage(image, (2, 1, 9, 8)), EdgeImage(image))]
    expected = literal(images)
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        loaded = load_images(images, SMALL, cache=cache, workers=3)
        assert loaded.kept == tuple(range(len(images)))
        assert torch.equal(loaded.pixels[:], expected)
        assert loaded.sizes[70:].tolist() == [[12, 9]] * 3 + [[20, 30], [12, 9], [7, 7], [12, 9], [7, 7], [20, 30]]
        assert loaded.pixels.rows[70:73].tolist() == loaded.pixels.rows[:3].tolist()
        assert len(set(loaded.pixels.rows)) == 75


def test_what_is_cached_is_not_read_again_and_a_changed_file_is(tmp_path, work):
    images = files(tmp_path / "images", 5)
    steps: list[range] = []
    for count in (2, 5, 5):
        load_images(images[:count], SMALL, cache=tmp_path, progress=lambda todo: steps.append(todo) or iter(todo))
    assert (len(work["read"]), steps) == (5, [range(2), range(3)])
    work["read"].clear(), work["decoded"].clear()
    images[1].path.write_bytes(encoded((33, 21)))
    os.utime(images[2].path, ns=(1, 1))  # read again, and found to have the same content
    loaded = load_images(images, SMALL, cache=tmp_path)
    assert (sorted(work["read"]), work["decoded"]) == (["001.png", "002.png"], ["001.png"])
    assert torch.equal(loaded.pixels[:], literal(images))
    for other in ({}, {"mean": (0.5, 0.5, 0.5)}, {"shortest": 9}, {"squash": True}, {"resample": "nearest"}):
        transform = ImageTransform(8, **other)
        assert torch.equal(load_images(images, transform, cache=tmp_path).pixels[:], literal(images, transform))
    assert len(list_caches(tmp_path)) == 4  # colours are not part of the geometry


CHILD = """
import os, signal, sys
from itertools import count
from pathlib import Path
from hnclip.data.image_cache import load_images
from hnclip.data.images import ImageTransform
from hnclip.data.image_sources import FileImage

images, caches, *moments = sys.argv[1:]

class Counted(FileImage):
    def decode(self, content):
        os.write(1, b".")
        if next(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().decode(content)

sources, children = [Counted(path) for path in sorted(Path(images).iterdir())], []
for number, moment in enumerate(map(int, moments)):
    calls = count(1)
    child = os.fork()
    if not child:
        load_images(sources, ImageTransform(8), cache=Path(caches.format(number)), workers=2)
        os._exit(0)
    if moment:
        os.waitpid(child, 0)
    else:
        children.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def run(images: Path, caches: Path, *moments: int) -> int:
    """Fill caches in processes, each killed at the decode of that number, or with 0 not at all. Returns the number of
    decoded images."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, str(images), str(caches), *map(str, moments)]
    return len(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def test_killed_at_many_moments_only_images_in_flight_are_lost(tmp_path, work, caplog):
    images = files(tmp_path / "images", 120)
    expected, states, moments = literal(images), set(), range(1, 121, 11)
    run(tmp_path / "images", tmp_path / "cache {}", *moments)
    for number, moment in enumerate(moments):
        cache = tmp_path / f"cache {number}"
        known = sum(info.images for info in list_caches(cache))
        states.add(known)
        work["decoded"].clear()
        assert known >= moment - AHEAD - 2
        assert torch.equal(load_images(images, SMALL, cache=cache).pixels[:], expected)
        assert len(work["decoded"]) == 120 - known
    assert len(states) > 1
    assert not caplog.records


def test_two_processes_at_once_decode_every_image_once(tmp_path, work):
    images = files(tmp_path / "images", 120)
    assert run(tmp_path / "images", tmp_path / "cache", 0, 0) == 120
    found = load_images(images, SMALL, cache=tmp_path / "cache").pixels[:]
    assert not work["read"]
    assert torch.equal(found, literal(images))


DAMAGES = {
    "truncated pixels": (lambda pixels: pixels[: 20 * ROW + 7], None, 20),
    "changed byte": (lambda pixels: pixels[:200] + bytes([pixels[200] ^ 1]) + pixels[201:], None, 29),
    "changed entry": (None, lambda index: index[:90] + b"??" + index[92:], 29),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_warning_and_only_damaged_images_are_decoded_again(tmp_path, caplog, work, damage):
    images = files(tmp_path / "images", 30)
    used = load_images(images, SMALL, cache=tmp_path).pixels
    expected = used[:]
    for path, change in zip(store(tmp_path), DAMAGES[damage]):
        if change is not None:
            content = change(path.read_bytes())
            path.unlink()  # a process that has mapped the file is not part of this
            path.write_bytes(content)
    for warned in (1, 0):
        work["decoded"].clear(), caplog.clear()
        assert torch.equal(load_images(images, SMALL, cache=tmp_path).pixels[:], expected)
        assert len(work["decoded"]) == warned * (30 - DAMAGES[damage][2])
        assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert torch.equal(used[:], expected)


def test_a_full_disk_is_an_error_that_names_the_option_and_the_cache_stays_usable(tmp_path, work):
    images = files(tmp_path / "images", 30)
    load_images(images[:5], SMALL, cache=tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12 * ROW + 50, hard))  # a write beyond it is short, then fails
    try:
        with pytest.raises(OSError, match=r"--read\.cache"):
            load_images(images, SMALL, cache=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    work["decoded"].clear()
    assert load_images(images[:12], SMALL, cache=tmp_path).kept == tuple(range(12))
    assert not work["decoded"]
    assert torch.equal(load_images(images, SMALL, cache=tmp_path).pixels[:], literal(images))
