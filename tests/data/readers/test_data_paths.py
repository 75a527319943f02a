"""What a directory holds, and which reader it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_pictures import png, shade, write_png, write_tar

from hnclip.config import ReadConfig
from hnclip.data.readers.gather import Found
from hnclip.data.readers.paths import read_path, read_pattern
from hnclip.data.readers.splits import split_of_path, splits_of_paths


def read(path: Path, **settings: Any) -> Found:
    return read_path(path, ReadConfig(**settings))


def told(found: Found) -> list[tuple[str, str | None, int]]:
    return [(record.id, record.split, shade(record.image)) for record in found.records]


def table(*names: str) -> str:
    return "file_name,text\n" + "".join(f"{name},caption of {name}\n" for name in names)


def test_hugging_faces_image_folder(tmp_path: Path) -> None:
    """Pictures of one name in two splits are two pictures."""
    for value, folder in enumerate(["train", "test"]):
        write_png(tmp_path / folder / "1.png", value)
        (tmp_path / folder / "metadata.csv").write_text(table("1.png"))
    assert told(read(tmp_path)) == [("test/1.png", "test", 1), ("train/1.png", "train", 0)]
    write_png(tmp_path / "one" / "1.png", 2)
    (tmp_path / "one" / "metadata.jsonl").write_text('{"file_name": "1.png", "text": "x"}\n')
    assert told(read(tmp_path / "one")) == [("1.png", None, 2)]


def test_a_folder_with_one_table(tmp_path: Path) -> None:
    write_png(tmp_path / "images" / "1.png", 1)
    (tmp_path / "images" / "2.json").write_text("{}")  # below the top only Parquet files are tables
    (tmp_path / "captions.csv").write_text(table("1.png"))
    (tmp_path / "notes.txt").write_text("notes")
    assert told(read(tmp_path)) == [("1.png", None, 1)]


def test_a_folder_with_a_table_for_each_split(tmp_path: Path) -> None:
    for value, split in enumerate(["train", "val", "test"]):
        write_png(tmp_path / "images" / f"{split}.png", value)
        (tmp_path / f"coco_{split}.csv").write_text(table(f"images/{split}.png"))
    assert told(read(tmp_path)) == [
        ("images/test.png", "test", 2),
        ("images/train.png", "train", 0),
        ("images/val.png", "validation", 1),
    ]
    (tmp_path / "categories.csv").write_text("id,name\n1,dog\n")
    with pytest.raises(ValueError, match=r"several tables: categories.csv, coco_test.csv, .*name one of them"):
        read(tmp_path)
    assert len(read_pattern(f"{tmp_path}/coco_*.csv", ReadConfig()).records) == 3


def test_a_single_table_is_in_no_split_whatever_its_name(tmp_path: Path) -> None:
    write_png(tmp_path / "1.png", 1)
    (tmp_path / "test.csv").write_text(table("1.png"))
    assert told(read(tmp_path / "test.csv")) == [("1.png", None, 1)]


def test_tables_and_tar_files_together_are_a_question(tmp_path: Path) -> None:
    (tmp_path / "captions.csv").write_text(table("1.png"))
    tar = write_tar(tmp_path / "images.tar", {"x/1.png": png(3)})
    with pytest.raises(ValueError, match=r"tables \(captions.csv\) and tar files \(images.tar\).*--read.images"):
        read(tmp_path)
    assert told(read(tmp_path / "captions.csv", images=str(tar))) == [("1.png", None, 3)]


def test_a_damaged_tar_of_pictures_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(table("1.png", "2.png"))
    tar = write_tar(tmp_path / "images.tar", {"1.png": png(1), "2.png": png(2)})
    tar.write_bytes(tar.read_bytes()[:1600])
    found = read(tmp_path / "t.csv", images=str(tar))
    assert [problem.kind for problem in found.problems] == ["unreadable row"]
    assert [record.id for record in found.records] == ["1.png", "2.png"]
    assert shade(found.records[0].image) == 1


def test_a_place_of_pictures_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(table("1.png"))
    with pytest.raises(ValueError, match="nowhere, where the pictures should be, does not exist"):
        read(tmp_path / "t.csv", images=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["t.xlsx", "t.zip", "t.csv.gz", "captions"])
def test_other_files_are_an_error_with_what_can_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(ValueError, match=rf"{name} cannot be read: data are files that end in .csv, .*unpack other"):
        read(tmp_path / name)


def test_an_empty_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no record found; looked for pictures in"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.csv", "train"),
        ("data/train-00000-of-00002.parquet", "train"),
        ("default/validation/0000.parquet", "validation"),
        ("coco_val.json", "validation"),
        ("train/test.csv", None),
        ("training.csv", "train"),
        ("contest.csv", None),
    ],
)
def test_splits_in_names(path: str, split: str | None) -> None:
    assert split_of_path(path) == split


def test_names_are_splits_if_all_of_them_are() -> None:
    assert splits_of_paths(["train.csv", "test.csv"]) == ["train", "test"]
    assert splits_of_paths(["train.csv", "more.csv"]) == [None, None]
