"""What `--data` means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_images import found, png, problems, read, shade, write_png, write_tar

from hnclip.config import ReadConfig
from hnclip.core import Record
from hnclip.data import sources
from hnclip.data.records import DataSet
from hnclip.data.scenes import FAMILIES, scene_records
from hnclip.data.sources import open_data, open_records, splits_of_paths


def table(*names: str) -> str:
    return "file_name,text\n" + "".join(f"{name},caption of {name}\n" for name in names)


@pytest.mark.parametrize(("source", "style"), [("scenes", "park"), ("scenes/park", "park"), ("scenes/shelf", "shelf")])
def test_scenes(source: str, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, families in (("train", 3), ("validation", 2), ("test", 1)):
        monkeypatch.setitem(FAMILIES, split, families)
    data = open_data(source)
    assert data.name == source
    assert data.splits() == {"train": 6, "validation": 8, "test": 4}
    assert list(data.part("test")) == scene_records(style, "test")
    assert open_records(source, "all") == list(data.records)
    asked: list[tuple[str, str]] = []

    def create(style: str, split: str, **more: Any) -> list[Record]:
        asked.append((style, split))
        return scene_records(style, split, **more)

    monkeypatch.setattr(sources, "scene_records", create)
    assert open_records(source, "validation") == list(data.part("validation"))
    some = open_data(source, splits={"validation", "train"})
    assert asked == [(style, "validation"), (style, "train"), (style, "validation")]
    assert some.part("train") == data.part("train")
    assert "test" in some.absent


def test_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        sources, "open_benchmark", lambda *args, splits: asked.append((*args, splits)) or DataSet("x", ())
    )
    open_data("docci/official=/data/docci", ReadConfig(images="images.tar"))
    open_data("docci=a=b", splits={"test"})
    open_data("dci", splits={"all"})
    assert asked == [
        ("docci/official", Path("/data/docci"), Path("images.tar"), None),
        ("docci", Path("a=b"), None, {"test"}),
        ("dci", None, None, None),
    ]


def test_records_of_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        write_png(tmp_path / "folder" / f"{number}.png", number)
        (tmp_path / "folder" / f"{number}.txt").write_text(f"caption {number}")
    monkeypatch.setenv("HOME", str(tmp_path))
    train, validation, every = (
        open_records("~/folder", split, ReadConfig(validation_share=0.25)) for split in ("train", "validation", "all")
    )
    assert (len(train), len(validation)) == (30, 10)
    assert {record.id for record in [*train, *validation]} == {record.id for record in every}
    with pytest.raises(ValueError, match="has no split 'test'"):
        open_records("~/folder", "test")


def test_hugging_faces_image_folder(tmp_path: Path) -> None:
    """Images of one name in two splits are two images."""
    for value, folder in enumerate(["train", "test"]):
        write_png(tmp_path / folder / "1.png", value)
        (tmp_path / folder / "metadata.csv").write_text(table("1.png"))
    text = ("caption of 1.png",)
    assert found(read(tmp_path)) == [("test/1.png", text, "test", 1), ("train/1.png", text, "train", 0)]
    write_png(tmp_path / "one" / "1.png", 2)
    (tmp_path / "one" / "metadata.jsonl").write_text('{"file_name": "1.png", "text": "x"}\n')
    assert found(read(tmp_path / "one")) == [("1.png", ("x",), None, 2)]


def test_a_folder_with_tables(tmp_path: Path) -> None:
    def splits(source: Path | str, **settings: Any) -> list[tuple[str | None, int]]:
        return [(split, value) for *_, split, value in found(read(source, **settings))]

    for value, split in enumerate(["train", "val", "test"]):
        write_png(tmp_path / "images" / f"{split}.png", value)
    (tmp_path / "images" / "2.json").write_text("{}")  # below the top only Parquet files are tables
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "coco_test.csv").write_text(table("images/test.png"))
    assert splits(tmp_path) == [(None, 2)]  # a single table is in no split
    for split in ("train", "val"):
        (tmp_path / f"coco_{split}.csv").write_text(table(f"images/{split}.png"))
    expected = [("test", 2), ("train", 0), ("validation", 1)]
    assert splits(tmp_path) == expected
    (tmp_path / "categories.csv").write_text("id,name\n1,dog\n")
    with pytest.raises(ValueError, match=r"categories.csv.*coco_test.csv"):
        read(tmp_path)
    assert splits(f"{tmp_path}/coco_*.csv") == expected
    assert splits(f"{tmp_path}/coco_*.csv", splits=False) == [(None, 2), (None, 0), (None, 1)]


def test_tables_and_tar_files_together_are_ambiguous(tmp_path: Path) -> None:
    (tmp_path / "captions.csv").write_text(table("x/1.png", "x/2.png"))
    tar = write_tar(tmp_path / "images.tar", {"x/1.png": png(3), "x/2.png": png(4)})
    with pytest.raises(ValueError, match=r"captions.csv.*images.tar.*--read.images"):
        read(tmp_path)
    assert [value for *_, value in found(read(tmp_path / "captions.csv", images=str(tar)))] == [3, 4]
    tar.write_bytes(tar.read_bytes()[:1600])
    data = read(tmp_path / "captions.csv", images=str(tar))
    assert problems(data) == {("unreadable row", str(tar))}
    assert shade(data.records[0].image) == 3


def test_splits_in_names() -> None:
    splits = {"train.csv": "train", "data/train-00000-of-00002.parquet": "train", "coco_val.json": "validation"}
    others = {"default/validation/0000.parquet": "validation", "train/test.csv": None, "contest.csv": None}
    for path, split in {**splits, **others}.items():
        assert splits_of_paths([path]) == [split]
        assert splits_of_paths([path, "more.csv"]) == [None, None]


def test_names_on_the_hub_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sources, "read_hub", lambda source, read: asked.append(source) or DataSet(source, ()))
    monkeypatch.chdir(tmp_path)
    assert open_data("owner/name:config").name == "owner/name:config"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    with pytest.raises(ValueError, match="no record"):
        open_data("owner/name")  # now a directory here
    assert open_data("hf://owner/name").name == "hf://owner/name"
    assert asked == ["owner/name:config", "owner/name"]


@pytest.mark.parametrize("source", ["owner/captions.csv", "./captions", "/nowhere/x", "runs/mien", "x.jsonl", "a/b/c"])
def test_a_mistyped_path_is_not_sent_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(sources, "read_hub", lambda source, read: pytest.fail("sent to the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="there is no such file or directory"):
        open_data(source)
