"""Parquet files and Hugging Face data sets; rows of tables of every format, and the choice of their columns."""

from __future__ import annotations

import csv
import json
import pickle
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_images import found, png, read, shade, write_png, write_tar

from hnclip.config import ReadConfig
from hnclip.core import InvalidImage
from hnclip.data.readers import arrow
from hnclip.data.readers import rows as rows_module
from hnclip.data.readers.columns import Columns, Row, choose_columns, invalid_text
from hnclip.data.readers.rows import read_rows
from hnclip.data.records import DataSet, ReadLog

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


def test_cells_without_bytes(tmp_path: Path) -> None:
    write_png(tmp_path / "images" / "1.png", 7)
    cells = [{"bytes": None, "path": path} for path in ("images/1.png", None)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(cells, kind), "text": ["one", "two"]}), tmp_path / "t.parquet")
    data = read(tmp_path / "t.parquet")
    assert shade(data.records[0].image) == 7
    with pytest.raises(InvalidImage, match="holds no image"):
        data.records[1].image.load()
    raw = pa.array([b"one", b"caf\xe9"]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    pq.write_table(pa.table({"image": pa.array(cells, kind), "text": text}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t.parquet.* cannot be read: .*utf-8"):
        read(tmp_path / "t.parquet")


def test_a_file_that_changes_after_opening(tmp_path: Path) -> None:
    """Another stamp and image under the same key; missing images are reported."""
    path = write(tmp_path / "t.parquet", image=[png(1), png(2)], caption=["one", "two"])
    first, second = read(path).records
    write(path, image=[png(3)], caption=["one"])
    (again,) = read(path).records
    assert (again.image.key, shade(again.image)) == (first.image.key, 3)
    assert again.image.stamp() != first.image.stamp()
    for change in (lambda: None, lambda: path.write_bytes(b"PAR1 and nothing else"), path.unlink):
        change()
        with pytest.raises(InvalidImage, match="cannot be read"):
            second.image.load()


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


def rows_of(path: Path, content: str | bytes) -> tuple[list[tuple[str, dict[str, Any]]], ReadLog]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    log = ReadLog()
    return list(read_rows(path, log)), log


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv_files(tmp_path: Path, ending: str, delimiter: str) -> None:
    """Byte order mark, quotes, blank lines, a long cell, and a header that contains other delimiters."""
    long = "word " * 100_000
    lines = ['\ufeffimage ~ "a, b; c"~', '1.png~"say ""hi""~', 'twice"', "", " ~", f"2.png~{long}~"]
    rows, log = rows_of(tmp_path / "t.csv", ending.join(lines).replace(" ~ ", "~").replace("~", delimiter))
    quoted = {"image": "1.png", "a, b; c": f'say "hi"{delimiter}{ending}twice'}
    assert rows == [("2", quoted), ("6", {"image": "2.png", "a, b; c": long})]
    assert log == ReadLog()


@pytest.mark.parametrize("bad", ["1.png,a dog, running", "1.png", '1.png,"a dog" running'])
def test_a_bad_line_is_the_only_one_lost(tmp_path: Path, bad: str) -> None:
    rows, log = rows_of(tmp_path / "t.csv", f"image,caption\n0.png,first\n{bad}\n2.png,later\n")
    assert [place for place, _ in rows] == ["2", "4"]
    assert [(problem.kind, problem.where) for problem in log.problems] == [("unreadable row", f"{tmp_path}/t.csv:3")]


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.json"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "cp1252", "utf-16"])
def test_other_encodings_are_read_with_a_warning(tmp_path: Path, name: str, encoding: str) -> None:
    line = '{"image": "1.png", "caption": "Straße am Café"}'
    content = {"t.csv": "image,caption\n1.png,Straße am Café", "t.jsonl": f"{line}\n", "t.json": f"[{line}]"}[name]
    rows, log = rows_of(tmp_path / name, content.encode(encoding))
    assert [row["caption"] for _, row in rows] == ["Straße am Café"]
    assert [warning.kind for warning in log.warnings] == ([] if "utf-8" in encoding else ["other encoding"])


def test_json_lines_and_cells_with_other_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 3: .*quote"):  # an open quote ends the reading at its line
        rows_of(tmp_path / "t.csv", 'image,caption\n0.png,first\n1.png,"open\n2.png,"fine"\n3.png,fine\n')
    content = b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": \n[1]\n{"a": "\xc3\xa9"}\r\n' + b"[" * 100_000 + b'\n{"a": 2}'
    for name in ("t.jsonl", "t.json"):  # lines, whatever the file is called
        rows, log = rows_of(tmp_path / name, content)
        assert rows == [("1", {"a": 1}), ("6", {"a": "é"}), ("8", {"a": 2})]
        assert [problem.where for problem in log.problems] == [f"{tmp_path}/{name}:{line}" for line in (4, 5, 7)]
    rows, log = rows_of(tmp_path / "t.csv", b"image,caption\n1.png,caf\xe9\n2.png,caf\xc3\xa9\n")
    assert ([row["caption"] for _, row in rows], log.warnings) == (["caf\udce9", "café"], [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    rows=st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=4) | JSON, max_size=8),
    chunk=st.integers(3, 40),
    indent=st.none() | st.integers(0, 2),
    ascii_only=st.booleans(),
)
def test_a_json_list_read_in_chunks_is_the_list(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], chunk: int, indent: int | None, ascii_only: bool
) -> None:
    """Bare numbers, too, which a chunk may divide."""
    content = f"  {json.dumps(rows, indent=indent, ensure_ascii=ascii_only)}\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_CHUNK", chunk)
        found, log = rows_of(tmp_path_factory.mktemp("stream") / "rows.json", content)
    places = [f"[{number}]" for number in range(len(rows))]
    assert found == [(place, row) for place, row in zip(places, rows) if isinstance(row, dict)]
    assert len(found) + len(log.problems) == len(rows)


def test_karpathy_splits_and_coco_captions(tmp_path: Path) -> None:
    image = {"filepath": "val2014", "filename": "1.png", "split": "val", "sentences": [{"raw": "a"}]}
    rows, _ = rows_of(tmp_path / "k.json", json.dumps({"images": [image, "x"], "dataset": "coco"}))
    assert rows == [("images[0]", {"filename": "val2014/1.png", "split": "val", "sentences": [{"raw": "a"}]})]
    images = [{"id": 1, "file_name": "1.png"}, {"id": 2, "file_name": "2.png"}]
    annotations = [{"id": 9, "image_id": 2, "caption": "a"}, {"id": 8, "image_id": 7, "caption": "b"}, None]
    rows, log = rows_of(tmp_path / "c.json", json.dumps({"images": images, "annotations": annotations}))
    assert rows == [
        ("annotations[0]", {"id": 2, "image_id": 2, "caption": "a", "file_name": "2.png"}),
        ("annotations[1]", {"id": 8, "image_id": 7, "caption": "b"}),
        ("images[0]", {"id": 1, "file_name": "1.png"}),
    ]
    assert [problem.where for problem in log.problems] == [f"{tmp_path}/c.json:annotations[2]"]


Rows = Sequence[dict[str, Any]]
Read = Callable[..., DataSet]


def write_delimited(path: Path, rows: Rows, delimiter: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_json_lines(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="")


FORMATS: dict[str, Callable[[Path, Rows], None]] = {
    "t.csv": lambda path, rows: write_delimited(path, rows, ","),
    "t.tsv": lambda path, rows: write_delimited(path, rows, "\t"),
    "t.jsonl": write_json_lines,
    "t.json": lambda path, rows: path.write_text(json.dumps(list(rows)), encoding="utf-8") and None,
    "t.parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(list(rows)), path),
}


@pytest.fixture
def read_lines(tmp_path: Path) -> Read:
    """Writes rows as JSON lines and reads them."""

    def write_and_read(rows: Rows, **settings: Any) -> DataSet:
        write_json_lines(tmp_path / "t.jsonl", rows)
        return read(tmp_path / "t.jsonl", **settings)

    return write_and_read


def kinds(data: DataSet) -> list[str]:
    return [problem.kind for problem in data.problems]


@pytest.mark.parametrize("name", FORMATS)
def test_columns_and_images_are_named_and_bad_rows_reported(tmp_path: Path, name: str) -> None:
    tar = write_tar(tmp_path / "elsewhere" / "p.tar", {"coco/1.png": png(1), "./coco/2.png": png(2)})
    rows = [("coco/1.png", "one", "uno", "1"), ("coco/2.png", "two", "", "2"), ("", "x", "x", "3")]
    rows += [("4.png", "", "", "4"), ("5\0.png", "five", "x", "5"), ("6.png", "z", "z", "1")]
    FORMATS[name](tmp_path / name, [dict(zip(("where", "x", "y", "n"), row)) for row in rows])
    data = read(tmp_path / name, images=str(tar), image_column="where", caption_column="x,y", id_column="n")
    assert found(data) == [("1", ("one", "uno"), None, 1), ("2", ("two",), None, 2)]
    assert kinds(data) == ["no image", "no caption", "missing image", "repeated id"]


def test_the_image_that_the_table_names_or_none(read_lines: Read, tmp_path: Path) -> None:
    """A file of the same name in another directory is another image: it is neither used, nor makes a table that works
    ambiguous."""
    write_png(tmp_path / "dogs" / "0001.png", 1)
    rows = [{"image": "cats/0001.png", "caption": "a cat"}]
    for images in (None, str(tmp_path / "dogs")):
        data = read_lines(rows, images=images)
        with pytest.raises(InvalidImage, match="does not exist"):
            data.records[0].image.read()
    for shade_, folder in enumerate(("cats", "more", "."), 2):
        write_png(tmp_path / folder / "0001.png", shade_)
    assert found(read_lines(rows)) == [("cats/0001.png", ("a cat",), None, 2)]
    assert kinds(read_lines([{**rows[0], "split": split} for split in ("train", "test")])) == ["shared image"]


def test_empty_splits_are_problems_unless_splits_are_ignored(read_lines: Read, tmp_path: Path) -> None:
    write_png(tmp_path / "1.png", 1)
    rows = [{"image": "1.png", "caption": text, "split": split} for text, split in (("x", None), ("y", "train"))]
    assert kinds(read_lines(rows)) == ["unreadable row"]
    assert found(read_lines(rows, splits=False)) == [("1.png", ("x", "y"), None, 1)]


@pytest.mark.parametrize("form", [json.dumps, repr])  # the latter is what pandas writes
def test_a_list_in_a_cell_is_several_captions(tmp_path: Path, form: Callable[[Any], str]) -> None:
    texts = ["a dog's ball", 'it "sleeps"']
    FORMATS["t.csv"](tmp_path / "t.csv", [{"image": "1.png", "caption": form(texts)}])
    assert read(tmp_path / "t.csv").records[0].captions == tuple(texts)


@given(st.binary())
def test_invalid_text_is_what_is_not_utf_8(content: bytes) -> None:
    try:
        content.decode()
        valid = True
    except UnicodeDecodeError:
        valid = False
    assert (invalid_text(content.decode(errors="surrogateescape")) is None) == valid


captions = st.text(
    alphabet=st.one_of(
        st.sampled_from("\"',;\t\n\r|\\ ab"), st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    ),
    min_size=1,
).map(str.strip)
# In a CSV a list is several captions.
captions = captions.filter(lambda text: bool(text) and not (text.startswith("[") and text.endswith("]")))
splits = st.sampled_from(["train", "validation", "test", "qual_dev"])
contents = st.lists(
    st.tuples(st.lists(captions, min_size=1, max_size=3, unique=True), splits, st.one_of(st.none(), captions)),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", FORMATS)
@given(contents=contents)
@settings(max_examples=25)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, name: str, contents: list[tuple[list[str], str, str | None]]
) -> None:
    folder = tmp_path_factory.mktemp("round")
    images = [f"images/{number}.png" for number in range(len(contents))]
    names = ("image", "caption", "split", "short_caption", "id", "group")
    rows = [
        dict(zip(names, (image, caption, split.upper(), short, f"{image}!", split)))
        for image, (texts, split, short) in zip(images, contents)
        for caption in texts
    ]
    FORMATS[name](folder / name, rows)
    data = read(folder / name)
    assert data.problems == ()
    assert [(r.id, list(r.captions), r.split, r.short, Path(r.image.key), r.group) for r in data.records] == [
        (f"{image}!", texts, split, short, folder / image, split)
        for image, (texts, split, short) in zip(images, contents)
    ]


def choose(row: Row, settings: ReadConfig = ReadConfig(), **options: Any) -> Columns:  # noqa: B008
    return choose_columns("t.csv", list(row), [row], settings, **options)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"filepath": "1.png", "title": "x"}, "filepath title"),  # open_clip
        ({"filepath": "val2014", "filename": "1.png", "sentences": []}, "filename sentences"),  # Karpathy
        ({"image": "1.png", "caption_0": "x", "caption_1": "y", "id": 1}, "image caption_0 caption_1"),
        ({"image": "1.png", "short_caption": "x", "caption": "y", "long_caption": "z"}, "image long_caption"),
        ({"image": "http://x.org/1.png", "file": "1.png", "url": "u", "caption": "x"}, "file caption"),
    ],
)
def test_columns_are_guessed_from_common_names(row: Row, columns: str) -> None:
    chosen = choose(row)
    assert [chosen.image, *chosen.captions] == columns.split()


