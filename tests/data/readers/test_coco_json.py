"""Karpathy's splits, COCO's captions, and lists below a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_pictures import shade, write_png

from hnclip.config import ReadConfig
from hnclip.data.readers.gather import Found
from hnclip.data.readers.paths import read_path


def read(tmp_path: Path, content: Any, settings: ReadConfig = ReadConfig()) -> Found:  # noqa: B008
    path = tmp_path / "captions.json"
    path.write_text(json.dumps(content))
    return read_path(path, settings)


def test_karpathy_splits(tmp_path: Path) -> None:
    write_png(tmp_path / "val2014" / "1.png", 1)
    write_png(tmp_path / "elsewhere" / "2.png", 2)
    images = [
        {"filepath": "val2014", "filename": "1.png", "split": "restval", "sentences": [{"raw": "a "}, {"raw": "b"}]},
        {"filename": "2.png", "split": "val", "sentences": [{"raw": "c", "tokens": ["c"]}]},
        {"filename": "3.png", "split": "test", "sentences": []},
        {"filename": "4.png", "sentences": [{"raw": "d"}]},
    ]
    found = read(tmp_path, {"images": images, "dataset": "coco"})
    assert [(record.id, record.captions, record.split) for record in found.records] == [
        ("val2014/1.png", ("a", "b"), "train"),
        ("2.png", ("c",), "validation"),
    ]
    assert [shade(record.image) for record in found.records] == [1, 2]
    assert [(problem.kind, problem.where.rpartition(":")[2]) for problem in found.problems] == [
        ("no caption", "images[2]"),
        ("unreadable row", "images[3]"),
    ]


def test_columns_of_karpathy_splits_can_be_named(tmp_path: Path) -> None:
    image = {"filename": "1.png", "cocoid": 7, "split": "test", "sentences": [{"raw": "a"}]}
    found = read(tmp_path, {"images": [image]}, ReadConfig(id_column="cocoid"))
    assert found.records[0].id == "7"


def test_coco_captions(tmp_path: Path) -> None:
    content = {
        "info": {},
        "licenses": [],
        "images": [{"id": 1, "file_name": "1.png"}, {"id": 2, "file_name": "2.png"}, {"id": 3, "file_name": "3.png"}],
        "annotations": [
            {"id": 10, "image_id": 2, "caption": "a"},
            {"id": 11, "image_id": 1, "caption": "b"},
            {"id": 12, "image_id": 2, "caption": "c"},
            {"id": 13, "image_id": 9, "caption": "d"},
            "nothing",
        ],
    }
    found = read(tmp_path, content)
    assert [(record.id, record.captions) for record in found.records] == [("2", ("a", "c")), ("1", ("b",))]
    assert {(problem.kind, problem.where.rpartition(":")[2]) for problem in found.problems} == {
        ("no image", "annotations[3]"),
        ("unreadable row", "annotations[4]"),
        ("no caption", "images[2]"),
    }


def test_one_list_below_a_key(tmp_path: Path) -> None:
    found = read(tmp_path, {"version": 1, "annotations": [{"image_id": 0, "image": "1.png", "caption": "a"}]})
    assert [(record.id, record.captions) for record in found.records] == [("0", ("a",))]


@pytest.mark.parametrize("content", [{"a": 1}, {"a": [{"x": 1}], "b": [{"y": 1}]}, {"images": []}])
def test_an_object_without_one_list_is_an_error(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ValueError, match="a list of objects is needed"):
        read(tmp_path, content)
