"""Image folders with .txt captions, and WebDataset shards."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
from small_images import found, png, problems, read, shade, write_tar


def pack(path: Path, kind: str, members: Mapping[str, bytes]) -> Path:
    if kind == "tar":
        return write_tar(path.with_suffix(".tar"), members)
    for name, content in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_images_with_text_files(tmp_path: Path, kind: str) -> None:
    members = {f"{name}.png": png(1) for name in ("good", "alone", "empty", "mixed", "twice", "dots.in.name")}
    members |= {f"{name}.txt": name.encode() for name in ("good", "lonely", "twice", "dots.in.name")}
    members |= {"empty.txt": b" \n ", "mixed.txt": b"caf\xc3\xa9 caf\xe9", "latin.avif": png(2)}
    members |= {"latin.txt": b"caf\xe9", "a/deep/1.PNG": png(3), "README": b"x", "other.cls": b"7"}
    members |= {"a/deep/1.txt": "\ufeffFirst line,\r\n\r\n  second  \u2028line.\r\n".encode()}
    members |= {"twice.bmp": png(1), "._good.txt": b"\x00\x05\x16\x07 of macOS"}
    if kind == "tar":
        del members["dots.in.name.png"], members["dots.in.name.txt"]  # WebDataset ends a key at the first dot
    data = read(pack(tmp_path / "data", kind, members))
    assert {record for record in found(data) if record[0] != "dots.in.name"} == {
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
    assert pickle.loads(pickle.dumps(data.records)) == data.records  # for the processes that decode


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
    assert problems(data) == {("unreadable row", "bad")}
    named = read(path, id_column="name", caption_column="caption")  # samples with one id are one image
    assert [(record.id, record.captions) for record in named.records] == [("x", ("a", "b", "d")), ("y", ("c",))]


def shards(folder: Path, names: list[str], keys: str = "{shard}-{number}") -> None:
    for shard, name in enumerate(names):
        members = {}
        for number in range(2):
            key = keys.format(shard=shard, number=number)
            members |= {f"{key}.png": png(10 * shard + number), f"{key}.txt": f"caption {shard} {number}".encode()}
        write_tar(folder / name, members)


def test_directories_of_shards(tmp_path: Path) -> None:
    shards(tmp_path / "a", ["s-000.tar", "s-001.tar"], keys="{number}")
    (tmp_path / "a" / "s-000_stats.json").write_text("{}")  # as img2dataset writes it
    data = read(tmp_path / "a")  # keys that are not unique have their shard's name
    assert [record.id for record in data.records] == ["s-000.tar:0", "s-000.tar:1", "s-001.tar:0", "s-001.tar:1"]
    assert [(record.split, shade(record.image)) for record in data.records] == [(None, n) for n in (0, 1, 10, 11)]
    for folder, names in (("b", ["train/0.tar", "val/0.tar"]), ("c", ["cc-train-0.tar", "cc-validation-0.tar"])):
        shards(tmp_path / folder, names)
        splits = [record.split for record in read(tmp_path / folder).records]
        assert splits == ["train", "train", "validation", "validation"]


def test_patterns_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(tmp_path, [f"s-{number:03}.tar" for number in range(12)])
    patterns = {"s-{008..011}.tar": [8, 9, 10, 11], "s-0{0,1}{0..1}.tar": [0, 1, 10, 11], "**/s-00[45].tar": [4, 5]}
    for pattern, numbers in patterns.items():
        data = read(f"{tmp_path}/{pattern}")
        assert sorted({int(record.id.partition("-")[0]) for record in data.records}) == numbers
    monkeypatch.chdir(tmp_path)
    assert len(read("s-00?.tar").records) == 20
    bad = {"s-{010..012}.tar": "there is no file", "x-*.tar": "there is no file", "{0..999999999}": "more than 200,000"}
    for pattern, keyword in bad.items():
        with pytest.raises(ValueError, match=keyword):
            read(f"{tmp_path}/{pattern}")
