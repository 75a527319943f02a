from __future__ import annotations

from pathlib import Path

import pytest
from tiny_pictures import shade, write_png

from hnclip.config import ReadConfig
from hnclip.data.readers.folder import one_caption
from hnclip.data.readers.gather import Found
from hnclip.data.readers.paths import read_path


def write_pair(path: Path, value: int, caption: str | bytes) -> None:
    write_png(path, value)
    path.with_suffix(".txt").write_bytes(caption.encode() if isinstance(caption, str) else caption)


def read(folder: Path) -> Found:
    return read_path(folder, ReadConfig())


def test_pictures_with_captions_at_any_depth(tmp_path: Path) -> None:
    write_pair(tmp_path / "b.png", 1, "  A dog.\n")
    write_pair(tmp_path / "a" / "deep" / "1.PNG", 2, "First line,\r\n\r\n  second line.\r\n")
    write_pair(tmp_path / "a" / "dots.in.name.png", 3, "\ufeffA cat.")
    found = read(tmp_path)
    assert {(record.id, record.captions, record.split, shade(record.image)) for record in found.records} == {
        ("b", ("A dog.",), None, 1),
        ("a/deep/1", ("First line, second line.",), None, 2),
        ("a/dots.in.name", ("A cat.",), None, 3),
    }
    assert found.problems == ()


def test_the_order_is_that_of_the_names(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        write_pair(tmp_path / f"{name}.png", 0, name)
    assert [record.id for record in read(tmp_path).records] == ["a", "b", "c"]


def test_directories_at_the_top_are_splits(tmp_path: Path) -> None:
    for folder in ("train/x", "val", "Test"):
        write_pair(tmp_path / folder / "1.png", 0, folder)
    write_pair(tmp_path / "outside.png", 0, "lost")
    write_pair(tmp_path / "other" / "test" / "1.png", 0, "lost too")
    found = read(tmp_path)
    assert {(record.id, record.split) for record in found.records} == {
        ("train/x/1", "train"),
        ("val/1", "validation"),
        ("Test/1", "test"),
    }
    assert {(problem.kind, problem.where) for problem in found.problems} == {
        ("unreadable row", "outside.png"),
        ("unreadable row", "other/test/1.png"),
    }


def test_what_has_no_other_half_is_told(tmp_path: Path) -> None:
    write_pair(tmp_path / "good.png", 0, "good")
    write_png(tmp_path / "alone.png")
    (tmp_path / "lonely.txt").write_text("lonely")
    write_pair(tmp_path / "empty.png", 0, " \n ")
    write_pair(tmp_path / "latin.png", 0, b"caf\xe9")
    write_png(tmp_path / ".hidden.png")
    (tmp_path / "._good.txt").write_bytes(b"\x00\x05\x16\x07")
    found = read(tmp_path)
    assert [record.id for record in found.records] == ["good"]
    assert {(problem.kind, problem.where) for problem in found.problems} == {
        ("no caption", "alone.png"),
        ("no image", "lonely.txt"),
        ("empty caption", "empty.txt"),
        ("bad text", "latin.txt"),
    }


def test_of_two_pictures_of_one_name_the_first_has_the_caption(tmp_path: Path) -> None:
    write_pair(tmp_path / "1.png", 2, "which?")
    (tmp_path / "1.bmp").write_bytes((tmp_path / "1.png").read_bytes())
    found = read(tmp_path)
    assert [Path(record.image.key).name for record in found.records] == ["1.bmp"]
    assert [(problem.kind, problem.where) for problem in found.problems] == [("repeated id", "1.png")]


def test_pictures_without_any_caption_are_an_error(tmp_path: Path) -> None:
    write_png(tmp_path / "1.png")
    with pytest.raises(ValueError, match=r"with a .txt of the same name beside them:\n  no caption: 1.png"):
        read(tmp_path)


def test_a_name_that_is_no_text_and_a_caption_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    write_pair(tmp_path / "good.png", 0, "good")
    write_pair(tmp_path / "caf\udce9.png", 0, "latin")
    write_png(tmp_path / "linked.png")
    (tmp_path / "linked.txt").symlink_to(tmp_path / "nowhere.txt")
    found = read(tmp_path)
    assert [record.id for record in found.records] == ["good"]
    assert {(problem.kind, problem.where) for problem in found.problems} == {
        ("bad text", "caf\\udce9.txt"),
        ("unreadable row", "linked.txt"),
    }


def test_a_caption_keeps_the_spaces_within_its_lines() -> None:
    assert one_caption("a  b\u2028c\n\n d ".encode()) == "a  b\u2028c d"
