"""What is indexed of a folder or of other data, and which captions cannot be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from index_helpers import about, commit_all

from encode_helpers import save_picture
from hnclip.config import ReadConfig
from hnclip.core import Problem
from hnclip.search.index.opening import open_writer
from hnclip.search.indexing.plan import noted
from hnclip.search.indexing.run import unreadable_texts
from hnclip.search.indexing.source import IndexSource, open_index_source


def source_of(data: Path | str, *, split: str = "all", read: ReadConfig | None = None) -> IndexSource:
    return open_index_source(str(data), read or ReadConfig(), split=split)


def captions_of(source: IndexSource) -> dict[str, tuple[str, ...]]:
    entries = [source.entry(number) for number in range(len(source))]
    return {entry.name: entry.captions for entry in entries}


def write(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        save_picture(folder / name, number)


def test_all_pictures_of_a_folder_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "b.png", "a/deep/c.jpg", ".hidden/d.png", ".e.png")
    (tmp_path / "README.txt").write_text("about these pictures")
    with open_writer(tmp_path / "photos.hnc", about()) as writer:
        commit_all(writer, {"b.png": (1, ("said before",))})
    found = source_of(tmp_path)
    assert captions_of(found) == {"b.png": (), "a/deep/c.jpg": ()}
    assert (found.data, found.root, found.problems, caplog.messages) == (str(tmp_path), tmp_path, (), [])


def test_a_relative_folder_and_one_of_the_name_of_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "docci/1.png", "docci/train/2.png")
    monkeypatch.chdir(tmp_path)
    assert list(captions_of(source_of("./docci"))) == ["1.png", "train/2.png"]
    assert list(captions_of(source_of("docci/train"))) == ["2.png"]
    assert source_of("./docci").data == str(tmp_path / "docci")
    with pytest.raises(ValueError, match="where is docci"):
        source_of("docci")


def test_two_pictures_of_one_name_but_the_suffix(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg", "a.png")
    (tmp_path / "a.txt").write_text("a house")
    found = source_of(tmp_path)
    assert captions_of(found) == {"a.jpg": ("a house",), "a.png": ()}
    assert found.problems == ()


def test_a_name_that_is_not_utf_8_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path, "a.png")
    odd = os.path.join(os.fsencode(tmp_path), b"\xff.png")
    try:
        with open(odd, "wb") as file:
            file.write(b"x")
    except OSError:
        pytest.skip("this file system has no such names")
    found = source_of(tmp_path)
    assert list(captions_of(found)) == ["a.png"]
    assert [(problem.kind, problem.where) for problem in found.problems] == [("bad text", "\\udcff.png")]


def test_a_split_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path, "train/a.png", "test/b.png", "test/c.png")
    for name in ("train/a", "test/b"):
        (tmp_path / f"{name}.txt").write_text(f"caption of {name}")
    assert captions_of(source_of(tmp_path, split="test")) == {"test/b.png": ("caption of test/b",)}
    assert list(captions_of(source_of(tmp_path))) == ["test/b.png", "test/c.png", "train/a.png"]
    with pytest.raises(ValueError, match="has no split"):
        source_of(tmp_path, split="other")


def test_captions_of_a_picture_outside_the_splits_are_told_of(tmp_path: Path) -> None:
    write(tmp_path, "test/a.png", "holiday/b.png")
    for name in ("test/a", "holiday/b"):
        (tmp_path / f"{name}.txt").write_text(f"caption of {name}")
    found = source_of(tmp_path)
    assert captions_of(found) == {"test/a.png": ("caption of test/a",), "holiday/b.png": ()}
    assert [problem.where for problem in found.problems] == ["holiday/b.png"]


def test_pictures_without_captions_may_lie_outside_the_splits(tmp_path: Path) -> None:
    write(tmp_path, "test/a.png", "holiday/b.png")
    (tmp_path / "test/a.txt").write_text("caption of a")
    found = source_of(tmp_path)
    assert captions_of(found) == {"test/a.png": ("caption of a",), "holiday/b.png": ()}
    assert found.problems == ()


def test_captions_of_which_none_can_be_read_are_a_problem(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "a.png", "b.png")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(b"ein Geb\xc3\xa4ude, zwei Geb\xe4ude")
    found = source_of(tmp_path)
    assert captions_of(found) == {"a.png": (), "b.png": ()}
    assert [(problem.kind, problem.where) for problem in found.problems] == [("unreadable row", str(tmp_path))]
    assert "a.txt: the caption cannot be used: byte 0xe4 is not UTF-8" in found.problems[0].detail
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def refuse(monkeypatch: pytest.MonkeyPatch, folder: Path, error: type[OSError] = PermissionError) -> None:
    """Let a directory be one that cannot be listed; whoever runs the tests may be allowed everything."""
    scandir = os.scandir

    def scan(path: str) -> object:
        if os.fspath(path) == str(folder):
            raise error(13, "Permission denied", str(folder))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a/1.png", "b/2.png")
    with monkeypatch.context() as patch:
        refuse(patch, tmp_path / "b")
        found = source_of(tmp_path)
    assert captions_of(found) == {"a/1.png": ()}
    assert found.hidden == ("b",)
    assert [(problem.where, problem.detail) for problem in found.problems] == [
        ("b", "b cannot be listed: Permission denied")
    ]
    with monkeypatch.context() as patch:
        refuse(patch, tmp_path / "b", FileNotFoundError)  # it went while others were listed
        assert (source_of(tmp_path).hidden, source_of(tmp_path).problems) == ((), ())
    refuse(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="cannot be listed: Permission denied"):
        source_of(tmp_path)


def test_an_id_that_is_the_name_of_another_picture(tmp_path: Path) -> None:
    write(tmp_path, "in/a.png", "out/b.png")
    (tmp_path / "in/table.csv").write_text(f"name,image,caption\na.png,{tmp_path}/out/b.png,a house\n")
    found = source_of(tmp_path / "in", read=ReadConfig(id_column="name"))
    assert captions_of(found) == {"a.png": ()}
    assert [problem.kind for problem in found.problems] == ["repeated id"]


def test_places_of_files_and_of_tables_move_with_their_folder(tmp_path: Path) -> None:
    write(tmp_path, "a/1.png")
    (tmp_path / "table.csv").write_text("image,caption\na/1.png,a house\n")
    for data in (tmp_path, tmp_path / "table.csv"):
        found = source_of(data)
        assert found.root == tmp_path
        assert found.entry(0).place == '{"file": "a/1.png"}'
        assert found.entry(0).stamp() == found.entry(0).image.stamp()


def test_what_is_no_file_has_its_key_in_the_stamp() -> None:
    found = source_of("scenes/park/small", split="validation")
    stamps = {found.entry(number).stamp() for number in range(len(found))}
    assert len(stamps) == len(found)
    assert {found.entry(number).place for number in range(len(found))} == {"{}"}


def test_unreadable_texts() -> None:
    def transform(texts: Sequence[str]) -> None:
        """Stands in for a model's: the words are what is between spaces and marks."""
        for number, text in enumerate(texts):
            if not text.replace("<|endoftext|>", "").strip():
                raise ValueError(f"texts[{number}] is {text!r}: the tokenizer finds no word in it")

    def found(texts: list[str]) -> dict[str, str]:
        return unreadable_texts(texts, transform)  # type: ignore[arg-type]

    assert found([]) == {}
    assert found(["a house", "two trees"]) == {}
    bad = found(["a house", "<|endoftext|>", "half \ud83d of one", " "])
    assert list(bad) == ["half \ud83d of one", "<|endoftext|>", " "]
    assert bad["<|endoftext|>"] == "the caption is '<|endoftext|>': the tokenizer finds no word in it"
    for why in bad.values():
        why.encode()


def test_problems_of_one_place_are_told_together() -> None:
    found = noted([Problem("bad text", "a", "one"), Problem("no image", "b", "two"), Problem("bad text", "a", "three")])
    assert found == {"a": (Problem("bad text", "a", "one; three"), ""), "b": (Problem("no image", "b", "two"), "")}
