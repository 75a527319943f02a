"""A long list of bad tables, tars, cells and sources: each ends in a clear ValueError, or in problems of its rows and
invalid images; never in another exception."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_images import png, read, write_tar

from hnclip.core import InvalidImage
from hnclip.data.validate import ERRORS, WARNINGS

GOOD = {"image": "1.png", "caption": "one"}
Case = tuple[str, bytes, dict[str, Any]]


def lines(*rows: Any) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def parquet(columns: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def damaged(content: bytes) -> Iterator[bytes]:
    """Cut at several places, with bytes overwritten, zeroed, or added."""
    size = len(content)
    for at in (size * share // 100 for share in (0, 5, 30, 60, 99)):
        yield content[:at]
        yield content[:at] + b"\xff\xfe\x00garbage\x80" + content[at + 10 :]
        yield content[:at] + bytes(min(40, size - at)) + content[at + 40 :]
    yield content + b"\0\1\2more"


CELLS: list[Any] = [None, True, -1, 1.5, float("nan"), 10**400, "", " \t", "\0", "a\0.png", "\ud800", "x" * 100_000]
CELLS += ["https://example.org/1.png", "file:///1.png", "/", "..", "/dev/zero", "~", [], [[]], {}, ["a", 3]]
CELLS += [{"raw": 3}, {"raw": [None, "b"]}, [{"raw": "\udc80"}], [{"a": "b"}], "[1, 2", "{}"]

GOOD_CSV, GOOD_ROW = "image,caption\n1.png,x\n", b'{"image": "1.png", "caption": "x"'
TABLES = [b"", b"\xef\xbb\xbf", b"\n\n\r\n", b" , \n1.png,a dog\n", b"\0" * 2000, bytes(range(256)) * 8, b"\xff\xfea"]
TABLES += [*map(GOOD_CSV.encode, ("utf-16", "utf-16-le", "utf-32")), b"image,caption\n", b"image\n1.png\n", b"[null]"]
TABLES += [b"image,image,caption\n1.png,2.png,x\n", b'image,caption\n1.png,"open\n2.png,x\n', b'"image,caption\n1,x\n']
TABLES += [b"image,caption\n" + b"1.png," * 5000, b"," * 100_000, b'"' * 100_001, b"{", b"[", b"[}", b"[{},]", b"3"]
TABLES += [b"[1, 2, 3]", b"[%b}]]" % GOOD_ROW, b"[%b}] [1]" % GOOD_ROW, b"[" + GOOD_ROW, b'{"images": []}', b"NaN"]
TABLES += [b'{"images": [{"sentences": 3}]}', b'{"images": [{"id": []}], "annotations": [{"image_id": {}}]}']
TABLES += [b'{"images": [{"id": 1}, 3], "annotations": [{"image_id": 1, "caption": "x"}, null, []]}', b"1" * 10_000]
TABLES += [b'{"a": [{}], "b": [{}]}', b'{"a": {"b": {"c": []}}}', b"[" * 100_000, b'{"a":' * 100_000, b"PK\x03\x04 zip"]


def cases() -> Iterator[Case]:
    yield from ((f"t.{kind}", table, {}) for kind in ("csv", "json", "jsonl") for table in TABLES)
    yield from (
        ("t.jsonl", lines(GOOD, {**GOOD, column: cell}), {}) for column in (*GOOD, "split", "id") for cell in CELLS
    )
    yield from (("t.csv", GOOD_CSV.encode(), {"images": name}) for name in ("nowhere", "t.csv", "\0", "x" * 5000))
    with tempfile.TemporaryDirectory() as folder:
        content = write_tar(Path(folder, "s.tar"), {"1.png": png(1), "1.txt": b"x"}).read_bytes()
    yield from (("t.tar", bad, {}) for bad in damaged(content))
    yield from (("t.parquet", bad, {}) for bad in damaged(parquet({"image": [png(1), png(2)], "caption": ["a", "b"]})))
    yield from ((name, b"PK", {}) for name in ("t.xlsx", "t.zip", "t.csv.gz", "captions", "t.jpg"))


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case[0])
def test_bad_files_end_in_a_clear_message(tmp_path: Path, case: Case) -> None:
    """Either a ValueError, or a data set with known kinds of problems whose images can be read or are invalid."""
    name, content, settings = case
    (tmp_path / name).write_bytes(content)
    try:
        data = read(tmp_path / name, **settings)
    except ValueError as error:
        assert not isinstance(error, UnicodeError)  # noqa: PT017
        return
    assert {problem.kind for problem in data.problems} <= {*ERRORS}
    assert {warning.kind for warning in data.warnings} <= {*WARNINGS}
    for record in data.records:
        record.id.encode()
        assert all(caption.encode().strip() for caption in record.captions)
        for action in (record.image.stamp, record.image.load):
            try:
                action()
            except InvalidImage as error:
                assert error.kind in ERRORS  # noqa: PT017


SOURCES = ["[", "{", "*", "{a..b}", "{9..1}.tar", "{0..9999999}.tar", "t.csv/", "=", "://", "~no-such-user/data"]
SOURCES += ["scenes/moon", "scenes/", "docci=", "docci=nowhere", "/dev/null", "urban-1k=/dev/null", "folder", "", " "]
SOURCES += ["empty.tar", "a\0b", "\ud800", "x" * 5000, "a/" * 3000, "https://example.org/t.csv", "{a,b}" * 30]


@pytest.mark.parametrize("source", SOURCES)
def test_bad_sources_end_in_a_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HNCLIP_DATA", raising=False)
    (tmp_path / "folder" / "t.csv").mkdir(parents=True)
    (tmp_path / "empty.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"\w"):
        read(source)
