"""What `--data` means: images by path or by name, tar files, folders with text files, shards, tables, splits; bad files
and sources end in a clear ValueError, or in problems of their rows and invalid images, never in another exception."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from small_images import found, png, problems, read, shade, write_png, write_tar

from hnclip.core import InvalidImage
from hnclip.data import sources
from hnclip.data.readers.locate import ImageFinder, index_tar
from hnclip.data.records import DataSet, ReadLog, RowError
from hnclip.data.sources import open_data
from hnclip.data.validate import ERRORS, WARNINGS


def table(*names: str) -> str:
    return "file_name,text\n" + "".join(f"{name},caption of {name}\n" for name in names)


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


FILES = {"top.png": 1, "a/one.png": 2, "a/two.png": 3, "b/two.png": 4, "b/c/deep.png": 5, "cafe\u0301.png": 8}


@pytest.mark.parametrize("kind", ["directory", "tar"])
def test_images_by_path_and_by_name(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "all"
    if kind == "tar":
        root = write_tar(tmp_path / "all.tar", {name: png(value) for name, value in FILES.items()})
    else:
        for name, value in FILES.items():
            write_png(root / name, value)
    finder = ImageFinder(root, ReadLog())
    others = {"./a/one.png": 2, "a/../a//one.png": 2, "a\\one.png": 2, "caf\u00e9.png": 8}  # accents in one character
    for name, expected in {**FILES, **others}.items():
        image = finder.find(name)
        assert image is not None
        assert shade(image) == expected
        assert finder.find(f"{finder.root}/{name}") == image
    for name in ("one.png", "b/one.png", "/elsewhere/a/one.png", "a", ".."):
        assert finder.find(name) is None
        with pytest.raises(InvalidImage) as caught:
            finder.at(name).read()
        assert caught.value.kind == "missing image"
    for name, expected in {"one.png": 2, "/home/me/b/two.png": 4, "x/café.png": 8}.items():
        image = finder.find_by_name(name)  # the path that ends most like it
        assert image is not None
        assert shade(image) == expected
    assert finder.find_by_name("nowhere.png") is None
    with pytest.raises(RowError, match="several images"):
        finder.find_by_name("/elsewhere/z/two.png")


def test_members_of_a_tar(tmp_path: Path) -> None:
    """Links are left out, and of two files with one name the later counts."""
    long_name = "d" * 150 + "/" + "n" * 120 + ".png"  # longer than a header has room for
    path = write_tar(tmp_path / "a.tar", {"./1.png": png(1), long_name: png(2)})
    with tarfile.open(path, "a") as tar:
        link, later = tarfile.TarInfo("link.png"), tarfile.TarInfo("1.png")
        link.type, later.size = tarfile.SYMTYPE, len(png(4))
        tar.addfile(link)
        tar.addfile(later, io.BytesIO(png(4)))
    index = index_tar(path, log := ReadLog())
    assert [(name, shade(image)) for name, image in index.items()] == [("1.png", 4), (long_name, 2)]
    assert log == ReadLog()


# Each file takes a header and one block of 512 bytes.
@pytest.mark.parametrize(("keep", "then"), [(2 * 1024 + 522, b""), (2 * 1024 + 100, b""), (2 * 1024, b"x" * 512)])
def test_of_a_damaged_tar_the_first_files_are_used(tmp_path: Path, keep: int, then: bytes) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.png": png(1), "2.png": png(2), "3.png": png(3)})
    path.write_bytes(path.read_bytes()[:keep] + then)
    index = index_tar(path, log := ReadLog())
    assert list(index) == ["1.png", "2.png"]
    assert [(problem.kind, problem.where) for problem in log.problems] == [("unreadable row", str(path))]


def pack(path: Path, kind: str, members: Mapping[str, bytes]) -> Path:
    if kind == "tar":
        return write_tar(path.with_suffix(".tar"), members)
    for name, content in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_images_with_text_files(tmp_path: Path, kind: str) -> None:
    members = {f"{name}.png": png(1) for name in ("good", "alone", "empty", "mixed", "twice")}
    members |= {f"{name}.txt": name.encode() for name in ("good", "lonely", "twice")}
    members |= {"empty.txt": b" \n ", "mixed.txt": b"caf\xc3\xa9 caf\xe9", "latin.avif": png(2)}
    members |= {"latin.txt": b"caf\xe9", "a/deep/1.PNG": png(3), "README": b"x", "other.cls": b"7"}
    members |= {"a/deep/1.txt": "\ufeffFirst line,\r\n\r\n  second  \u2028line.\r\n".encode()}
    members |= {"twice.bmp": png(1), "._good.txt": b"\x00\x05\x16\x07 of macOS"}
    data = read(pack(tmp_path / "data", kind, members))
    assert {*found(data)} == {
        ("good", ("good",), None, 1),
        ("twice", ("twice",), None, 1),
        ("latin", ("café",), None, 2),
        ("a/deep/1", ("First line, second  \u2028line.",), None, 3),
    }
    assert {(problem, where.rpartition("/")[2].partition(".")[0]) for problem, where in problems(data)} == {
        ("no caption", "alone"),
        ("no image", "lonely"),
        ("empty caption", "empty"),
        ("bad text", "mixed"),
        ("repeated id", "twice"),
    }
    assert [warning.kind for warning in data.warnings] == ["other encoding"]


def test_a_folder_that_cannot_be_listed_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in "ab":
        pack(tmp_path / folder, "folder", {"1.png": png(0), "1.txt": b"x"})
    scandir = os.scandir

    def listed(path: str) -> Any:  # root could list it
        if os.path.basename(path) == "b":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listed)
    data = read(tmp_path)
    assert ([record.id for record in data.records], problems(data)) == (["a/1"], {("missing image", "b")})


def test_folders_at_the_top_are_splits_and_a_table_wins_over_a_stray_text_file(tmp_path: Path) -> None:
    for folder in ("data/train/x", "data/val", "data/Test", "data/other"):
        pack(tmp_path / folder, "folder", {"1.png": png(0), "1.txt": b"x"})
    data = read(tmp_path / "data")
    splits = {("train/x/1", "train"), ("val/1", "validation"), ("Test/1", "test")}
    assert {(record.id, record.split) for record in data.records} == splits
    assert {problem for problem, _ in problems(data)} == {"unreadable row"}  # outside of them
    table = "image,caption\n" + "".join(f"{n}.png,caption {n}\n" for n in range(6))
    pack(tmp_path / "t", "folder", {"captions.csv": table.encode(), "0.png": png(0), "1.png": png(1), "1.txt": b"note"})
    assert len(read(tmp_path / "t").records) == 6


def test_samples_with_objects(tmp_path: Path) -> None:
    objects = [{"caption": ["a", "b"], "split": "val", "short_caption": "s", "name": "x"}]
    objects += [{"caption": "c", "split": "train", "name": "y"}, {"caption": "d", "split": "val", "name": "x"}]
    members = {f"{n}.json": json.dumps(value).encode() for n, value in enumerate(objects)}
    members |= {f"{n}.png": png(n) for n in range(3)}
    members |= {"bad.json": b"{", "bad.png": png(1), "0.seg.png": png(9), "2.cls": b"7"}
    data = read(path := write_tar(tmp_path / "s.tar", members))
    assert [(r.id, r.captions, r.split, r.short) for r in data.records] == [
        ("0", ("a", "b"), "validation", "s"),
        ("1", ("c",), "train", None),
        ("2", ("d",), "validation", None),
    ]
    assert problems(data) == {("unreadable row", "bad.json")}
    named = read(path, id_column="name", caption_column="caption")  # samples with one id are one image
    assert [(record.id, record.captions) for record in named.records] == [("x", ("a", "b", "d")), ("y", ("c",))]


def shards(folder: Path, names: list[str], keys: str = "{shard}-{number}") -> None:
    for shard, name in enumerate(names):
        members = {}
        for number in range(2):
            key = keys.format(shard=shard, number=number)
            members |= {f"{key}.png": png(10 * shard + number), f"{key}.txt": f"caption {shard} {number}".encode()}
        write_tar(folder / name, members)


def test_directories_and_patterns_of_shards(tmp_path: Path) -> None:
    shards(tmp_path / "a", ["s-000.tar", "s-001.tar"], keys="{number}")
    assert len(read(f"{tmp_path}/a/s-{{001..001}}.tar").records) == len(read(f"{tmp_path}/*/s-00[0].tar").records) == 2
    data = read(tmp_path / "a")  # keys that are not unique have their shard's name
    assert [record.id for record in data.records] == ["s-000.tar:0", "s-000.tar:1", "s-001.tar:0", "s-001.tar:1"]
    assert [shade(record.image) for record in data.records] == [0, 1, 10, 11]
    (tmp_path / "t.csv").write_text("image,caption\n1.png,a dog\n")
    assert len(read(f"{tmp_path}/{{a/s-000.tar,t.csv}}").records) == 3  # of both kinds at once
    shards(tmp_path / "b", ["train/0.tar", "val/0.tar"])
    assert [record.split for record in read(tmp_path / "b").records] == ["train"] * 2 + ["validation"] * 2


GOOD = {"image": "1.png", "caption": "one"}
Case = tuple[str, bytes, dict[str, Any]]


def lines(*rows: Any) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


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
