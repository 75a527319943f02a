"""What is indexed of a folder or of other data, and which captions cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from build_helpers import opened
from encode_helpers import save_picture

from hnclip.config import ReadConfig
from hnclip.data.records import Problem
from hnclip.search.index_plan import noted
from hnclip.search.index_run import unreadable_texts
from hnclip.search.index_source import IndexSource, open_index_source


def source_of(data: Path | str, *, split: str = "all", read: ReadConfig | None = None) -> IndexSource:
    return open_index_source(str(data), read or ReadConfig(), split=split, report=told.append)


told: list[str] = []


@pytest.fixture(autouse=True)
def nothing_told() -> None:
    told.clear()


def captions_of(source: IndexSource) -> dict[str, tuple[str, ...]]:
    entries = [source.entry(number) for number in range(len(source))]
    return {entry.name: entry.captions for entry in entries}


def write(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        save_picture(folder / name, number)


def test_all_pictures_of_a_folder_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, "b.png", "a/deep/c.jpg", ".hidden/d.png", ".e.png")
    (tmp_path / "README.txt").write_text("about these pictures")
    (tmp_path / "x.hnc").mkdir()
    (tmp_path / "x.hnc/thumbnails").touch()
    found = source_of(tmp_path)
    assert captions_of(found) == {"b.png": (), "a/deep/c.jpg": ()}
    assert (found.data, found.root, found.problems, told) == (str(tmp_path), tmp_path, (), [])


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


def test_unreadable_texts(model_directory: Path) -> None:
    transform = opened(model_directory).text_transform
    assert unreadable_texts([], transform) == {}
    assert unreadable_texts(["a house", "two trees"], transform) == {}
    bad = unreadable_texts(["a house", "<|endoftext|>", "half \ud83d of one", " "], transform)
    assert list(bad) == ["half \ud83d of one", "<|endoftext|>", " "]
    assert bad["<|endoftext|>"] == "the caption is '<|endoftext|>': the tokenizer finds no word in it"
    for why in bad.values():
        why.encode()


def test_problems_of_one_place_are_told_together() -> None:
    found = noted([Problem("bad text", "a", "one"), Problem("no image", "b", "two"), Problem("bad text", "a", "three")])
    assert found == {"a": (Problem("bad text", "a", "one; three"), ""), "b": (Problem("no image", "b", "two"), "")}
