from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tiny_pictures import png, shade, write_tar

from hnclip.config import ReadConfig
from hnclip.data.readers.gather import Found
from hnclip.data.readers.paths import read_path, read_pattern


def read(path: Path, **settings: Any) -> Found:
    return read_path(path, ReadConfig(**settings))


def told(found: Found) -> list[tuple[str, str]]:
    return [(problem.kind, problem.where.rpartition(":")[2]) for problem in found.problems]


def test_samples_with_text_files(tmp_path: Path) -> None:
    members = {
        "a/1.png": png(1),
        "a/1.txt": b" A dog,\nrunning. ",
        "2.caption": b"A cat.",  # the order of members does not matter
        "2.cls": b"7",
        "2.PNG": png(2),
        "2.seg.png": png(9),
    }
    found = read(write_tar(tmp_path / "s.tar", members))
    assert [(record.id, record.captions, shade(record.image)) for record in found.records] == [
        ("a/1", ("A dog, running.",), 1),
        ("2", ("A cat.",), 2),
    ]
    assert found.problems == ()
    assert pickle.loads(pickle.dumps(found.records)) == found.records  # for the processes that decode


def test_samples_with_objects(tmp_path: Path) -> None:
    members = {
        "1.png": png(1),
        "1.json": json.dumps({"caption": ["a", "b"], "split": "val", "short_caption": "s", "key": "7"}).encode(),
        "2.png": png(2),
        "2.json": json.dumps({"caption": "c", "split": "train", "key": "7"}).encode(),
    }
    path = write_tar(tmp_path / "s.tar", members)
    assert [(r.id, r.captions, r.split, r.short) for r in read(path).records] == [
        ("1", ("a", "b"), "validation", "s"),
        ("2", ("c",), "train", None),
    ]
    assert [record.captions for record in read(path, caption_column="short_caption").records] == [("s",)]


def test_the_text_file_is_the_caption_unless_a_key_is_named(tmp_path: Path) -> None:
    members = {"1.png": png(1), "1.txt": b"from text", "1.json": b'{"caption": "from object", "split": "test"}'}
    path = write_tar(tmp_path / "s.tar", members)
    assert [(r.captions, r.split) for r in read(path).records] == [(("from text",), "test")]
    assert [r.captions for r in read(path, caption_column="caption").records] == [("from object",)]
    with pytest.raises(ValueError, match=r"no column 'wrong'.*it has 'caption', 'split'"):
        read(path, caption_column="wrong")


def test_ids_that_the_user_named(tmp_path: Path) -> None:
    """Samples of one id are one picture, packed once for each caption."""
    members = {}
    for number, name in enumerate(["x", "y", "x"]):
        members[f"{number}.png"] = png(number)
        members[f"{number}.json"] = json.dumps({"name": name, "text": f"caption {number}"}).encode()
    found = read(write_tar(tmp_path / "s.tar", members), id_column="name")
    assert [(record.id, record.captions) for record in found.records] == [
        ("x", ("caption 0", "caption 2")),
        ("y", ("caption 1",)),
    ]


def test_bad_samples_are_told(tmp_path: Path) -> None:
    members = {
        "good.png": png(1),
        "good.txt": b"good",
        "alone.png": png(2),
        "lonely.txt": b"lonely",
        "broken.png": png(3),
        "broken.json": b"{",
        "list.json": b"[]",
        "latin.png": png(4),
        "latin.txt": b"caf\xe9",
        "twice.png": png(5),
        "twice.jpg": png(6),
        "twice.txt": b"twice",
        "._good.txt": b"what macOS adds",
        "README": b"nothing",
        "other.cls": b"7",
    }
    found = read(write_tar(tmp_path / "s.tar", members))
    assert [(record.id, shade(record.image)) for record in found.records] == [("good", 1), ("twice", 5)]
    assert set(told(found)) == {
        ("no caption", "alone"),
        ("no image", "lonely"),
        ("unreadable row", "broken"),
        ("unreadable row", "list"),
        ("bad text", "latin"),
        ("repeated id", "twice"),
    }
    assert len(found.problems) == 6


def shards(folder: Path, names: list[str], keys: str = "{shard}-{number}") -> None:
    for shard, name in enumerate(names):
        members = {}
        for number in range(2):
            key = keys.format(shard=shard, number=number)
            members |= {f"{key}.png": png(10 * shard + number), f"{key}.txt": f"caption {shard} {number}".encode()}
        write_tar(folder / name, members)


