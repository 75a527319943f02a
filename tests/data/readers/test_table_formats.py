"""The same table in every format, and the choice of its columns."""

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
from small_images import found, png, read, write_png, write_tar

from hnclip.config import ReadConfig
from hnclip.core import InvalidImage, Region
from hnclip.data.readers.columns import Columns, Row, choose_columns, invalid_text
from hnclip.data.records import DataSet

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
    "semicolons.csv": lambda path, rows: write_delimited(path, rows, ";"),
    "t.tsv": lambda path, rows: write_delimited(path, rows, "\t"),
    "t.jsonl": write_json_lines,
    "t.json": lambda path, rows: path.write_text(json.dumps(list(rows)), encoding="utf-8") and None,
    "t.parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(list(rows)), path),
}


@pytest.fixture
def read_rows(tmp_path: Path) -> Read:
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


def test_the_image_that_the_table_names_or_none(read_rows: Read, tmp_path: Path) -> None:
    """A file of the same name in another directory is another image: it is neither used, nor makes a table that works
    ambiguous."""
    write_png(tmp_path / "dogs" / "0001.png", 1)
    rows = [{"image": "cats/0001.png", "caption": "a cat"}]
    for images in (None, str(tmp_path / "dogs")):
        data = read_rows(rows, images=images)
        with pytest.raises(InvalidImage, match="does not exist"):
            data.records[0].image.read()
        assert [warning.kind for warning in data.warnings] == ["no image found"]
    for shade_, folder in enumerate(("cats", "more", "."), 2):
        write_png(tmp_path / folder / "0001.png", shade_)
    assert found(read_rows(rows)) == [("cats/0001.png", ("a cat",), None, 2)]


def test_a_search_by_name_is_counted_and_an_image_in_two_splits_reported(read_rows: Read, tmp_path: Path) -> None:
    write_png(tmp_path / "images" / "1.png", 1)
    rows = [{"image": name, "caption": name, "split": "train"} for name in ("/there/1.png", "images\\1.png")]
    data = read_rows([*rows, {**rows[1], "split": "test"}], match="name")
    assert found(data) == [("/there/1.png", ("/there/1.png", "images\\1.png"), "train", 1)]
    assert [(warning.kind, "1 rows" in warning.detail) for warning in data.warnings] == [("matched by name", True)]
    assert kinds(data) == ["shared image"]
    write_png(tmp_path / "others" / "1.png", 3)
    assert kinds(read_rows(rows[:1] + rows[1:], match="name")) == ["missing image"]


@given(st.binary())
def test_invalid_text_is_what_is_not_utf_8(content: bytes) -> None:
    try:
        content.decode()
        valid = True
    except UnicodeDecodeError:
        valid = False
    assert (invalid_text(content.decode(errors="surrogateescape")) is None) == valid


def segment(sentence: Any, score: Any, **box: Any) -> dict[str, Any]:
    corners = {"x1": 0, "y1": 1, "x2": 2, "y2": 3.0, "width": 7, "height": 9, **box}
    return {"filename": "c/1.png", "caption": sentence, "similarity_score": score, "bbox_coordinates": corners}


def test_goals_lists_have_regions(read_rows: Read) -> None:
    """The best first, of all rows of an image; segments without a sentence or a box are left out."""
    row = {"original_filename": "1.png", "original_caption": "One.", "other": "Two."}
    segments = [segment("A roof", 21.5), segment(" ", 3.0), segment("", 2.0, x2=0), segment("A door", 30.0)]
    segments += [segment("a", 1.0, **box) for box in ({"x1": None}, {"y2": float("nan")}, {"y2": 0}, {"x1": "b"})]
    bad: list[Any] = [None, 3, {}, segment(None, 1), segment("A wall", "high"), *segments[3:]]
    rows = [{**row, "segment": segments} for segments in (segments, None, 3, bad)]
    (record,) = read_rows(rows).records
    regions = [("A door", 30.0), ("A roof", 21.5), ("A wall", None)]
    assert record.regions == tuple(Region((0, 1, 2, 3), sentence, score) for sentence, score in regions)
    assert record.captions == ("One.",)
    assert read_rows(rows, caption_column="other").records[0].captions == ("Two.",)


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
    row |= {"short_caption": "y", "cluster_id": 7, "width": 640}
    others = {"split": "karpathy_split", "short": "short_caption", "group": "cluster_id"}
    assert choose(row) == Columns(("caption",), "image", id="Image_ID", **others)
    named = ReadConfig(caption_column="b, c", id_column="a")
    assert choose(row, named) == Columns(("b, c",), "image", id="a", **others)
    for name, keyword in (("imgae", "'imgae'.*image-column.*'caption'"), (None, "--read.caption-column")):
        with pytest.raises(ValueError, match=keyword):
            choose({"image": "1.png", "caption" if name else "x": "y"}, ReadConfig(image_column=name))
    row = {"jpg": None, "filename": "1.png", "caption": "x"}  # of a column that holds images
    assert choose(row, holding=["jpg"]) == Columns(("caption",), "jpg", name="filename")
