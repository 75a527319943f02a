from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_pictures import png, shade, write_png, write_tar

from hnclip.core import InvalidImage
from hnclip.data.pictures import FileImage, TarImage
from hnclip.data.readers.locate import Pictures, plain_name


@pytest.fixture(params=["directory", "tar"])
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Pictures:
    """The same tree as a directory and as a tar file."""
    files = {"top.png": 1, "a/one.png": 2, "a/twin.png": 3, "b/twin.png": 4, "b/c/deep.png": 5}
    if request.param == "tar":
        return Pictures(write_tar(tmp_path / "all.tar", {name: png(value) for name, value in files.items()}))
    for name, value in files.items():
        write_png(tmp_path / "all" / name, value)
    return Pictures(tmp_path / "all")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("top.png", 1),
        ("./a/one.png", 2),
        ("a/../a/one.png", 2),
        ("a\\one.png", 2),
        ("one.png", 2),  # by its base name
        ("/home/somebody/data/deep.png", 5),
        ("https://example.org/x/deep.png?size=large", 5),
        ("b/twin.png", 4),
        ("/home/somebody/b/twin.png", 4),  # two of that base name, but only one in a directory `b`
    ],
)
def test_a_name_finds_its_picture(pictures: Pictures, name: str, expected: int) -> None:
    image = pictures.find(name)
    assert shade(image) == expected
    assert type(image) is (TarImage if pictures.root.suffix == ".tar" else FileImage)
    assert pictures.has(name)


def test_a_name_that_fits_several_pictures_is_an_error(pictures: Pictures) -> None:
    with pytest.raises(ValueError, match=r"several pictures .* 'twin.png': a/twin.png, b/twin.png"):
        pictures.find("twin.png")
    with pytest.raises(ValueError, match="several pictures"):
        pictures.find("/elsewhere/z/twin.png")


def test_an_absent_picture_is_missing_when_looked_at(pictures: Pictures) -> None:
    image = pictures.find("z/nowhere.png")
    assert image == FileImage(pictures.root / "z/nowhere.png")
    assert not pictures.has("z/nowhere.png")
    assert pictures.exact("z/nowhere.png") is None
    for look in (image.stamp, image.read):
        with pytest.raises(InvalidImage) as caught:
            look()
        assert caught.value.kind == "missing image"


def test_names_that_contradict_each_other_do_not_share_a_picture(pictures: Pictures) -> None:
    """As in a half-downloaded set that numbers the pictures of every split from 1."""
    assert shade(pictures.find("a/one.png")) == 2
    with pytest.raises(ValueError, match=r"'a/one.png' and 'test/one.png' would both be the picture a/one.png"):
        pictures.find("test/one.png")
    assert shade(pictures.find("elsewhere/b/c/deep.png")) == 5
    assert shade(pictures.find("deep.png")) == 5  # less said, nothing contradicted
    with pytest.raises(ValueError, match="would both be"):
        pictures.find("test/deep.png")


def test_the_exact_name_after_a_contradicting_one_is_an_error_too(pictures: Pictures) -> None:
    pictures.find("test/one.png")
    with pytest.raises(ValueError, match=r"'test/one.png' and 'a/one.png' would both be"):
        pictures.find("a/one.png")


def test_absolute_names_are_found_where_they_are(tmp_path: Path) -> None:
    there = write_png(tmp_path / "elsewhere" / "1.png", 9)
    (tmp_path / "root").mkdir()
    assert shade(Pictures(tmp_path / "root").find(str(there))) == 9


def test_a_directory_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        write_png(tmp_path / "images" / f"{number}.png")
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: listed.append(str(folder)) or scandir(folder))
    pictures = Pictures(tmp_path)
    for number in range(5):
        pictures.find(f"images/{number}.png")
    assert listed == [str(tmp_path / "images")]


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    write_png(tmp_path / "store" / "1.png", 7)
    root = tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(tmp_path / "store")
    (root / "circle").symlink_to(root)
    assert shade(Pictures(root).find("1.png")) == 7


def test_hidden_directories_are_not_searched(tmp_path: Path) -> None:
    write_png(tmp_path / ".trash" / "1.png")
    assert not Pictures(tmp_path).has("1.png")


def test_accents_may_be_one_character_or_two(tmp_path: Path) -> None:
    write_png(tmp_path / "images" / "cafe\u0301.png", 8)
    assert shade(Pictures(tmp_path).find("caf\u00e9.png")) == 8


def test_a_root_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not exist: name a directory or .tar file"):
        Pictures(tmp_path / "nowhere")


def test_a_name_with_a_null_character_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be a file's name"):
        Pictures(tmp_path).find("a\0.png")


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("./a//b.png", "a/b.png"),
        ("a\\b.png", "a/b.png"),
        ("http://x.org/a/b%20c.png#top", "b c.png"),
        ("/b.png", "/b.png"),
    ],
)
def test_plain_names(name: str, plain: str) -> None:
    assert plain_name(name) == plain
