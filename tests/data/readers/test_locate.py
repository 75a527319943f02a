"""Images in directories and tar files, found by path or by name; the index of a tar file."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from small_images import png, shade, write_png, write_tar

from hnclip.core import InvalidImage
from hnclip.data.image_sources import FileImage, TarImage
from hnclip.data.readers.locate import ImageFinder, files_below, index_tar


@pytest.fixture(params=["directory", "tar"])
def finder(request: pytest.FixtureRequest, tmp_path: Path) -> ImageFinder:
    """The same tree as a directory and as a tar file."""
    files = {"top.png": 1, "a/one.png": 2, "a/two.png": 3, "b/two.png": 4, "b/c/deep.png": 5, "cafe\u0301.png": 8}
    if request.param == "tar":
        return ImageFinder(write_tar(tmp_path / "all.tar", {name: png(value) for name, value in files.items()}))
    for name, value in files.items():
        write_png(tmp_path / "all" / name, value)
    return ImageFinder(tmp_path / "all")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("top.png", 1),
        ("./a/one.png", 2),
        ("a/../a//one.png", 2),
        ("a\\one.png", 2),
        ("b/two.png", 4),
        ("caf\u00e9.png", 8),  # accents as one character or two
        ("cafe\u0301.png", 8),
    ],
)
def test_a_path_finds_its_image(finder: ImageFinder, name: str, expected: int) -> None:
    image = finder.find(name)
    assert image is not None
    assert shade(image) == expected
    assert type(image) is (FileImage if finder.is_directory else TarImage)
    assert finder.find(f"{finder.root}/{name}") == image


@pytest.mark.parametrize("name", ["one.png", "b/one.png", "/elsewhere/a/one.png", "c/deep.png", "a", ".."])
def test_a_path_that_does_not_exist_finds_nothing(finder: ImageFinder, name: str) -> None:
    assert finder.find(name) is None
    with pytest.raises(InvalidImage) as caught:
        finder.at(name).read()
    assert caught.value.kind == "missing image"


@pytest.mark.parametrize(
    ("name", "expected"), [("one.png", 2), ("/home/me/deep.png", 5), ("/home/me/b/two.png", 4), ("x/café.png", 8)]
)
def test_a_name_finds_the_path_that_ends_most_like_it(finder: ImageFinder, name: str, expected: int) -> None:
    image = finder.find_by_name(name)
    assert image is not None
    assert shade(image) == expected


def test_a_name_that_fits_several_images_is_an_error(finder: ImageFinder) -> None:
    with pytest.raises(ValueError, match="several images"):
        finder.find_by_name("/elsewhere/z/two.png")
    assert finder.find_by_name("nowhere.png") is None


def test_absolute_paths_and_paths_above_the_root(tmp_path: Path) -> None:
    there = write_png(tmp_path / "elsewhere" / "1.png", 9)
    (tmp_path / "root").mkdir()
    finder = ImageFinder(tmp_path / "root")
    for name in (str(there), "../elsewhere/1.png"):
        assert finder.find(name) == finder.at(name) == FileImage(there)
        assert finder.at(name).key == str(there)


def test_a_directory_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        write_png(tmp_path / "images" / f"{number}.png")
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: listed.append(str(folder)) or scandir(folder))
    finder = ImageFinder(tmp_path)
    assert all(finder.find(f"images/{number}.png") for number in range(5))
    assert listed == [str(tmp_path / "images")]


def test_files_below_follow_links_but_not_in_circles(tmp_path: Path) -> None:
    write_png(tmp_path / "store" / "1.png", 7)
    root = tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(tmp_path / "store")
    (root / "circle").symlink_to(root)
    write_png(root / ".trash" / "1.png")
    assert list(files_below(root)) == ["linked/1.png"]


def test_members_of_a_tar(tmp_path: Path) -> None:
    """Links and directories are left out, and of two files with one name the later counts."""
    long_name = "d" * 150 + "/" + "n" * 120 + ".png"  # longer than a header has room for
    path = write_tar(tmp_path / "a.tar", {"./1.png": png(1), long_name: png(2), "ü.png": png(3)})
    with tarfile.open(path, "a") as tar:
        for kind, name in ((tarfile.DIRTYPE, "folder"), (tarfile.SYMTYPE, "link.png")):
            member = tarfile.TarInfo(name)
            member.type = kind
            tar.addfile(member)
        member = tarfile.TarInfo("1.png")
        member.size = len(png(4))
        tar.addfile(member, io.BytesIO(png(4)))
    index = index_tar(path)
    assert [(name, shade(index.image(name))) for name in index.files] == [("1.png", 4), (long_name, 2), ("ü.png", 3)]
    assert index.problems == ()


@pytest.mark.parametrize("damage", ["inside a file", "inside a header", "damaged header"])
def test_of_a_damaged_tar_the_first_files_are_used(tmp_path: Path, damage: str) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.png": png(1), "2.png": png(2), "3.png": png(3)})
    content = path.read_bytes()  # each file takes a header and one block of 512 bytes
    damaged = {
        "inside a file": content[: 2 * 1024 + 512 + 10],
        "inside a header": content[: 2 * 1024 + 100],
        "damaged header": content[: 2 * 1024] + b"x" * 512 + content[2 * 1024 + 512 :],
    }
    path.write_bytes(damaged[damage])
    index = index_tar(path)
    assert list(index.files) == ["1.png", "2.png"]
    assert [(problem.kind, problem.where) for problem in index.problems] == [("unreadable row", str(path))]


def test_a_compressed_tar_is_recognised_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(gzip.compress(write_tar(tmp_path / "b.tar", {"1.png": png(1)}).read_bytes()))
    with pytest.raises(ValueError, match="gunzip"):
        index_tar(path)
