from __future__ import annotations

import io
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from hnclip.core import InvalidImage
from hnclip.data import cache as cache_module
from hnclip.data.image_cache import cache_directory, load_images
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.pictures import CellImage, FileImage

SMALL = ImageTransform(8)
NOISE = np.random.default_rng(0)


def encoded(size=(12, 9), mode="RGB", format="png", **options) -> bytes:
    """A picture of noise, unlike any other."""
    picture = Image.fromarray(NOISE.integers(0, 256, (size[1], size[0], 4), dtype=np.uint8), "RGBA").convert(mode)
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def cell(content: bytes, name: str = "cell", version: str = "1") -> CellImage:
    return CellImage(name, version, lambda: content)


def files(directory: Path, number: int, **options) -> list[FileImage]:
    directory.mkdir(exist_ok=True)
    paths = [directory / f"{index:03}.png" for index in range(number)]
    for path in paths:
        path.write_bytes(encoded(**options))
    return [FileImage(path) for path in paths]


def twin(images, transform=SMALL) -> torch.Tensor:
    return torch.stack([preprocess_image(image.load(), transform) for image in images])


def all_of(pixels) -> torch.Tensor:
    return pixels[list(range(len(pixels)))]


def table(cache: Path, question: str) -> list[tuple]:
    (file,) = cache.glob("images/*/index.sqlite")
    index = sqlite3.connect(file)
    answer = index.execute(question).fetchall()
    index.close()
    return answer


@pytest.fixture
def work(monkeypatch) -> dict[str, list]:
    """The pictures that were resized and the files that were read, while the test ran."""
    done: dict[str, list] = {"resized": [], "read": []}
    preprocess, read = cache_module.preprocess_image, FileImage.read

    def counted(picture, transform):
        done["resized"].append(picture.size)
        return preprocess(picture, transform)

    def noted(image):
        done["read"].append(image.path.name)
        return read(image)

    monkeypatch.setattr(cache_module, "preprocess_image", counted)
    monkeypatch.setattr(FileImage, "read", noted)
    return done


# --- where it lies ---


def test_the_cache_lies_where_it_is_told_then_where_the_environment_says_then_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HNCLIP_CACHE", "/from/environment")
    assert cache_directory("~/given") == tmp_path / "given"
    assert cache_directory(None) == Path("/from/environment")
    monkeypatch.setenv("HNCLIP_CACHE", "")
    assert cache_directory(None) == tmp_path / ".cache" / "hnclip"


# --- the numbers ---

KINDS = [
    *[("RGB", "jpeg"), ("L", "jpeg"), ("CMYK", "jpeg"), ("RGB", "png"), ("RGBA", "png"), ("LA", "png"), ("P", "png")],
    *[("1", "png"), ("P", "gif"), ("RGB", "webp"), ("RGBA", "webp"), ("RGB", "bmp"), ("F", "tiff"), ("CMYK", "tiff")],
]
SIZES = [(8, 8), (31, 17), (5, 40), (40, 5), (1, 1), (60, 44), (44, 60)]


@pytest.mark.parametrize(
    "transform",
    [SMALL, ImageTransform(5, shortest=7), ImageTransform(9, squash=True, resample="bilinear")],
    ids=["CLIP", "margin", "squash"],
)
def test_cached_and_uncached_are_preprocess_image_bit_for_bit(tmp_path, transform):
    images = [
        cell(encoded(size, mode, format), f"{mode} {format} {size}") for mode, format in KINDS for size in SIZES[:4]
    ] + [cell(encoded(size), str(size)) for size in SIZES[4:]]
    expected = twin(images, transform)
    for cache in (None, tmp_path, tmp_path):
        loaded = load_images(images, transform, cache=cache, workers=3)
        assert loaded.kept == tuple(range(len(images)))
        assert loaded.problems == {}
        assert loaded.pixels.shape == expected.shape
        assert torch.equal(all_of(loaded.pixels), expected)


