"""Parquet files and Hugging Face data sets."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from small_images import found, png, problems, read, shade, write_png

from hnclip.core import InvalidImage
from hnclip.data.readers import arrow

FEATURES = datasets.Features({"image": datasets.Image(), "text": datasets.List(datasets.Value("string"))})


def write(path: Path, group: int = 3, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def dataset(*shades: int) -> Any:
    cells = [{"bytes": png(value), "path": None} for value in shades]
    captions = [[f"caption {value}", "again"] for value in shades]
    return datasets.Dataset.from_dict({"image": cells, "text": captions}, features=FEATURES)


@pytest.mark.parametrize("layout", ["bytes", "struct", "saved"])
def test_images_in_cells_are_read_on_demand(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_IMAGES", 2)  # so that one row group takes several reads
    shades = list(range(0, 80, 10))
    cells = [png(value) if layout == "bytes" else {"bytes": png(value), "path": None} for value in shades]
    path = tmp_path / "t"
    if layout == "saved":
        dataset(*shades[::-1]).select(range(7, -1, -1)).save_to_disk(str(path))
    else:
        path = write(tmp_path / "t.parquet", image=cells, text=[[f"caption {value}"] for value in shades])
    records = read(path).records
    label = "rows" if layout == "saved" else "t.parquet"
    assert [record.id for record in records] == [f"{label}:{row}" for row in range(1, 9)]
    for order in (records, records[::-1], records[::3] + records[1::3], pickle.loads(pickle.dumps(records))):
        assert [f"caption {shade(record.image)}" for record in order] == [record.captions[0] for record in order]
    again = read(path).records
    assert [(r.image.key, r.image.stamp()) for r in again] == [(r.image.key, r.image.stamp()) for r in records]
    assert len({record.image.key for record in records}) == len(shades)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda record: shade(record.image), records * 4)) == shades * 4


def test_cells_of_one_name_are_one_image(tmp_path: Path) -> None:
    """As in sets with a row for each caption."""
    cells = {"image": [png(1), png(2), png(1)], "filename": ["a.jpg", "b.jpg", "a.jpg"], "text": ["one", "two", "uno"]}
    records = read(write(tmp_path / "t.parquet", **cells)).records
    assert [(record.id, record.captions) for record in records] == [("a.jpg", ("one", "uno")), ("b.jpg", ("two",))]


def test_cells_without_bytes_and_text_that_is_not_utf_8(tmp_path: Path) -> None:
    write_png(tmp_path / "images" / "1.png", 7)
    cells = [{"bytes": None, "path": path} for path in ("images/1.png", None, "images/1.png")]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    raw = pa.array([b"one", b"two", b"caf\xe9"]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"image": pa.array(cells, kind), "text": text}), tmp_path / "t.parquet")
    data = read(tmp_path / "t.parquet")
    assert problems(data) == {("bad text", "3")}
    assert shade(data.records[0].image) == 7
    with pytest.raises(InvalidImage, match="holds no image"):
        data.records[1].image.load()


@pytest.mark.parametrize("after", ["gone", "shorter", "broken"])
def test_a_file_that_changes_after_opening(tmp_path: Path, after: str) -> None:
    """Another stamp and image under the same key; missing images are reported."""
    path = write(tmp_path / "t.parquet", image=[png(1), png(2)], caption=["one", "two"])
    first, second = read(path).records
    if after == "gone":
        path.unlink()
    elif after == "broken":
        path.write_bytes(b"PAR1 and nothing else")
    else:
        write(path, image=[png(3)], caption=["one"])
        (again,) = read(path).records
        assert (again.image.key, shade(again.image)) == (first.image.key, 3)
        assert again.image.stamp() != first.image.stamp()
    with pytest.raises(InvalidImage) as caught:
        second.image.load()
    assert caught.value.kind == "missing image"


def test_saved_datasets_and_directories_as_on_the_hub_have_splits(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": dataset(1, 2), "val": dataset(3)}).save_to_disk(str(tmp_path / "splits"))
    splits = [(record.id, record.split) for record in read(tmp_path / "splits").records]
    assert splits == [("train:1", "train"), ("train:2", "train"), ("val:1", "validation")]
    for number, name in enumerate(["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"]):
        write(tmp_path / "hub" / "data" / f"{name}.parquet", image=[png(number)], text=[f"caption {number}"])
    expected = {(("caption 0",), "train", 0), (("caption 1",), "train", 1), (("caption 2",), "test", 2)}
    assert {record[1:] for record in found(read(tmp_path / "hub"))} == expected
    (tmp_path / "splits" / "train" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path / "splits")


def test_a_dataset_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str | None]] = []
    loaded = datasets.DatasetDict({"test": dataset(5)})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: calls.append((name, config)) or loaded)
    data = read("owner-of/name:small")
    assert calls == [("owner-of/name", "small")]
    assert found(data) == [("test:1", ("caption 5", "again"), "test", 5)]
