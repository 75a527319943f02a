"""The same table in every format: what is written comes back."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_pictures import png, shade, write_png, write_tar

from hnclip.config import ReadConfig
from hnclip.core import InvalidImage, Record
from hnclip.data.readers.gather import Found
from hnclip.data.readers.paths import read_path

Rows = Sequence[dict[str, Any]]


def write_delimited(path: Path, rows: Rows, delimiter: str) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_json_lines(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="")


FORMATS: dict[str, Callable[[Path, Rows], None]] = {
    "t.csv": lambda path, rows: write_delimited(path, rows, ","),
    "tabs.csv": lambda path, rows: write_delimited(path, rows, "\t"),
    "semicolons.csv": lambda path, rows: write_delimited(path, rows, ";"),
    "t.tsv": lambda path, rows: write_delimited(path, rows, "\t"),
    "t.jsonl": write_json_lines,
    "t.ndjson": write_json_lines,
    "t.json": lambda path, rows: path.write_text(json.dumps(list(rows)), encoding="utf-8") and None,
    "t.parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(list(rows)), path),
}


@pytest.fixture(params=FORMATS)
def read_rows_as(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Found]:
    """Writes rows in one of the formats and reads them."""

    def write_and_read(rows: Rows, **read: Any) -> Found:
        path = tmp_path / request.param
        FORMATS[request.param](path, rows)
        return read_path(path, ReadConfig(**read))

    return write_and_read


def told(found: Found) -> list[tuple[str, str]]:
    return [(problem.kind, problem.where.rpartition("/")[2]) for problem in found.problems]


def test_guessed_columns(read_rows_as: Callable[..., Found], tmp_path: Path) -> None:
    write_png(tmp_path / "a" / "1.png", 1)
    write_png(tmp_path / "a" / "2.png", 2)
    rows = [
        {
            "filename": "a/1.png",
            "caption": " one ",
            "split": "TRAIN",
            "image_id": "x",
            "short_caption": "1",
            "group": "g",
        },
        {"filename": "a/2.png", "caption": "two", "split": "val", "image_id": "y", "short_caption": "", "group": ""},
    ]
    found = read_rows_as(rows)
    assert [(r.id, r.captions, r.split, r.short, r.group) for r in found.records] == [
        ("x", ("one",), "train", "1", "g"),
        ("y", ("two",), "validation", None, None),
    ]
    assert [shade(record.image) for record in found.records] == [1, 2]
    assert found.problems == ()


def test_named_columns_and_pictures_elsewhere(read_rows_as: Callable[..., Found], tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "elsewhere" / "p.tar", {"coco/1.png": png(1), "coco/2.png": png(2)})
    rows = [{"where": "1.png", "x": "one", "y": "uno", "n": 1}, {"where": "2.png", "x": "two", "y": "", "n": 2}]
    found = read_rows_as(rows, images=str(tar), image_column="where", caption_column="x,y", id_column="n")
    assert [(record.id, record.captions) for record in found.records] == [("1", ("one", "uno")), ("2", ("two",))]
    assert [shade(record.image) for record in found.records] == [1, 2]
    assert found.problems == ()


def test_one_record_for_each_picture(read_rows_as: Callable[..., Found], tmp_path: Path) -> None:
    write_png(tmp_path / "1.png", 1)
    rows = [
        {"image": "1.png", "caption": "one", "split": "train"},
        {"image": "2.png", "caption": "two", "split": "train"},
        {"image": "./1.png", "caption": "uno", "split": "train"},
        {"image": str(tmp_path / "1.png"), "caption": "one", "split": "train"},
        {"image": "2.png", "caption": "zwei", "split": "test"},
    ]
    found = read_rows_as(rows)
    assert [(r.id, r.captions, r.split) for r in found.records] == [
        ("1.png", ("one", "uno"), "train"),
        ("2.png", ("two",), "train"),
    ]
    assert [problem.kind for problem in found.problems] == ["shared image"]


def test_bad_rows_are_told_and_left_out(read_rows_as: Callable[..., Found]) -> None:
    rows = [
        {"image": "1.png", "caption": "one", "split": "train"},
        {"image": "", "caption": "two", "split": "train"},
        {"image": "3.png", "caption": "", "split": "train"},
        {"image": "4.png", "caption": "four", "split": " "},
    ]
    found = read_rows_as(rows)
    assert [record.id for record in found.records] == ["1.png"]
    assert [problem.kind for problem in found.problems] == ["no image", "empty caption", "unreadable row"]


def test_a_missing_picture_keeps_its_record(read_rows_as: Callable[..., Found]) -> None:
    found = read_rows_as([{"image": "nowhere/1.png", "caption": "one"}])
    with pytest.raises(InvalidImage, match=r"nowhere/1.png does not exist"):
        found.records[0].image.load()
    assert found.problems == ()


def test_names_that_fit_several_pictures_are_told(read_rows_as: Callable[..., Found], tmp_path: Path) -> None:
    for folder in "ab":
        write_png(tmp_path / folder / "1.png")
    found = read_rows_as([{"image": "1.png", "caption": "one"}, {"image": "a/1.png", "caption": "two"}])
    assert [record.captions for record in found.records] == [("two",)]
    assert [problem.kind for problem in found.problems] == ["missing image"]
    assert "several pictures" in found.problems[0].detail


def test_beside_the_table_paths_count_too(read_rows_as: Callable[..., Found], tmp_path: Path) -> None:
    write_png(tmp_path / "here" / "1.png", 1)
    write_png(tmp_path / "images" / "2.png", 2)
    rows = [{"image": "here/1.png", "caption": "one"}, {"image": "machine/2.png", "caption": "two"}]
    found = read_rows_as(rows, images=str(tmp_path / "images"))
    assert [shade(record.image) for record in found.records] == [1, 2]


def test_addresses_whose_pictures_are_here(read_rows_as: Callable[..., Found], tmp_path: Path) -> None:
    write_png(tmp_path / "1.png", 1)
    found = read_rows_as([{"url": "https://example.org/VG/1.png", "paragraph": "one"}])
    assert [(record.id, shade(record.image)) for record in found.records] == [("1.png", 1)]


def test_nothing_to_read_is_an_error(read_rows_as: Callable[..., Found]) -> None:
    with pytest.raises(ValueError, match=r"looked for rows with a picture and a caption in .*\n  empty caption"):
        read_rows_as([{"image": "1.png", "caption": ""}])


def test_a_table_without_rows_is_an_error(tmp_path: Path) -> None:
    for name, content in (("t.csv", "image,caption\n"), ("e.csv", ""), ("t.jsonl", ""), ("t.json", "[]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match="no record found; looked for rows with a picture and a caption"):
            read_path(tmp_path / name, ReadConfig())


def test_bad_text_is_told_by_row(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"image,caption,note\n1.png,caf\xe9,\n2.png,fine,caf\xe9\n3\xff.png,x,\n")
    found = read_path(tmp_path / "t.csv", ReadConfig())
    assert [record.id for record in found.records] == ["2.png"]  # nobody reads the note
    assert told(found) == [("bad text", "t.csv:2"), ("bad text", "t.csv:4")]
    (tmp_path / "t.jsonl").write_text('{"image": "1.png", "caption": ["\\ud83d", "fine"]}\n')
    found = read_path(tmp_path / "t.jsonl", ReadConfig())
    assert [record.captions for record in found.records] == [("fine",)]
    assert told(found) == [("bad text", "t.jsonl:1")]


def test_lists_of_captions(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("filename,raw\n1.png,\"['a', 'b']\"\n")
    write_json_lines(tmp_path / "t.jsonl", [{"image": "1.png", "captions": ["a", {"raw": "b"}]}])
    table = pa.table({"image": ["1.png"], "captions": [[{"raw": "a"}, {"raw": "b"}]]})
    pq.write_table(table, tmp_path / "t.parquet")
    for name in ("t.csv", "t.jsonl", "t.parquet"):
        assert [record.captions for record in read_path(tmp_path / name, ReadConfig()).records] == [("a", "b")]


def test_captions_that_are_no_text_are_told(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "t.jsonl", [{"image": "1.png", "caption": "a"}, {"image": "2.png", "caption": 2}])
    assert told(read_path(tmp_path / "t.jsonl", ReadConfig())) == [("unreadable row", "t.jsonl:2")]


def test_open_clips_own_csv(tmp_path: Path) -> None:
    write_png(tmp_path / "1.png", 1)
    (tmp_path / "train.csv").write_text(f"filepath\ttitle\n{tmp_path}/1.png\tA dog, a cat\n")
    (record,) = read_path(tmp_path / "train.csv", ReadConfig()).records
    assert (record.id, record.captions, record.split, shade(record.image)) == ("1.png", ("A dog, a cat",), None, 1)


captions = st.text(
    alphabet=st.one_of(
        st.sampled_from("\"',;\t\n\r|\\ ab"), st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    ),
    min_size=1,
).map(str.strip)
# In a CSV a list is several captions.
captions = captions.filter(lambda text: bool(text) and not (text.startswith("[") and text.endswith("]")))
contents = st.lists(
    st.tuples(
        st.lists(captions, min_size=1, max_size=3, unique=True),
        st.sampled_from(["train", "validation", "test", "qual_dev"]),
        st.one_of(st.none(), captions),
    ),
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
    pictures = [f"images/{number}.png" for number in range(len(contents))]
    rows = [
        {"image": picture, "caption": caption, "split": split, "short_caption": short}
        for picture, (texts, split, short) in zip(pictures, contents)
        for caption in texts
    ]
    FORMATS[name](folder / name, rows)
    found = read_path(folder / name, ReadConfig())

    def tell(record: Record) -> tuple[Any, ...]:
        return record.id, list(record.captions), record.split, record.short, Path(record.image.key)

    assert found.problems == ()
    assert [tell(record) for record in found.records] == [
        (picture, texts, split, short, folder / picture) for picture, (texts, split, short) in zip(pictures, contents)
    ]
