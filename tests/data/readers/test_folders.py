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
    members = {f"{name}.png": png(1) for name in ("good", "alone", "empty", "mixed", "twice", "caf\udce9")}
    members |= {f"{name}.txt": name.encode("utf-8", "replace") for name in ("good", "lonely", "twice", "caf\udce9")}
    members |= {"empty.txt": b" \n ", "mixed.txt": b"caf\xc3\xa9 caf\xe9", "latin.avif": png(2)}
    members |= {"latin.txt": b"caf\xe9", "a/deep/1.PNG": png(3), "README": b"x", "other.cls": b"7"}
    members |= {"a/deep/1.txt": "\ufeffFirst line,\r\n\r\n  second  \u2028line.\r\n".encode()}
    members |= {"twice.bmp": png(1), "._good.txt": b"\x00\x05\x16\x07 of macOS"}
    data = read(pack(tmp_path / "data", kind, members))
    assert set(found(data)) == {
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
        ("bad text", "caf\\udce9"),
        ("repeated id", "twice"),
    }
    assert [warning.kind for warning in data.warnings] == ["other encoding"]
    assert pickle.loads(pickle.dumps(data.records)) == data.records  # for the processes that decode


def test_folders_with_splits_and_captions_that_cannot_be_read(tmp_path: Path) -> None:
    """Dots in names, a caption that cannot be read, and directories at the top that are splits."""
    pack(tmp_path, "folder", {"dots.in.name.png": png(1), "dots.in.name.txt": b"A cat.", "linked.png": png(2)})
    (tmp_path / "linked.txt").symlink_to(tmp_path / "nowhere.txt")
    data = read(tmp_path)
    assert found(data) == [("dots.in.name", ("A cat.",), None, 1)]
    assert problems(data) == {("unreadable row", "linked.txt")}
    for folder in ("train/x", "val", "Test", "other/test"):
        pack(tmp_path / folder, "folder", {"1.png": png(0), "1.txt": b"x"})
    data = read(tmp_path)
    splits = {("train/x/1", "train"), ("val/1", "validation"), ("Test/1", "test")}
    assert {(record.id, record.split) for record in data.records} == splits
    outside = {"dots.in.name.png", "linked.png", "other/test/1.png"}
    assert problems(data) == {("unreadable row", name) for name in outside}


def test_a_table_wins_over_a_stray_text_file(tmp_path: Path) -> None:
    pack(tmp_path, "folder", {f"{number}.png": png(number) for number in range(6)} | {"3.txt": b"a note"})
    (tmp_path / "captions.csv").write_text("image,caption\n" + "".join(f"{n}.png,caption {n}\n" for n in range(6)))
    assert len(read(tmp_path).records) == 6
    pack(tmp_path, "folder", {f"{number}.txt": b"one of two captions" for number in range(6)})
    data = read(tmp_path)
    assert {record.captions for record in data.records} == {("one of two captions",)}
    assert [warning.kind for warning in data.warnings] == ["unread table"]


def test_samples_with_objects(tmp_path: Path) -> None:
    objects = [{"caption": ["a", "b"], "split": "val", "short_caption": "s", "name": "x"}]
    objects += [{"caption": "c", "split": "train", "name": "y"}, {"caption": "d", "split": "val", "name": "x"}]
    members = {f"{n}.json": json.dumps(value).encode() for n, value in enumerate(objects)}
    path = write_tar(tmp_path / "s.tar", members | {f"{n}.png": png(n) for n in range(3)})
    assert [(r.id, r.captions, r.split, r.short) for r in read(path).records] == [
        ("0", ("a", "b"), "validation", "s"),
        ("1", ("c",), "train", None),
        ("2", ("d",), "validation", None),
    ]
    assert [record.captions for record in read(path, caption_column="short_caption").records] == [("s",)]
    both = {"1.png": png(1), "1.txt": b"from text", "1.json": b'{"caption": "from object", "split": "test"}'}
    path_of_both = write_tar(tmp_path / "both.tar", both)  # the text file counts, unless a key is named
    assert [(r.captions, r.split) for r in read(path_of_both).records] == [(("from text",), "test")]
    assert [r.captions for r in read(path_of_both, caption_column="caption").records] == [("from object",)]
    named = read(path, id_column="name")  # samples with one id are one image, packed once for each caption
    assert [(record.id, record.captions) for record in named.records] == [("x", ("a", "b", "d")), ("y", ("c",))]


def test_samples_of_several_files(tmp_path: Path) -> None:
    members = {"2.caption": b"A cat.", "2.cls": b"7", "2.PNG": png(2), "2.seg.png": png(9)}  # in any order
    members |= {"broken.json": b"{", "list.json": b"[]", "deep.json": b"[" * 100_000, "broken.png": png(1)}
    data = read(write_tar(tmp_path / "s.tar", members))
    assert found(data) == [("2", ("A cat.",), None, 2)]
    assert problems(data) == {("unreadable row", name) for name in ("broken", "list", "deep")}


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

    def numbers(pattern: str) -> list[int]:
        data = read(f"{tmp_path}/{pattern}")
        return sorted({int(record.id.partition("-")[0]) for record in data.records})

    assert numbers("s-{008..011}.tar") == [8, 9, 10, 11]
    assert numbers("s-00{1,3}.tar") == [1, 3]
    assert numbers("s-0{0,1}{0..1}.tar") == [0, 1, 10, 11]
    assert numbers("*-01?.tar") == [10, 11]
    assert numbers("**/s-00[45].tar") == [4, 5]
    monkeypatch.chdir(tmp_path)
    assert len(read("s-00?.tar").records) == 20
    for pattern in ("s-{010..012}.tar", "x-*.tar", "s-{5..1}.tar"):
        with pytest.raises(ValueError, match="there is no file"):
            numbers(pattern)
    for pattern in ("s-{000..999999999}.tar", "s-{0..999}{0..999}.tar"):
        with pytest.raises(ValueError, match="more than 200,000"):
            numbers(pattern)