@pytest.mark.parametrize("workers", [1, 5])
def test_more_than_a_chunk_arrives_in_order(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(cache_module, "CHUNK", 7)
    images = files(tmp_path / "pictures", 40)
    for cache in (None, tmp_path / "cache"):
        loaded = load_images(images, SMALL, cache=cache, workers=workers)
        assert torch.equal(all_of(loaded.pixels), twin(images))


@pytest.mark.parametrize("cached", [True, False])
def test_no_images_are_no_pictures(tmp_path, cached):
    loaded = load_images([], SMALL, cache=tmp_path if cached else None)
    assert loaded.kept == ()
    assert loaded.problems == {}
    assert loaded.pixels.shape == loaded.pixels[:].shape == loaded.pixels[[]].shape == (0, 3, 8, 8)


def test_workers_are_at_least_one(tmp_path):
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        load_images([], SMALL, cache=None, workers=0)


# --- once and never again ---


def test_the_second_time_nothing_is_read_or_resized(tmp_path, work):
    images = files(tmp_path / "pictures", 12)
    first = load_images(images, SMALL, cache=tmp_path)
    assert len(work["resized"]) == len(work["read"]) == 12
    second = load_images([*images[3:], images[0]], SMALL, cache=tmp_path)
    assert len(work["resized"]) == len(work["read"]) == 12
    assert torch.equal(all_of(second.pixels), all_of(first.pixels)[[*range(3, 12), 0]])


def test_a_changed_file_is_resized_again_and_a_touched_one_only_read(tmp_path, work):
    images = files(tmp_path / "pictures", 4)
    before = all_of(load_images(images, SMALL, cache=tmp_path).pixels)
    work["read"].clear(), work["resized"].clear()
    images[1].path.write_bytes(encoded((33, 21)))
    os.utime(images[2].path, ns=(1, 1))
    after = all_of(load_images(images, SMALL, cache=tmp_path).pixels)
    assert sorted(work["read"]) == ["001.png", "002.png"]
    assert work["resized"] == [(33, 21)]
    assert torch.equal(after, twin(images))
    assert [torch.equal(*pair) for pair in zip(before, after)] == [True, False, True, True]
    work["read"].clear()
    load_images(images, SMALL, cache=tmp_path)
    assert work["read"] == []


def test_another_geometry_has_another_store_and_other_colours_the_same(tmp_path, work):
    images = files(tmp_path / "pictures", 3)
    stores = set()
    for transform in (
        SMALL,
        ImageTransform(9),
        ImageTransform(8, shortest=9),
        ImageTransform(8, squash=True),
        ImageTransform(8, resample="nearest"),
    ):
        work["resized"].clear()
        loaded = load_images(images, transform, cache=tmp_path)
        assert len(work["resized"]) == 3
        assert torch.equal(all_of(loaded.pixels), twin(images, transform))
        stores |= set((tmp_path / "images").iterdir())
    assert len(stores) == 5
    work["resized"].clear()
    load_images(images, ImageTransform(8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)), cache=tmp_path)
    assert work["resized"] == []


@pytest.mark.parametrize("what", ["image_code", "picture_code", "pillow", "torch"])
def test_other_code_has_another_store(tmp_path, monkeypatch, work, what):
    images = files(tmp_path / "pictures", 2)
    load_images(images, SMALL, cache=tmp_path)
    if what == "pillow":
        monkeypatch.setattr("PIL.__version__", "0.0")
    elif what == "torch":
        monkeypatch.setattr("torch.__version__", "0.0")
    else:
        module = getattr(cache_module, what)
        changed = tmp_path / "changed.py"
        changed.write_text(Path(module.__file__).read_text(encoding="utf-8") + "# better\n", encoding="utf-8")
        monkeypatch.setattr(module, "__file__", str(changed))
    load_images(images, SMALL, cache=tmp_path)
    assert len(work["resized"]) == 4


@pytest.mark.parametrize("workers", [1, 8])
def test_equal_pictures_share_a_row_and_are_resized_once(tmp_path, work, workers):
    content = encoded((300, 200))
    images = [cell(content, str(index)) for index in range(30)] + files(tmp_path / "pictures", 2)
    loaded = load_images(images, SMALL, cache=tmp_path, workers=workers)
    assert torch.equal(all_of(loaded.pixels), twin(images))
    assert len(work["resized"]) == 3
    assert table(tmp_path, "SELECT count(*) FROM pictures") == [(3,)]
    assert table(tmp_path, "SELECT count(*) FROM names") == [(32,)]


