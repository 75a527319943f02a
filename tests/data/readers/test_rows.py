"""Rows of CSV, TSV, JSON lines and JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hnclip.data.readers import rows as rows_module
from hnclip.data.readers.rows import read_rows
from hnclip.data.records import ReadLog


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
