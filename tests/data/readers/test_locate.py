"""Images in directories and tar files, found by path or by name; the index of a tar file."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from small_images import png, shade, write_png, write_tar

from hnclip.core import InvalidImage
from hnclip.data.readers.locate import ImageFinder, index_tar
from hnclip.data.records import ReadLog, RowError

FILES = {"top.png": 1, "a/one.png": 2, "a/two.png": 3, "b/two.png": 4, "b/c/deep.png": 5, "cafe\u0301.png": 8}


@pytest.mark.parametrize("kind", ["directory", "tar"])
def test_images_by_path_and_by_name(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "all"
    if kind == "tar":
        root = write_tar(tmp_path / "all.tar", {name: png(value) for name, value in FILES.items()})
    else:
        for name, value in FILES.items():
            write_png(root / name, value)
    finder = ImageFinder(root, ReadLog())
    others = {"./a/one.png": 2, "a/../a//one.png": 2, "a\\one.png": 2, "caf\u00e9.png": 8}  # accents in one character
    for name, expected in {**FILES, **others}.items():
        image = finder.find(name)
        assert image is not None
        assert shade(image) == expected
        assert finder.find(f"{finder.root}/{name}") == image
    for name in ("one.png", "b/one.png", "/elsewhere/a/one.png", "a", ".."):
        assert finder.find(name) is None
        with pytest.raises(InvalidImage) as caught:
            finder.at(name).read()
        assert caught.value.kind == "missing image"
    for name, expected in {"one.png": 2, "/home/me/b/two.png": 4, "x/café.png": 8}.items():
        image = finder.find_by_name(name)  # the path that ends most like it
        assert image is not None
        assert shade(image) == expected
    assert finder.find_by_name("nowhere.png") is None
    with pytest.raises(RowError, match="several images"):
        finder.find_by_name("/elsewhere/z/two.png")


def test_members_of_a_tar(tmp_path: Path) -> None:
    """Links and directories are left out, and of two files with one name the later counts."""
    long_name = "d" * 150 + "/" + "n" * 120 + ".png"  # longer than a header has room for
    path = write_tar(tmp_path / "a.tar", {"./1.png": png(1), long_name: png(2), "ü.png": png(3)})
    with tarfile.open(path, "a") as tar:
        for kind, name in ((tarfile.DIRTYPE, "folder"), (tarfile.SYMTYPE, "link.png"), (tarfile.REGTYPE, "1.png")):
            member = tarfile.TarInfo(name)
            member.type = kind
            member.size = len(png(4)) if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(png(4)))
    index = index_tar(path, log := ReadLog())
    assert [(name, shade(index.image(name))) for name in index.files] == [("1.png", 4), (long_name, 2), ("ü.png", 3)]
    assert log == ReadLog()
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ValueError, match="decompress"):
        index_tar(path, log)


# Each file takes a header and one block of 512 bytes.
@pytest.mark.parametrize(("keep", "then"), [(2 * 1024 + 522, b""), (2 * 1024 + 100, b""), (2 * 1024, b"x" * 512)])
def test_of_a_damaged_tar_the_first_files_are_used(tmp_path: Path, keep: int, then: bytes) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.png": png(1), "2.png": png(2), "3.png": png(3)})
    path.write_bytes(path.read_bytes()[:keep] + then)
    index = index_tar(path, log := ReadLog())
    assert list(index.files) == ["1.png", "2.png"]
    assert [(problem.kind, problem.where) for problem in log.problems] == [("unreadable row", str(path))]