def test_one_image_may_be_asked_for_twice(tmp_path, work):
    (image,) = files(tmp_path / "pictures", 1)
    bad = FileImage(tmp_path / "none.png")
    loaded = load_images([image, bad, image, bad], SMALL, cache=tmp_path)
    assert loaded.kept == (0, 2)
    assert list(loaded.problems) == [1, 3]
    assert len(work["resized"]) == 1


def test_a_key_may_hold_what_utf8_cannot(tmp_path):
    images = [cell(encoded(), "\udcff.png"), cell(encoded(), "\udcfe.png")]
    for _ in range(2):
        assert torch.equal(all_of(load_images(images, SMALL, cache=tmp_path).pixels), twin(images))


def test_progress_walks_over_what_has_to_be_read(tmp_path):
    walks: list[list[int]] = []

    def walk(steps):
        walks.append([])
        for step in steps:
            walks[-1].append(step)
            yield step

    images = files(tmp_path / "pictures", 5)
    load_images(images[:2], SMALL, cache=tmp_path, progress=walk)
    load_images(images, SMALL, cache=tmp_path, progress=walk)
    load_images(images, SMALL, cache=tmp_path, progress=walk)
    load_images(images, SMALL, cache=None, progress=walk)
    assert walks == [[0, 1], [0, 1, 2], [0, 1, 2, 3, 4]]


# --- bad pictures ---


