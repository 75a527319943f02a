from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_pictures import png, shade, write_png

from hnclip.config import ReadConfig
from hnclip.core import InvalidImage
from hnclip.data.readers import parquet
from hnclip.data.readers.gather import Found
from hnclip.data.readers.paths import read_path


def read(path: Path, **settings: Any) -> Found:
    return read_path(path, ReadConfig(**settings))


def write(path: Path, group: int = 3, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


@pytest.mark.parametrize("layout", ["bytes", "struct"])
def test_pictures_in_cells_are_read_when_they_are_looked_at(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_PICTURES", 2)  # so that one row group takes several reads
    shades = list(range(0, 80, 10))
    cells = [png(value) if layout == "bytes" else {"bytes": png(value), "path": None} for value in shades]
    path = write(tmp_path / "t.parquet", image=cells, caption=[f"caption {value}" for value in shades])
    found = read(path)
    assert [record.id for record in found.records] == [f"t.parquet:{row}" for row in range(1, 9)]
    assert [shade(record.image) for record in found.records] == shades
    assert [shade(record.image) for record in found.records[::-1]] == shades[::-1]
    assert len({record.image.key for record in found.records}) == len(shades)
    again = pickle.loads(pickle.dumps(found.records))
    assert [shade(record.image) for record in again] == shades
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda record: shade(record.image), list(found.records) * 4)) == shades * 4


def test_opening_reads_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.parquet", image=[png(1)], caption=["one"])
    asked: list[list[str]] = []
    iter_batches = pq.ParquetFile.iter_batches

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(options["columns"])
        return iter_batches(self, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    (record,) = read(path).records
    assert asked == [["caption"], ["caption"]]
    assert shade(record.image) == 1
    assert asked[2:] == [["image"]]


def test_a_change_of_the_file_changes_the_stamp_and_the_picture(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", image=[png(1)], caption=["one"])
    (before,) = read(path).records
    assert shade(before.image) == 1
    write(path, image=[png(2), png(3)], caption=["one", "two"])
    after = read(path).records[0]
    assert before.image.key == after.image.key
    assert before.image.stamp() != after.image.stamp()
    assert shade(after.image) == 2


def test_cells_of_one_name_are_one_picture(tmp_path: Path) -> None:
    """As in sets with a row for each caption."""
    columns = {
        "image": [png(1), png(2), png(1)],
        "filename": ["a.jpg", "b.jpg", "a.jpg"],
        "caption": ["one", "two", "uno"],
        "split": ["train"] * 3,
    }
    found = read(write(tmp_path / "t.parquet", **columns))
    assert [(record.id, record.captions) for record in found.records] == [
        ("a.jpg", ("one", "uno")),
        ("b.jpg", ("two",)),
    ]
    columns["split"] = ["train", "train", "test"]  # numbering may begin anew in every split
    found = read(write(tmp_path / "t.parquet", **columns))
    assert [(r.id, r.split) for r in found.records] == [
        ("t.parquet:1", "train"),
        ("t.parquet:2", "train"),
        ("t.parquet:3", "test"),
    ]


def test_a_path_in_a_cell_without_bytes(tmp_path: Path) -> None:
    write_png(tmp_path / "images" / "1.png", 7)
    cells = [{"bytes": None, "path": "images/1.png"}, {"bytes": None, "path": None}]
    schema = pa.schema([("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("text", pa.string())])
    pq.write_table(pa.table({"image": cells, "text": ["a", "b"]}, schema=schema), tmp_path / "t.parquet")
    first, second = read(tmp_path / "t.parquet").records
    assert shade(first.image) == 7
    with pytest.raises(InvalidImage, match=r"row 1, column image.* holds no picture") as caught:
        second.image.load()
    assert caught.value.kind == "missing image"


@pytest.mark.parametrize("after", ["gone", "shorter", "broken"])
def test_a_file_that_changes_under_the_records_is_told(tmp_path: Path, after: str) -> None:
    path = write(tmp_path / "t.parquet", image=[png(1), png(2)], caption=["one", "two"])
    record = read(path).records[1]
    if after == "gone":
        path.unlink()
    elif after == "shorter":
        write(path, image=[png(1)], caption=["one"])
    else:
        path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InvalidImage, match="cannot be read") as caught:
        record.image.load()
    assert caught.value.kind == "missing image"


def test_a_directory_as_it_lies_on_the_hub(tmp_path: Path) -> None:
    for number, name in enumerate(["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"]):
        write(tmp_path / "data" / f"{name}.parquet", image=[png(number)], text=[f"caption {number}"])
    (tmp_path / "README.md").write_text("a card")
    found = read(tmp_path)
    assert {(record.split, record.captions, shade(record.image)) for record in found.records} == {
        ("train", ("caption 0",), 0),
        ("train", ("caption 1",), 1),
        ("test", ("caption 2",), 2),
    }
    (tmp_path / "data" / "train-00000-of-00002.parquet").unlink()
    (tmp_path / "data" / "train-00001-of-00002.parquet").unlink()
    assert [record.split for record in read(tmp_path).records] == ["test"]


def test_several_data_sets_in_one_directory_are_an_error(tmp_path: Path) -> None:
    for folder in ("english/train", "english/test", "french/train"):
        write(tmp_path / folder / "0.parquet", image=[png(1)], text=["x"])
    with pytest.raises(ValueError, match="several data sets, in english, french: name the directory of one"):
        read(tmp_path)
    assert {record.split for record in read(tmp_path / "english").records} == {"train", "test"}


def test_text_that_is_not_utf_8_is_told_by_row(tmp_path: Path) -> None:
    raw = pa.array([b"one", b"caf\xe9", b"three"]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"image": ["1.png", "2.png", "3.png"], "caption": text}), tmp_path / "t.parquet")
    found = read(tmp_path / "t.parquet")
    assert [record.id for record in found.records] == ["1.png", "3.png"]
    assert [(p.kind, p.where.rpartition("/")[2]) for p in found.problems] == [("bad text", "t.parquet:2")]


def test_what_is_no_parquet_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1" + b"\0" * 100)
    with pytest.raises(ValueError, match=r"t.parquet cannot be read as Parquet"):
        read(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match=r"pointer of Git LFS.*git lfs pull"):
        read(path)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hnclip.data import needs

    def absent(module: str) -> Any:
        raise ModuleNotFoundError(module)

    monkeypatch.setattr(needs, "import_module", absent)
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"Parquet files need the package pyarrow: pip install 'hnclip\[data\]'"):
        read(path)
