"""A long list of bad tables, names, tars, JSON, columns and encodings: each ends in a clear ValueError, or in problems
of its rows and invalid images; never in another exception."""

from __future__ import annotations

import gzip
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
DEEP = 100_000
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
    for share in (0, 1, 5, 30, 60, 90, 99):
        at = size * share // 100
        yield content[:at]
        yield content[:at] + b"\xff\xfe\x00garbage\x80" + content[at + 10 :]
        yield content[:at] + bytes(min(40, size - at)) + content[at + 40 :]
    yield content + b"\0\1\2more"


CELLS: list[Any] = [None, True, 0, -1, 1.5, float("nan"), float("inf"), 10**400, "", " \t", "\0", "a\0.png", "\ud800"]
CELLS += ["x" * 100_000, "https://example.org/1.png", "s3://b/1.png", "file:///1.png", "/", ".", "..", "/dev/zero", "~"]
CELLS += [[], [[]], {}, ["a", 3], {"raw": 3}, {"raw": [None, "b"]}, [{"raw": "\udc80"}], [{"a": "b"}], "[1, 2", "{}"]

GOOD_CSV, GOOD_ROW = "image,caption\n1.png,x\n", b'{"image": "1.png", "caption": "x"'
TABLES = [b"", b"\xef\xbb\xbf", b"\n\n\r\n", b" , \n , \n", b" , \n1.png,a dog\n", b"\0" * 2000, bytes(range(256)) * 8]
TABLES += [b"\xff\xfe", b"\xff\xfea", b"\xfe\xff\0i", *map(GOOD_CSV.encode, ("utf-16", "utf-16-le", "utf-32"))]
TABLES += [b"image,caption\n", b"image,image,caption\n1.png,2.png,x\n", b"image\n1.png\n", b"a;b|c,d\te\n1;2|3,4\t5\n"]
TABLES += [b'image,caption\n1.png,"open\n2.png,x\n', b'"image,caption\n1.png,x\n', b'image,caption\n"1.png"x,"y"z\n']
TABLES += [b"image,caption\n" + b"1.png," * 5000, b"," * 100_000, b'"' * 100_001, b"{", b"[", b"[{]", b"[}", b"[{},]"]
TABLES += [b"[1, 2, 3]", b"[[[]]]", b"[null]", b"[%b}]]" % GOOD_ROW, b"[%b}] [1]" % GOOD_ROW, b"[" + GOOD_ROW]
TABLES += [GOOD_ROW + b', "image": "2.png"}', b'{"images": []}', b'{"images": [{"sentences": 3}]}']
TABLES += [b'{"images": [{"sentences": [], "filename": {}}], "annotations": 3}']
TABLES += [b'{"images": [{"id": []}], "annotations": [{"image_id": {}}]}']
TABLES += [b'{"images": [{"id": 1}, 3], "annotations": [{"image_id": 1, "caption": "x"}, null, []]}']
TABLES += [b'{"a": [{}], "b": [{}]}', b'{"a": {"b": {"c": []}}}', b"3", b'"text"', b"null", b"NaN", b"1" * 10_000]
TABLES += [b"[" * DEEP, b'{"a":' * DEEP, b'[{"a": "' + b"x" * 300_000, b"PK\x03\x04 a zip file", b"\x1f\x8b compressed"]
TABLES += [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"]
TEXT_TABLES = [(name, table) for name in ("t.csv", "t.tsv", "t.json", "t.jsonl") for table in TABLES]

COLUMNS: list[dict[str, Any]] = [
    {setting: value}
    for setting in ("image_column", "caption_column", "id_column", "split_column", "short_column", "group_column")
    for value in ("", "nothing", "imagee", ",", "image,caption", "\ud800", "x" * 10_000)
]


def cases() -> Iterator[Case]:
    yield from ((name, content, {}) for name, content in TEXT_TABLES)
    yield from (("t.jsonl", lines(GOOD, {**GOOD, column: cell}), {}) for column in GOOD for cell in CELLS)
    for column in ("split", "id", "short_caption", "group"):
        yield from (("t.jsonl", lines({**GOOD, column: "a"}, {**GOOD, column: cell}), {}) for cell in CELLS[::3])
    yield from (("t.csv", b"image,caption,other\n1.png,x,y\n", settings) for settings in COLUMNS)
    places = ("nowhere", "t.csv", "\0", "x" * 5000)
    yield from (("t.csv", b"image,caption\n1.png,x\n", {"images": name}) for name in places)
    for names in ("image,Image,caption", "image,caption,CAPTION", "group,Group,image,text"):
        yield ("t.csv", names.encode() + b"\n" + b"1.png," * names.count(",") + b"x\n", {})
    with tempfile.TemporaryDirectory() as folder:
        content = write_tar(Path(folder, "s.tar"), {"1.png": png(1), "1.txt": b"x"}).read_bytes()
    yield from (("t.tar", bad, {}) for bad in damaged(content))
    yield ("t.tar", gzip.compress(content), {})
    yield ("t.tar", content[:1024] + content[:1024], {})
    table = parquet({"image": [png(1), png(2)], "caption": ["one", "two"]})
    yield from (("t.parquet", bad, {}) for bad in damaged(table))
    columns: list[dict[str, Any]] = [{"a": [1]}, {"image": [1], "caption": [2]}, {"image": [None], "caption": [None]}]
    columns += [{"image": [b""], "caption": ["x"]}, {"image": [b"x"], "mask": [b"y"], "caption": ["z"]}]
    columns += [{"x": [b"x"], "y": [b"y"], "caption": ["z"]}, {"image": [{"bytes": b"x"}], "caption": [{"a": 1}]}]
    columns += [{"image": pa.array([], pa.string()), "caption": pa.array([], pa.string())}]
    yield from (("t.parquet", parquet(table), {}) for table in columns)
    yield from ((name, b"PK", {}) for name in ("t.xlsx", "t.zip", "t.csv.gz", "captions", "t.txt", "t.jpg"))


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case[0])
def test_bad_files_end_in_a_clear_message(tmp_path: Path, case: Case) -> None:
    """Either a ValueError, or a data set with known kinds of problems whose images can be read or are invalid."""
    name, content, settings = case
    (tmp_path / name).write_bytes(content)
    try:
        data = read(tmp_path / name, **settings)
    except ValueError as error:
        assert not isinstance(error, UnicodeError)  # noqa: PT017
        assert len(str(error).encode()) < 10_000  # noqa: PT017
        return
    for problem in (*data.problems, *data.warnings):
        assert problem.kind in (ERRORS if problem in data.problems else WARNINGS)
        f"{problem.where} {problem.detail}".encode()
    for record in data.records:
        record.id.encode()
        assert all(caption.encode().strip() for caption in record.captions)
        for action in (record.image.stamp, record.image.load):
            try:
                action()
            except InvalidImage as error:
                assert error.kind in ERRORS  # noqa: PT017


SOURCES = ["[", "{", "{}", "*", "{a..b}", "{9..1}.tar", "[!]*.csv", "{0..9999999}.tar", "t.csv/", "a:b", "=", "-"]
SOURCES += ["://", "~no-such-user/data", "scenes/moon", "scenes/", "docci=", "docci=nowhere", "dci/official"]
SOURCES += ["/dev/null", "urban-1k=/dev/null", "/dev/zero", "folder", "empty.tar"]
SOURCES += ["", " ", "\0", "a\0b", "docci=\0", "\ud800", "x" * 5000, "a/" * 3000, "https://example.org/t.csv"]
SOURCES += ["{a,b}" * 30, "{0..9}" * 12, "{" * 1000, f"{{1..{'9' * 5000}}}"]


@pytest.mark.parametrize("source", SOURCES)
def test_bad_sources_end_in_a_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HNCLIP_DATA", raising=False)
    (tmp_path / "folder" / "t.csv").mkdir(parents=True)
    (tmp_path / "folder" / "1.png").write_bytes(png(1))
    (tmp_path / "empty.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"\w"):
        read(source)