def bomb() -> bytes:
    """The first bytes of a PNG of 100,000 × 100,000 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + header + struct.pack(">I", 1000) + b"IDAT" + bytes(1000)


def of_floats(value: float) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((9, 9), value, dtype=np.float32)).save(file, "tiff")
    return file.getvalue()


def vanished() -> bytes:
    raise InvalidImage("missing image", "the table is gone")


@pytest.mark.parametrize("cached", [True, False])
def test_bad_pictures_are_reported_and_the_others_kept_in_order(tmp_path, cached):
    (tmp_path / "bad").mkdir()
    contents = {
        "empty.png": (b"", "corrupt image", "is empty"),
        "cut.jpg": (encoded((90, 90), format="jpeg")[:900], "truncated image", "truncated"),
        "cut.png": (encoded((90, 90))[:900], "truncated image", "truncated"),
        "text.jpg": (b"<html>not found</html>", "corrupt image", "no picture that Pillow knows"),
        "bomb.png": (bomb(), "oversized image", "10000000000 pixels"),
        "floats.tiff": (of_floats(1e6), "unusual image", "mode F and values from 1000000.0"),
        "nan.tiff": (of_floats(float("nan")), "unusual image", "mode F"),
    }
    for name, (content, _, _) in contents.items():
        (tmp_path / "bad" / name).write_bytes(content)
    bad = [(FileImage(tmp_path / "bad" / name), kind, what) for name, (_, kind, what) in contents.items()]
    bad += [
        (FileImage(tmp_path / "bad" / "none.png"), "missing image", "does not exist"),
        (FileImage(tmp_path / "bad"), "missing image", "is no file"),
        (CellImage("row 7", "1", vanished), "missing image", "the table is gone"),
    ]
    good = files(tmp_path / "good", len(bad) + 1)
    images = [good[0]]
    for (image, _, _), other in zip(bad, good[1:]):
        images += [image, other]
    for _ in range(2):
        loaded = load_images(images, SMALL, cache=tmp_path / "cache" if cached else None)
        assert loaded.kept == tuple(range(0, len(images), 2))
        assert torch.equal(all_of(loaded.pixels), twin(good))
        assert list(loaded.problems) == list(range(1, len(images), 2))
        for problem, (image, kind, what) in zip(loaded.problems.values(), bad):
            assert (problem.kind, problem.where) == (kind, image.key)
            assert what in problem.detail


@pytest.mark.parametrize("cached", [True, False])
def test_nothing_but_bad_pictures_are_no_pictures(tmp_path, cached):
    loaded = load_images([cell(b"")], SMALL, cache=tmp_path if cached else None)
    assert loaded.kept == ()
    assert loaded.pixels.shape == (0, 3, 8, 8)
    assert loaded.problems[0].kind == "corrupt image"


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("content", [b"", encoded((900, 700))[:-5000]], ids=["empty", "truncated"])
def test_every_copy_of_a_bad_picture_is_reported_by_its_own_name(tmp_path, content, workers):
    reads: list[int] = []

    def get() -> bytes:
        reads.append(1)
        return content

    images = [CellImage(f"cell {index}.", "1", get) for index in range(20)]
    loaded = load_images(images, SMALL, cache=tmp_path, workers=workers)
    assert len(loaded.problems) == 20
    assert workers > 1 or len(reads) == 20
    for index, problem in loaded.problems.items():
        assert problem.where == f"cell {index}."
        assert f"cell {index}." in problem.detail


def test_a_bad_picture_that_was_mended_is_taken_in(tmp_path):
    (image,) = files(tmp_path / "pictures", 1)
    whole = image.path.read_bytes()
    image.path.write_bytes(whole[:-40])
    assert load_images([image], SMALL, cache=tmp_path).kept == ()
    image.path.write_bytes(whole)
    assert torch.equal(load_images([image], SMALL, cache=tmp_path).pixels[:], twin([image]))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, OSError])
def test_errors_that_no_picture_is_to_blame_for_pass_through(tmp_path, error, cached):
    def fails():
        raise error

    images = [CellImage("fails", "1", fails), *files(tmp_path / "pictures", 3)]
    before = warnings.filters[:]
    with pytest.raises(error):
        load_images(images, SMALL, cache=tmp_path if cached else None)
    assert warnings.filters == before
    assert load_images(images[1:], SMALL, cache=tmp_path).kept == (0, 1, 2)


def test_an_error_ends_the_work_that_was_waiting(tmp_path):
    reads: list[int] = []

    def fails() -> bytes:
        raise MemoryError

    def slow() -> bytes:
        time.sleep(0.005)
        reads.append(1)
        return encoded()

    images = [CellImage("fails", "1", fails), *(CellImage(str(index), "1", slow) for index in range(100))]
    with pytest.raises(MemoryError):
        load_images(images, SMALL, cache=tmp_path, workers=1)
    assert len(reads) < 50


def test_a_full_disk_does_not_matter_to_a_bad_picture(tmp_path, monkeypatch):
    images = files(tmp_path / "pictures", 5)
    images[2].path.write_bytes(b"no picture")
    load_images(images, SMALL, cache=tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    assert load_images(images, SMALL, cache=tmp_path).kept == (0, 1, 3, 4)


def test_a_disk_too_small_for_all_is_said_before_the_first_is_read(tmp_path, monkeypatch, work):
    images = files(tmp_path / "pictures", 11)
    load_images(images[:1], SMALL, cache=tmp_path)
    work["read"].clear()
    monkeypatch.setattr(cache_module, "CHUNK", 4)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10 * 3 * 8 * 8 - 1))
    with pytest.raises(OSError, match=r"1,920 bytes are needed, 1,919 bytes are free.*--read.cache or HNCLIP_CACHE"):
        load_images(images, SMALL, cache=tmp_path)
    assert work["read"] == []
    load_images(images[:10], SMALL, cache=tmp_path)


# --- threads ---


def test_workers_use_one_torch_thread_each_and_leave_torch_as_it_was():
    before = torch.get_num_threads()
    seen: list[int] = []

    class Asking(CellImage):
        def decode(self, content):
            seen.append(torch.get_num_threads())
            return super().decode(content)

    try:
        torch.set_num_threads(3)
        load_images([Asking(str(index), "1", encoded) for index in range(6)], SMALL, cache=None, workers=2)
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [1] * 6 + [3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_pictures_that_silence_warnings_side_by_side_leave_the_filters_as_they_were():
    one_in, both_in, one_left = threading.Event(), threading.Event(), threading.Event()

    class First(CellImage):
        def decode(self, content):
            with warnings.catch_warnings():
                one_in.set()
                both_in.wait(10)
            one_left.set()
            return super().decode(content)

    class Second(CellImage):
        def decode(self, content):
            one_in.wait(10)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                both_in.set()
                one_left.wait(10)
                warnings.warn("large", Image.DecompressionBombWarning, stacklevel=1)  # the first one ended the silence
            return super().decode(content)  # and the second one restored the first one's filters

    before = warnings.filters[:]
    images = [First("1", "1", encoded), Second("2", "1", encoded)]
    assert load_images(images, SMALL, cache=None, workers=2).kept == (0, 1)
    assert warnings.filters == before


# --- other processes ---

FILL = """
import os, signal, sys, time
from pathlib import Path

