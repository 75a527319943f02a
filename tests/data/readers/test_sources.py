"""What `--data` means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_images import found, png, read, write_png, write_tar

from hnclip.data import sources
from hnclip.data.records import DataSet
from hnclip.data.scenes import FAMILIES, scene_records
from hnclip.data.sources import open_data, splits_of_paths


def table(*names: str) -> str:
    return "file_name,text\n" + "".join(f"{name},caption of {name}\n" for name in names)


def test_of_scenes_only_the_wanted_splits_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for split, families in (("train", 3), ("validation", 2), ("test", 1)):
        monkeypatch.setitem(FAMILIES, split, families)
    data = open_data("scenes/shelf")
    assert data.splits() == {"train": 6, "validation": 8, "test": 4}
    assert list(data.part("test")) == scene_records("shelf", "test")
    some = open_data("scenes/shelf", splits={"validation", "train"})
    assert some.records == (*data.part("train"), *data.part("validation"))
    with pytest.raises(ValueError, match="not read"):
        some.part("test")


def test_hugging_faces_image_folder(tmp_path: Path) -> None:
    """Images of one name in two splits are two images."""
    for value, folder in enumerate(["train", "test"]):
        write_png(tmp_path / folder / "1.png", value)
        (tmp_path / folder / "metadata.csv").write_text(table("1.png"))
    text = ("caption of 1.png",)
    assert found(read(tmp_path)) == [("test/1.png", text, "test", 1), ("train/1.png", text, "train", 0)]


def test_a_folder_with_tables(tmp_path: Path) -> None:
    def splits(source: Path | str, **settings: Any) -> list[tuple[str | None, int]]:
        return [(split, value) for *_, split, value in found(read(source, **settings))]

    for value, split in enumerate(["train", "val", "test"]):
        write_png(tmp_path / "images" / f"{split}.png", value)
    (tmp_path / "images" / "2.json").write_text("{}")  # below the top only Parquet files are tables
    (tmp_path / "coco_test.csv").write_text(table("images/test.png"))
    assert splits(tmp_path) == [(None, 2)]  # a single table is in no split
    for split in ("train", "val"):
        (tmp_path / f"coco_{split}.csv").write_text(table(f"images/{split}.png"))
    expected = [("test", 2), ("train", 0), ("validation", 1)]
    assert splits(tmp_path) == expected
    tar = write_tar(tmp_path / "images.tar", {f"images/{split}.png": png(7) for split in ("train", "val", "test")})
    with pytest.raises(ValueError, match=r"images.tar.*--read.images"):
        read(tmp_path)
    assert splits(tmp_path / "coco_test.csv", images=str(tar)) == [(None, 7)]
    tar.unlink()
    (tmp_path / "categories.csv").write_text("id,name\n1,dog\n")
    with pytest.raises(ValueError, match=r"categories.csv.*coco_test.csv"):
        read(tmp_path)
    assert splits(f"{tmp_path}/coco_*.csv") == expected
    assert splits(f"{tmp_path}/coco_*.csv", splits=False) == [(None, 2), (None, 0), (None, 1)]


def test_splits_in_names() -> None:
    splits = {"train.csv": "train", "data/train-00000-of-00002.parquet": "train", "coco_val.json": "validation"}
    others = {"default/validation/0000.parquet": "validation", "train/test.csv": None, "contest.csv": None}
    for path, split in {**splits, **others}.items():
        assert splits_of_paths([path]) == [split]
        assert splits_of_paths([path, "more.csv"]) == [None, None]


def test_names_on_the_hub_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(sources, "read_hub", lambda source, read: sent.append(source) or DataSet(source, ()))
    monkeypatch.chdir(tmp_path)
    open_data("owner/name:config")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="no record"):
        open_data("owner/name")  # now a directory here
    for mistyped in ("owner/captions.csv", "./captions", "/nowhere/x", "runs/mien", "x.jsonl", "a/b/c"):
        with pytest.raises(ValueError, match="no such file or directory"):
            open_data(mistyped)
    open_data("hf://owner/name")
    assert sent == ["owner/name:config", "owner/name"]