def test_the_other_columns_are_guessed_or_named() -> None:
    row = {"image": "1.png", "caption": "x", "Image_ID": 1, "karpathy_split": "test", "a": 1, "b, c": 2}
    named = ReadConfig(caption_column="b, c", id_column="a")
    assert choose(row) == Columns(("caption",), "image", id="Image_ID", split="karpathy_split")
    assert choose(row, named) == Columns(("b, c",), "image", id="a", split="karpathy_split")
    for name, keyword in (("imgae", "'imgae'.*image-column.*'caption'"), (None, "--read.caption-column")):
        with pytest.raises(ValueError, match=keyword):
            choose({"image": "1.png", "caption" if name else "x": "y"}, ReadConfig(image_column=name))
    row = {"jpg": None, "filename": "1.png", "caption": "x"}  # of a column that holds images
    assert choose(row, holding=["jpg"]) == Columns(("caption",), "jpg", name="filename")


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.json"])
def test_a_large_table_opens_in_little_memory(tmp_path: Path, name: str) -> None:
    """At most 600 bytes a row over the file, so 1 GB is far away for a million rows."""
    rows = [{"image": f"images/{n:09}.jpg", "caption": f"caption {n} " * 10, "split": "train"} for n in range(20_000)]
    FORMATS[name](tmp_path / name, rows)
    tracemalloc.start()
    records = read(tmp_path / name).records
    peak = tracemalloc.get_traced_memory()[1] - (tmp_path / name).stat().st_size
    tracemalloc.stop()
    assert peak < 600 * len(records)