import torch

from hnclip.data import cache, store
from hnclip.data.images import ImageTransform
from hnclip.data.pictures import FileImage

pictures, directory, log, pause, place, number = sys.argv[1:]
cache.CHUNK = 8
calls = {"resize": 0, "fsync": 0}

def step(name):
    calls[name] += 1
    if name == place and calls[name] == int(number):
        os.kill(os.getpid(), signal.SIGKILL)

def resize(picture, transform, original=cache.preprocess_image):
    step("resize")
    time.sleep(float(pause))
    with open(log, "a") as file:
        file.write("1\\n")
    return original(picture, transform)

def fsync(handle, original=os.fsync):
    original(handle)
    step("fsync")

cache.preprocess_image, store.os.fsync = resize, fsync
images = [FileImage(path) for path in sorted(Path(pictures).iterdir())]
Path(log).touch()
while not Path(pictures).with_name("go").exists():
    time.sleep(0.001)
loaded = cache.load_images(images, ImageTransform(8), cache=Path(directory), workers=2)
torch.save((loaded.kept, loaded.pixels[:]), log + ".pt")
"""


def start(pictures: Path, cache: Path, log: Path, pause: float = 0.0, place: str = "", number: int = 0):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [str(word) for word in (pictures, cache, log, pause, place, number)]
    return subprocess.Popen([sys.executable, "-c", FILL, *words], env=environment)


def lines(log: Path) -> int:
    return len(log.read_text().splitlines())


# In the midst of decoding; and with the fourth chunk's pixels on the disk, but not yet in the index.
@pytest.mark.parametrize(("place", "number", "committed"), [("resize", 60, None), ("fsync", 4, 24)])
def test_a_killed_process_loses_its_last_chunks_and_nothing_else(tmp_path, work, place, number, committed):
    images = files(tmp_path / "pictures", 100)
    (tmp_path / "go").touch()
    killed = start(tmp_path / "pictures", tmp_path / "cache", tmp_path / "log", 0.001, place, number)
    assert killed.wait() == -9
    ((kept,),) = table(tmp_path / "cache", "SELECT count(*) FROM names")
    if committed is None:
        assert 60 - 3 * 8 <= kept < 60  # a chunk being written, one being decoded, and one waiting
    else:
        assert kept == committed
    loaded = load_images(images, SMALL, cache=tmp_path / "cache")
    assert len(work["resized"]) == 100 - kept
    assert torch.equal(loaded.pixels[:], twin(images))
    assert table(tmp_path / "cache", "SELECT count(*), max(row) FROM pictures") == [(100, 99)]


def test_two_processes_fill_one_store_and_share_the_work(tmp_path, work):
    images = files(tmp_path / "pictures", 240)
    expected = twin(images)
    logs = [tmp_path / "log 1", tmp_path / "log 2"]
    both = [start(tmp_path / "pictures", tmp_path / "cache", log, 0.005) for log in logs]
    while not all(log.exists() for log in logs):
        assert all(process.poll() is None for process in both)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert [process.wait() for process in both] == [0, 0]
    for log in logs:
        kept, pixels = torch.load(f"{log}.pt")
        assert kept == tuple(range(240))
        assert torch.equal(pixels, expected)
    assert sum(lines(log) for log in logs) < 1.75 * 240
    assert table(tmp_path / "cache", "SELECT row FROM pictures ORDER BY row") == [(row,) for row in range(240)]
    assert table(tmp_path / "cache", "SELECT count(*) FROM names") == [(240,)]
    (pixels,) = tmp_path.glob("cache/images/*/pixels.u8")
    assert pixels.stat().st_size == 240 * 3 * 8 * 8
    loaded = load_images(images, SMALL, cache=tmp_path / "cache")
    assert work["resized"] == []
    assert torch.equal(loaded.pixels[:], expected)
