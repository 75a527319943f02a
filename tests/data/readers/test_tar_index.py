from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from tiny_pictures import png, shade, write_tar

from hnclip.data.readers.tars import index_tar


def test_files_are_found_by_name_and_read_in_place(tmp_path: Path) -> None:
    long_name = "d" * 150 + "/" + "n" * 120 + ".png"  # longer than a header has room for
    path = write_tar(tmp_path / "a.tar", {"./1.png": png(1), long_name: png(2), "ü.png": png(3)})
    index = index_tar(path)
    assert list(index.files) == ["1.png", long_name, "ü.png"]
    assert [shade(index.image(name)) for name in index.files] == [1, 2, 3]
    assert index.problems == ()


def test_links_and_directories_are_left_out_and_the_later_of_two_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for kind, name in ((tarfile.DIRTYPE, "folder"), (tarfile.SYMTYPE, "link.png")):
            member = tarfile.TarInfo(name)
            member.type = kind
            tar.addfile(member)
        for value in (1, 2):
            member = tarfile.TarInfo("same.png")
            member.size = len(png(value))
            tar.addfile(member, io.BytesIO(png(value)))
    index = index_tar(path)
    assert list(index.files) == ["same.png"]
    assert shade(index.image("same.png")) == 2


@pytest.mark.parametrize("cut", ["inside a file", "inside a header", "damaged header"])
def test_of_a_damaged_tar_the_good_part_is_used(tmp_path: Path, cut: str) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.png": png(1), "2.png": png(2), "3.png": png(3)})
    content = path.read_bytes()  # each file takes a header and one block of 512 bytes
    damaged = {
        "inside a file": content[: 2 * 1024 + 512 + 10],
        "inside a header": content[: 2 * 1024 + 100],
        "damaged header": content[: 2 * 1024] + b"x" * 512 + content[2 * 1024 + 512 :],
    }
    path.write_bytes(damaged[cut])
    index = index_tar(path)
    assert list(index.files) == ["1.png", "2.png"]
    (problem,) = index.problems
    assert problem.kind == "unreadable row"
    assert problem.where == str(path)
    assert "2 files before that are used" in problem.detail


def test_a_compressed_tar_says_how_to_decompress_it(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"  # known by its content, not by its name
    path.write_bytes(gzip.compress(write_tar(tmp_path / "b.tar", {"1.png": png(1)}).read_bytes()))
    with pytest.raises(ValueError, match=r"compressed.*gunzip -k"):
        index_tar(path)


@pytest.mark.parametrize("content", [b"", b"this is no tar file" * 100])
def test_what_is_no_tar_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no tar file"):
        index_tar(path)