def test_a_directory_of_shards(tmp_path: Path) -> None:
    shards(tmp_path, ["s-000.tar", "s-001.tar"])
    (tmp_path / "s-000_stats.json").write_text("{}")  # as img2dataset writes it
    found = read(tmp_path)
    assert [record.id for record in found.records] == ["0-0", "0-1", "1-0", "1-1"]
    assert {record.split for record in found.records} == {None}


def test_keys_that_are_not_unique_are_called_by_their_shard(tmp_path: Path) -> None:
    shards(tmp_path, ["s-000.tar", "s-001.tar"], keys="{number}")
    found = read(tmp_path)
    assert [record.id for record in found.records] == ["s-000.tar:0", "s-000.tar:1", "s-001.tar:0", "s-001.tar:1"]
    assert [shade(record.image) for record in found.records] == [0, 1, 10, 11]


@pytest.mark.parametrize("names", [["train/0.tar", "val/0.tar"], ["cc-train-0.tar", "cc-validation-0.tar"]])
def test_shards_may_be_splits(tmp_path: Path, names: list[str]) -> None:
    shards(tmp_path, names)
    assert [record.split for record in read(tmp_path).records] == ["train", "train", "validation", "validation"]


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(tmp_path, [f"s-{number:03}.tar" for number in range(12)])

    def numbers(pattern: str) -> list[int]:
        found = read_pattern(f"{tmp_path}/{pattern}", ReadConfig())
        return sorted({int(record.id.partition("-")[0]) for record in found.records})

    assert numbers("s-{008..011}.tar") == [8, 9, 10, 11]
    assert numbers("s-00{1,3}.tar") == [1, 3]
    assert numbers("s-0{0,1}{0..1}.tar") == [0, 1, 10, 11]
    assert numbers("*-01?.tar") == [10, 11]
    assert numbers("**/s-00[45].tar") == [4, 5]
    monkeypatch.chdir(tmp_path)
    assert len(read_pattern("s-00?.tar", ReadConfig()).records) == 20
    with pytest.raises(ValueError, match=r"s-012.tar does not exist"):
        numbers("s-{010..012}.tar")
    with pytest.raises(ValueError, match="there is no file of the pattern"):
        numbers("x-*.tar")


def test_of_a_cut_shard_the_first_samples_are_used(tmp_path: Path) -> None:
    members = {}
    for number in range(3):
        members |= {f"{number}.png": png(number), f"{number}.txt": f"caption {number}".encode()}
    path = write_tar(tmp_path / "s.tar", members)
    path.write_bytes(path.read_bytes()[: 4 * 1024 + 550])
    found = read(path)
    assert [record.id for record in found.records] == ["0", "1"]
    assert [problem.kind for problem in found.problems] == ["unreadable row"]


@pytest.mark.parametrize("name", ["s.tar.gz", "s.tgz"])
def test_compressed_shards_say_how_to_decompress_them(tmp_path: Path, name: str) -> None:
    tar = write_tar(tmp_path / "s.tar", {"1.png": png(1), "1.txt": b"x"})
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / name).write_bytes(gzip.compress(tar.read_bytes()))
    for path in (tmp_path / "z" / name, tmp_path / "z"):
        with pytest.raises(ValueError, match="gunzip -k"):
            read(path)


def test_pictures_without_captions_are_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", {"1.png": png(1)})
    with pytest.raises(ValueError, match=r"holds pictures but no captions.*--read.images"):
        read(path)
    damaged = write_tar(tmp_path / "d.tar", {"1.png": png(1), "1.txt": b"x"})
    damaged.write_bytes(damaged.read_bytes()[:1100])
    with pytest.raises(ValueError, match=r"no captions; the tar file is damaged or incomplete"):
        read(damaged)
    with pytest.raises(ValueError, match=r"no record found; looked for pictures with a .txt"):
        read(write_tar(tmp_path / "e.tar", {"README": b"nothing"}))
    with pytest.raises(ValueError, match=r"no record found; .*\n  no image: .*t.tar:1"):
        read(write_tar(tmp_path / "t.tar", {"1.txt": b"x"}), image_column="jpg")


def test_keys_that_are_no_text_are_told(tmp_path: Path) -> None:
    members = {"1.png": png(1), "1.txt": b"x", "caf\udce9.png": png(2), "caf\udce9.txt": b"y"}
    found = read(write_tar(tmp_path / "s.tar", members))
    assert [record.id for record in found.records] == ["1"]
    assert told(found) == [("bad text", "caf\\udce9")]
