from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants
from tiny_pictures import png, shade, write_png

from hnclip.config import ReadConfig
from hnclip.data.readers.gather import Found
from hnclip.data.readers.huggingface import looks_like_hub_name, read_hub
from hnclip.data.readers.paths import read_path

FEATURES = datasets.Features({"image": datasets.Image(), "text": datasets.List(datasets.Value("string"))})


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Any:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def dataset(*shades: int) -> Any:
    cells = [{"bytes": png(value), "path": None} for value in shades]
    captions = [[f"caption {value}", "again"] for value in shades]
    return datasets.Dataset.from_dict({"image": cells, "text": captions}, features=FEATURES)


def read(path: Path, **settings: Any) -> Found:
    return read_path(path, ReadConfig(**settings))


def test_a_saved_dataset(tmp_path: Path) -> None:
    dataset(1, 2, 3).save_to_disk(str(tmp_path / "d"))
    found = read(tmp_path / "d")
    assert [(r.id, r.captions, r.split) for r in found.records] == [
        (f"rows:{value}", (f"caption {value}", "again"), None) for value in (1, 2, 3)
    ]
    assert [shade(record.image) for record in found.records] == [1, 2, 3]
    assert [shade(record.image) for record in pickle.loads(pickle.dumps(found.records))] == [1, 2, 3]
    assert [record.image.key for record in read(tmp_path / "d").records] == [r.image.key for r in found.records]
    assert [record.image.stamp() for record in read(tmp_path / "d").records] == [r.image.stamp() for r in found.records]


def test_a_saved_dictionary_has_splits(tmp_path: Path) -> None:
    splits = datasets.DatasetDict({"train": dataset(1, 2), "val": dataset(3)})
    splits.save_to_disk(str(tmp_path / "d"))
    found = read(tmp_path / "d")
    assert [(record.id, record.split, shade(record.image)) for record in found.records] == [
        ("train:1", "train", 1),
        ("train:2", "train", 2),
        ("val:1", "validation", 3),
    ]


def test_a_saved_selection_keeps_its_rows(tmp_path: Path) -> None:
    dataset(1, 2, 3).select([2, 0]).save_to_disk(str(tmp_path / "d"))
    assert [shade(record.image) for record in read(tmp_path / "d").records] == [3, 1]


def test_named_columns_and_pictures_by_name(tmp_path: Path) -> None:
    write_png(tmp_path / "images" / "1.png", 4)
    table = datasets.Dataset.from_dict({"file": ["1.png"], "a": ["x"], "b": ["y"]})
    table.save_to_disk(str(tmp_path / "d"))
    found = read(tmp_path / "d", images=str(tmp_path / "images"), caption_column="a,b")
    assert [(r.id, r.captions, shade(r.image)) for r in found.records] == [("1.png", ("x", "y"), 4)]


def test_a_half_written_directory_is_an_error(tmp_path: Path) -> None:
    dataset(1).save_to_disk(str(tmp_path / "d"))
    (tmp_path / "d" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read as a saved dataset"):
        read(tmp_path / "d")


def test_a_dataset_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def load(name: str, config: str | None) -> Any:
        asked.append((name, config))
        return datasets.DatasetDict({"test": dataset(5)})

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", load)
    (record,) = read_hub("owner/name:small", ReadConfig()).records
    assert asked == [("owner/name", "small")]
    assert (record.id, record.split, shade(record.image)) == ("test:1", "test", 5)
    assert record.image.key == "owner/name:small/test:1"


def test_a_dataset_that_names_pictures_needs_their_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    table = datasets.Dataset.from_dict({"file": ["1.png"], "caption": ["x"]})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: table)
    with pytest.raises(ValueError, match=r"name the pictures' directory with --read.images"):
        read_hub("owner/name", ReadConfig())


def test_a_dataset_that_cannot_be_had_is_a_short_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, config: str | None) -> Any:
        raise ConnectionError("Couldn't reach it\nand much more")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'owner/name' is no file .*HF_HUB_OFFLINE is set \(Couldn't reach it\)$"):
        read_hub("owner/name", ReadConfig())


def test_without_a_connection_one_question_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def info(self: Any, name: str, timeout: float) -> Any:
        asked.append(name)
        raise OSError("no connection")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments: pytest.fail("it must not try again"))
    with pytest.raises(ValueError, match=r"not found on the hub \(no connection\); HF_HUB_OFFLINE=1 takes it"):
        read_hub("owner/name", ReadConfig())
    assert asked == ["owner/name"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("owner/name", True),
        ("o-1/n.a_me:config", True),
        ("name", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("./a", False),
    ],
)
def test_names_on_the_hub(source: str, expected: bool) -> None:
    assert looks_like_hub_name(source) == expected
