"""`hnclip index`: what it takes in, what it does not even read, what it leaves out, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from build_helpers import (
    about_of,
    check_built,
    contents_of,
    counts,
    later,
    make_folder,
    names_of,
    opened,
    options,
    stop_after,
)

from encode_helpers import PROCESSES, save_picture
from hnclip.config import Opening, ReadConfig
from hnclip.core import InvalidImage
from hnclip.data.image_sources import FileImage
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.models.dual_encoder import DualEncoder
from hnclip.search import build
from hnclip.search.build import build_index
from hnclip.search.index.catalogue import content_hash
from hnclip.search.index.layout import KINDS
from hnclip.search.index.reader import Index
from hnclip.search.index.writer import IndexWriter
from hnclip.search.indexing import pictures as pictures_code
from hnclip.search.indexing.built import Built

Make = Callable[..., Built]


@pytest.fixture(scope="module")
def model(model_directory: Path) -> DualEncoder:
    return opened(model_directory)


@pytest.fixture
def make(model: DualEncoder, model_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Index into x.hnc with a model that is opened once."""
    monkeypatch.setattr(build, "load", lambda name, **_: model)

    def call(data: Path | str, **changed: object) -> Built:
        return build_index(options(data, model_directory, changed.pop("out", tmp_path / "x.hnc"), **changed))  # type: ignore[arg-type]

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "pictures")


def said(*numbers: int) -> dict[str, tuple[str, ...]]:
    return {
        f"{'ab'[number % 2]}/{number:02}.png": (f"a red house, number {number}, under the cloudy sky",)
        for number in numbers
    }


class Read(list[str]):
    """Names of the files that were read, and of those that were decoded."""

    decoded: list[str]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    found = Read()
    found.decoded = []
    reading, decoding = FileImage.read, FileImage.decode

    def note(image: FileImage) -> bytes:
        found.append(image.path.name)
        return reading(image)

    def note_decoded(image: FileImage, content: bytes) -> object:
        found.decoded.append(image.path.name)
        return decoding(image, content)

    monkeypatch.setattr(FileImage, "read", note)
    monkeypatch.setattr(FileImage, "decode", note_decoded)
    return found


def test_a_folder_with_some_captions(make: Make, model: DualEncoder, folder: Path, tmp_path: Path) -> None:
    built = make(folder)
    check_built(tmp_path / "x.hnc", folder, model, said(0, 3, 6, 9))
    assert counts(built) == {"new": 11}
    assert (built.pictures, built.captions, built.counts.encoded, built.counts.encoded_captions) == (11, 4, 11, 4)
    assert built.problems == ()
    text = built.to_text()
    assert f"{tmp_path / 'x.hnc'}: 11 pictures, 4 captions\n11 new\nencoded 11 pictures and 4 captions in" in text
    assert f'  hnclip search {tmp_path / "x.hnc"} "' in text
    assert text.endswith(f"  hnclip serve {tmp_path / 'x.hnc'}")
    found = json.loads(json.dumps(built.to_dict()))
    assert (found["new"], found["pictures"], found["out"]) == (11, 11, str(tmp_path / "x.hnc"))


def test_what_has_not_changed_is_not_even_read(make: Make, folder: Path, read: Read) -> None:
    make(folder)
    assert len(read) == 11
    read.clear()
    before = about_of(folder.parent / "x.hnc")
    assert counts(make(folder)) == {"unchanged": 11}
    assert read == []
    assert about_of(folder.parent / "x.hnc") == before


def test_new_changed_moved_copied_touched_and_gone(
    make: Make, model: DualEncoder, folder: Path, read: Read, tmp_path: Path
) -> None:
    make(folder)
    read.clear()
    read.decoded.clear()
    later(folder / "a/00.png")  # touched
    save_picture(folder / "b/01.png", 101)  # changed
    (folder / "a/02.png").rename(folder / "b/moved.png")
    shutil.copy(folder / "b/05.png", folder / "copy.png")
    (folder / "a/04.png").unlink()
    save_picture(folder / "c/new.png", 102)
    (folder / "b/07.png").rename(folder / "a/08.png")  # one gone, another changed
    built = make(folder)
    assert counts(built) == {"new": 2, "changed": 2, "moved": 1, "gone": 2, "unchanged": 6}
    assert sorted(read) == ["00.png", "01.png", "08.png", "copy.png", "moved.png", "new.png"]
    assert sorted(read.decoded) == ["01.png", "new.png"]
    assert built.counts.encoded == 2
    check_built(tmp_path / "x.hnc", folder, model, said(0, 3, 6, 9))
    read.clear()
    assert counts(make(folder)) == {"unchanged": 11}
    assert read == []


def test_other_captions_leave_the_picture_alone(
    make: Make, model: DualEncoder, folder: Path, read: Read, tmp_path: Path
) -> None:
    make(folder)
    read.clear()
    (folder / "b/01.txt").write_text("two small trees")
    (folder / "a/00.txt").write_text("a red house, number 3, under the cloudy sky")  # there already
    (folder / "a/06.txt").unlink()
    built = make(folder)
    assert counts(built) == {"changed": 3, "unchanged": 8}
    assert (built.counts.encoded, built.counts.encoded_captions, read) == (0, 1, [])
    expected = {**said(3, 9), "b/01.png": ("two small trees",), "a/00.png": said(3)["b/03.png"]}
    check_built(tmp_path / "x.hnc", folder, model, expected)


def test_bad_pictures_are_listed_and_read_again_only_when_they_change(
    make: Make, model: DualEncoder, folder: Path, read: Read, tmp_path: Path
) -> None:
    make(folder)
    (folder / "a/00.png").write_bytes((folder / "a/00.png").read_bytes()[:700])
    (folder / "b/01.png").write_bytes(b"")
    (folder / "c").mkdir()
    (folder / "c/note.png").write_text("no picture")
    (folder / "c/again.png").write_text("no picture")
    (folder / "c/link.png").symlink_to("nowhere.png")
    built = make(folder)
    assert counts(built) == {"unchanged": 9, "bad": 5}
    assert {problem.where: problem.kind for problem in built.problems} == {
        "a/00.png": "truncated image",
        "b/01.png": "corrupt image",
        "c/note.png": "corrupt image",
        "c/again.png": "corrupt image",
        "c/link.png": "missing image",
    }
    for problem in built.problems:  # each is told of by its own name, though two are the same bytes
        assert problem.where in problem.detail
    assert "left out 5 pictures:\n" in built.to_text()
    check_built(tmp_path / "x.hnc", folder, model, said(3, 6, 9))
    with Index(tmp_path / "x.hnc") as index:
        assert sorted(index.problems(), key=str) == sorted(built.problems, key=str)
    read.clear()
    again = make(folder)
    assert counts(again) == {"unchanged": 9, "bad": 5}
    assert sorted(again.problems, key=str) == sorted(built.problems, key=str)
    assert read == []
    save_picture(folder / "c/note.png", 77)
    (folder / "c/again.png").unlink()
    assert counts(make(folder)) == {"new": 1, "unchanged": 9, "bad": 3}
    with Index(tmp_path / "x.hnc") as index:
        assert {problem.where for problem in index.problems()} == {"a/00.png", "b/01.png", "c/link.png"}


def test_only_some_problems_are_shown_and_all_are_listed(make: Make, folder: Path) -> None:
    for number in range(9):
        (folder / f"{number}.png").write_text(f"bad {number}")
    built = make(folder)
    assert "left out 9 pictures:" in built.to_text()
    assert built.to_text().count("is not in an image format that Pillow reads") == 5
    assert "  and 4 more, --json lists all" in built.to_text()
    assert len(built.to_dict()["problems"]) == 9


@pytest.mark.parametrize("workers", [1, 4])
def test_copies_are_decoded_once_and_bad_copies_all_told(
    workers: int, make: Make, tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pictures"
    save_picture(folder / "00.png", 1)
    for number in range(1, 30):
        shutil.copy(folder / "00.png", folder / f"{number:02}.png")
    for number in range(30, 45):
        (folder / f"{number}.png").write_text("the same bad bytes")
    thumbnail = pictures_code.thumbnail

    def slow(image: object) -> bytes:
        time.sleep(0.05)  # the others come meanwhile
        return thumbnail(image)  # type: ignore[arg-type]

    monkeypatch.setattr(pictures_code, "thumbnail", slow)
    decode = FileImage.decode

    def slow_to_fail(image: FileImage, content: bytes) -> object:
        time.sleep(0.005)
        return decode(image, content)

    monkeypatch.setattr(FileImage, "decode", slow_to_fail)
    built = make(folder, workers=workers)
    assert counts(built) == {"new": 30, "bad": 15}
    assert sum(name >= "30" for name in read.decoded) == 1
    assert sum(name >= "30" for name in read) <= 30
    for problem in built.problems:
        assert problem.detail == f"{folder / problem.where} is not in an image format that Pillow reads"
    assert built.counts.encoded == 1
    assert sum(name < "30" for name in read.decoded) == 1
    assert {problem.where for problem in built.problems} == {f"{number}.png" for number in range(30, 45)}
    assert names_of(tmp_path / "x.hnc") == {
        name: content for name, content in contents_of(folder).items() if name < "30"
    }


def test_memory_that_was_missing_for_one_may_be_there_for_its_copy(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pictures"
    save_picture(folder / "0.png", 1)
    shutil.copy(folder / "0.png", folder / "1.png")
    decode, tries = FileImage.decode, []

    def fail_once(image: FileImage, content: bytes) -> object:
        tries.append(image)
        if len(tries) == 1:
            raise MemoryError
        return decode(image, content)

    monkeypatch.setattr(FileImage, "decode", fail_once)
    assert counts(make(folder)) == {"new": 1, "bad": 1}


def test_captions_that_cannot_be_read_now_stay(
    make: Make, folder: Path, tmp_path: Path, model: DualEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder)
    save_picture(folder / "a/00.png", 50)  # its picture is another one, too
    read_bytes, opening = Path.read_bytes, Path.open

    def blocked(path: Path) -> None:
        if path.name in ("00.txt", "03.txt"):
            raise PermissionError(13, "Permission denied")

    def read_or_not(path: Path) -> bytes:
        blocked(path)
        return read_bytes(path)

    def open_or_not(path: Path, *given: object, **named: object) -> object:
        blocked(path)
        return opening(path, *given, **named)  # type: ignore[call-overload]

    (folder / "a/06.txt").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_or_not)
        patch.setattr(Path, "open", open_or_not)
        built = make(folder)
    assert {problem.where for problem in built.problems} == {"a/00.txt", "b/03.txt"}
    assert counts(built) == {"changed": 2, "unchanged": 9}
    check_built(tmp_path / "x.hnc", folder, model, said(0, 3, 9))


def test_what_lies_in_a_folder_that_cannot_be_listed_stays(
    make: Make, folder: Path, tmp_path: Path, model: DualEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder)
    scandir = os.scandir

    def scan(path: str) -> object:
        if os.fspath(path) == str(folder / "b"):
            raise PermissionError(13, "Permission denied", str(folder / "b"))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scan)
        built = make(folder)
    assert counts(built) == {"unchanged": 11}
    assert [problem.where for problem in built.problems] == ["b"]
    assert "b cannot be listed: Permission denied" in built.to_text()
    check_built(tmp_path / "x.hnc", folder, model, said(0, 3, 6, 9))
    assert make(folder).problems == ()


def test_names_cannot_speak_to_the_terminal(make: Make, folder: Path) -> None:
    (folder / "bad\x1b[2J\nnew line.png").write_bytes(b"no picture")
    built = make(folder)
    assert "bad [2J new line.png is not in an image format that Pillow reads" in built.to_text()
    assert "\x1b" not in built.to_text()
    assert built.to_dict()["problems"][0]["where"] == "bad\x1b[2J\nnew line.png"


@pytest.mark.parametrize("place", ["202301/..", ".", "202301"])
@pytest.mark.parametrize("anew", [False, True])
def test_an_index_is_not_made_where_the_pictures_are(place: str, anew: bool, make: Make, tmp_path: Path) -> None:
    data = tmp_path / "months" / "202301"
    save_picture(data / "a.png", 1)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"would mix the index with .*202301, which is indexed: choose another --out"):
        make(data, out=tmp_path / "months" / place, replace=anew)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_index_may_lie_in_its_folder(make: Make, folder: Path) -> None:
    for expected in ({"new": 11}, {"unchanged": 11}):
        assert counts(make(folder, out=folder / "photos.hnc")) == expected


def test_models_are_remembered_by_their_absolute_paths(
    model: DualEncoder, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(build, "load", lambda name, **opening: asked.append((name, opening["tokenizer"])) or model)
    for name in ("image", "home/text", "words", "bundled"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    lasting = {
        "image": f"{tmp_path}/image",
        "image+~/text": f"{tmp_path}/image+{tmp_path}/home/text",
        "image+owner/text": f"{tmp_path}/image+owner/text",
        "owner/both": "owner/both",
        "bundled": "bundled",
    }
    for given, kept in lasting.items():
        wanted = replace(
            options(folder, Path(), tmp_path / "x.hnc"), model=given, opening=Opening(tokenizer=Path("words"))
        )
        build_index(wanted)
        own = about_of(tmp_path / "x.hnc")[0]
        assert (own.model, own.opening["tokenizer"]) == (kept, str(tmp_path / "words"))
        assert asked[-1] == (kept, tmp_path / "words")


def test_where_milvus_is_is_checked_first_and_remembered(
    make: Make, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr("hnclip.search.engines.milvus_server.import_milvus", lambda: None)
    monkeypatch.setattr("hnclip.search.engines.open.make_engine", lambda writer, *given: made.append(given[:2]))
    monkeypatch.chdir(tmp_path)

    def kept() -> tuple[str, str | None]:
        own = about_of(tmp_path / "x.hnc")[0]
        return own.engine, own.uri

    with monkeypatch.context() as patch:
        patch.setattr(build, "load", None)  # it is not even opened
        with pytest.raises(ValueError, match="the URI of Milvus must be"):
            make(folder, engine="milvus", uri="nonsense")
    assert not (tmp_path / "x.hnc").exists()
    make(folder, engine="milvus", uri="vectors.db")
    there = "milvus", f"{tmp_path}/vectors.db"
    assert kept() == there
    for given in ({"engine": "milvus"}, {}, {"storage": "int8", "replace": True}):
        make(folder, **{"storage": about_of(tmp_path / "x.hnc")[0].storage, **given})
        assert kept() == there
    assert made == [there] * 4
    make(folder, storage="int8", engine="exact")
    assert kept() == ("exact", None)


def test_what_cannot_be_reached_is_not_gone(make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder)
    later(folder / "a/02.png")
    stat, read_bytes = Path.stat, Path.read_bytes

    def stat_or_not(path: Path, **given: bool) -> os.stat_result:
        if path.name in ("00.png", "04.png"):
            raise PermissionError(13, "Permission denied")
        return stat(path, **given)

    def read_or_not(path: Path) -> bytes:
        if path.name == "02.png":
            raise OSError(5, "Input/output error")
        return read_bytes(path)

    # One is listed and cannot be looked at, one lies in a directory that cannot be listed, one cannot be read.
    listed = [file.relative_to(folder).as_posix() for file in sorted(folder.glob("*/*")) if file.name != "04.png"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat_or_not)
        patch.setattr(Path, "read_bytes", read_or_not)
        patch.setattr("hnclip.search.indexing.source.files_below", lambda *_: iter(listed))
        built = make(folder)
        assert counts(built) == {"unchanged": 8, "bad": 3}
        assert {problem.where for problem in built.problems} == {"a/00.png", "a/02.png", "a/04.png"}
        assert built.pictures == 11
    built = make(folder)
    assert counts(built) == {"unchanged": 11}
    assert built.problems == ()


def test_a_new_picture_that_cannot_be_read_is_tried_again(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(image: FileImage) -> bytes:
        try:
            raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise InvalidImage("missing image", "cannot be read") from error

    with monkeypatch.context() as patch:
        patch.setattr(FileImage, "read", fail)
        built = make(folder)
    assert counts(built) == {"bad": 11}
    assert "nothing there" in built.to_text()
    assert "next:" not in built.to_text()
    assert counts(make(folder)) == {"new": 11}


def test_one_that_moved_and_was_copied(make: Make, folder: Path) -> None:
    make(folder)
    shutil.copy(folder / "a/02.png", folder / "copy.png")
    (folder / "a/02.png").rename(folder / "moved.png")
    assert counts(make(folder)) == {"new": 1, "moved": 1, "unchanged": 10}


def test_a_record_whose_picture_is_another_file_of_the_same_stamp(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for name, number in (("a", 0), ("b", 7)):
        save_picture(folder / f"{name}.bmp", number)  # of the same size
        os.utime(folder / f"{name}.bmp", ns=(10**18, 10**18))
    assert FileImage(folder / "a.bmp").stamp() == FileImage(folder / "b.bmp").stamp()
    table = folder / "table.csv"
    for name in "ab":
        table.write_text(f"name,image,caption\none,{name}.bmp,a house\n")
        built = make(table, read=ReadConfig(id_column="name"))
        content = content_hash((folder / f"{name}.bmp").read_bytes())
        assert names_of(tmp_path / "x.hnc") == {"one": content}
    assert counts(built) == {"changed": 1}


def test_captions_without_a_word_are_listed(make: Make, tmp_path: Path) -> None:
    table = tmp_path / "data/table.jsonl"
    rows = [
        {"image": "0.png", "caption": ["a house", "<|endoftext|>"]},
        {"image": "1.png", "caption": ["<|endoftext|>"]},
        {"image": "2.png", "caption": ["a tree"]},
        {"image": "3.png", "caption": ["not there"]},
    ]
    for number in range(3):
        save_picture(tmp_path / f"data/{number}.png", number)
    table.write_text("\n".join(map(json.dumps, rows)))
    built = make(table)
    assert counts(built) == {"new": 3, "bad": 1}
    with Index(tmp_path / "x.hnc") as index:
        assert [item.captions for item in index.all_items()] == [("a house",), (), ("a tree",)]
    kinds = {problem.where[0]: problem.kind for problem in built.problems}
    assert kinds == {"0": "empty caption", "1": "empty caption", "3": "missing image"}
    assert "left out 1 picture and 2 rows of text:" in built.to_text()
    before = about_of(tmp_path / "x.hnc")
    again = make(table)
    assert counts(again) == {"unchanged": 3, "bad": 1}
    assert sorted(again.problems, key=str) == sorted(built.problems, key=str)
    assert about_of(tmp_path / "x.hnc") == before


def test_a_folder_with_a_table_and_one_that_cannot_be_read(
    make: Make, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in folder.rglob("*.txt"):
        file.unlink()
    (folder / "metadata.csv").write_text("file_name,text\na/00.png,a house\nb/01.png,two trees\n")
    assert make(folder).captions == 2
    (folder / "metadata.csv").unlink()
    (folder / "one.csv").write_text("nothing\n")
    (folder / "two.csv").write_text("nothing\n")
    built = build_index(options(folder, Path("any"), tmp_path / "x.hnc"))  # the model is the fixture's
    assert (built.captions, built.pictures) == (0, 11)
    assert any(line.startswith("the images are indexed without captions: ") for line in caplog.messages)


def test_records_of_other_data_by_their_ids(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = tuple(scene_records("park", "validation", families=2))
    monkeypatch.setattr("hnclip.search.indexing.source.open_data", lambda name, *_, **__: DataSet(name, records))
    assert counts(make("scenes/park/small", split="validation")) == {"new": len(records)}
    with Index(tmp_path / "x.hnc") as index:
        assert {item.name: item.captions for item in index.all_items()} == {
            record.id: record.captions for record in records
        }
        assert (index.about.data, index.about.root, index.about.split) == ("scenes/park/small", None, "validation")
        assert index.source(next(index.all_items())) is None
    assert counts(make("scenes/park/small", split="validation")) == {"unchanged": len(records)}
    with pytest.raises(ValueError, match="holds split validation, not all"):
        make("scenes/park/small")


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_patch_vectors_are_kept(
    storage: str, make: Make, model: DualEncoder, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np
    import torch

    monkeypatch.setattr("hnclip.search.indexing.run.ROOM", 5000)  # few pictures of one commit
    make(folder, tokens=True, storage=storage, batch=2)
    with Index(tmp_path / "x.hnc") as index, torch.no_grad():
        assert (index.about.patches, index.about.storage) == (9, storage)
        assert index.state.version == 3
        for item in index.all_items():
            pixels = model.preprocess_images([FileImage(folder / item.name).load()])
            seen = model.encode_images(pixels, tokens=True)
            assert seen.tokens is not None
            tokens = index.tokens([item.row])
            assert tokens is not None
            assert np.abs(tokens[0] - seen.tokens[0].numpy()).max() < 3e-3
            vector = index.vectors("images").rows(np.array([item.row]))[0]
            assert np.abs(vector - seen.vectors[0].numpy()).max() < (2e-3 if storage == "bf16" else 6e-3)


def test_no_picture_leaves_the_index_as_it_was(make: Make, folder: Path, tmp_path: Path) -> None:
    make(folder)
    before = names_of(tmp_path / "x.hnc")
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(ValueError, match="there are no pictures in"):
        make(folder)
    (folder / "note.txt").write_text("not mounted")
    with pytest.raises(ValueError, match="there are no pictures in"):
        make(folder)
    assert names_of(tmp_path / "x.hnc") == before
    with pytest.raises(ValueError, match="there are no pictures in"):
        make(folder, out=tmp_path / "new.hnc")
    assert not (tmp_path / "new.hnc").exists()


def test_an_index_of_something_else_is_refused_and_replaced(
    make: Make, model: DualEncoder, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder)
    other = make_folder(tmp_path / "other", 3)
    refused = {
        "stores vectors as bf16, not as int8": {"storage": "int8"},
        "was made without --tokens": {"tokens": True},
        "is an index of .*pictures, not of .*other": {"data": other},
    }
    for message, changed in refused.items():
        with pytest.raises(ValueError, match=message) as error:
            make(**{"data": folder, **changed})
        assert f"hnclip index {folder} --out {tmp_path / 'x.hnc'}" in str(error.value)
        assert "--replace" in str(error.value)
    with monkeypatch.context() as patch:
        patch.setattr(build, "model_fingerprint", lambda *given: "another")
        with pytest.raises(ValueError, match="was made with another model"):
            make(folder)
    assert names_of(tmp_path / "x.hnc") == contents_of(folder)
    with Index(tmp_path / "x.hnc") as old:
        assert counts(make(other, replace=True)) == {"new": 3}
        assert old.count() == 11
    check_built(tmp_path / "x.hnc", other, model, said(0))
    assert counts(make(other, replace=True)) == {"unchanged": 3}  # nothing is other now


def test_a_folder_that_was_moved_is_not_read_again(
    make: Make, model: DualEncoder, folder: Path, read: Read, tmp_path: Path
) -> None:
    make(folder)
    read.clear()
    moved = folder.rename(tmp_path / "elsewhere")
    assert counts(make(moved)) == {"unchanged": 11}
    assert read == []
    check_built(tmp_path / "x.hnc", moved, model, said(0, 3, 6, 9))  # files are found where they are now
    (tmp_path / "link").symlink_to(moved)
    assert counts(make(tmp_path / "link")) == {"unchanged": 11}
    # The old place is gone, but this is another folder: a mistake, or a disk that is not mounted.
    (tmp_path / "link").unlink()
    moved.rename(tmp_path / "away")
    save_picture(tmp_path / "other/a/00.png", 5)
    with pytest.raises(ValueError, match="is an index of"):
        make(tmp_path / "other")
    assert len(names_of(tmp_path / "x.hnc")) == 11


def test_much_that_is_dead_leaves_the_files(
    make: Make, model: DualEncoder, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "DEAD_LEAST", 3)
    make(folder)
    with Index(tmp_path / "x.hnc") as old:
        for number in (0, 2):
            (folder / f"a/{number:02}.png").unlink()
        assert not make(folder).compacted
        before = {item.name: item.id for item in old.all_items()}
        (folder / "a/04.png").unlink()
        built = make(folder)
        assert built.compacted
        assert "written anew without what was gone" in built.to_text()
        assert len(before) == old.count() == 11
    with Index(tmp_path / "x.hnc") as index:
        assert (len(index.vectors("images")), len(index.dead("images"))) == (8, 0)
        assert {item.name: item.id for item in index.all_items()}.items() <= before.items()
    check_built(tmp_path / "x.hnc", folder, model, said(3, 6, 9))


def test_no_room_to_leave_out_what_is_dead_is_no_failure(
    make: Make, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "DEAD_LEAST", 1)
    make(folder)
    for file in (folder / "a").iterdir():
        file.unlink()

    def full(writer: IndexWriter) -> None:
        raise OSError("no room")

    monkeypatch.setattr(build, "compact", full)
    caplog.set_level("INFO", logger="hnclip")
    built = build_index(options(folder, Path("any"), tmp_path / "x.hnc"))
    assert (built.compacted, built.pictures) == (False, 5)
    assert caplog.messages[-1].startswith("what is gone stays in the files for now: no room")


def test_a_full_disk_ends_the_run_and_loses_nothing(
    make: Make, model: DualEncoder, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hnclip.search.indexing.run.TOGETHER", 4)
    commit, calls = IndexWriter.commit, []

    def fail(writer: IndexWriter, change: object) -> None:
        calls.append(change)
        if len(calls) == 2:
            raise OSError("no room for it: make some")
        commit(writer, change)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(IndexWriter, "commit", fail)
        with pytest.raises(OSError, match="make some"):
            make(folder)
    assert len(names_of(tmp_path / "x.hnc")) == 4
    assert counts(make(folder)) == {"new": 7, "unchanged": 4}
    check_built(tmp_path / "x.hnc", folder, model, said(0, 3, 6, 9))


def test_a_picture_with_many_captions_is_not_encoded_again_from_the_first(
    make: Make, model: DualEncoder, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captions are committed on the way, before the item that they are said of."""
    for file in folder.rglob("*.txt"):
        file.unlink()
    captions = ["one house " * (5 - number) for number in range(5)]
    (folder / "table.csv").write_text("image,caption\n" + "".join(f"a/00.png,{text}\n" for text in captions))
    monkeypatch.setattr("hnclip.search.indexing.run.SECONDS", -1.0)
    encode, calls = model.encode_texts, []

    def fail(tokens: object) -> object:
        calls.append(tokens)
        if len(calls) == 3:
            raise RuntimeError("the machine stops")
        return encode(tokens)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(model, "encode_texts", fail)
        with pytest.raises(RuntimeError, match="the machine stops"):
            make(folder, batch=2, read=ReadConfig())
    with Index(tmp_path / "x.hnc") as index:
        assert index.count() == 0
        assert [len(index.vectors(kind)) for kind in KINDS] == [len(index.dead(kind)) for kind in KINDS] == [1, 2]
    built = make(folder, batch=2, read=ReadConfig())
    assert (built.counts.encoded, built.counts.encoded_captions) == (10, 3)
    said = tuple(text.strip() for text in captions)
    check_built(tmp_path / "x.hnc", folder, model, {"a/00.png": said})


@pytest.mark.slow
@pytest.mark.parametrize("replacing", [False, True])
def test_a_killed_run_goes_on(
    replacing: bool, make: Make, model: DualEncoder, model_directory: Path, folder: Path, tmp_path: Path
) -> None:
    """A new index, and one that is made anew: until it is complete the old one counts."""
    out, sign = tmp_path / "x.hnc", tmp_path / "sign"
    if replacing:
        make(make_folder(tmp_path / "other", 3))
    given = options(folder, model_directory, out, replace=replacing, batch=2)
    process = PROCESSES.Process(target=stop_after, args=(given, 2, sign), daemon=True)
    process.start()
    end = time.monotonic() + 120
    while not sign.exists():
        assert process.is_alive()
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(ValueError, match="another process is writing"):
        make(folder, replace=replacing)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    there = names_of(out)
    assert len(there) == (3 if replacing else 8)
    built = make(folder, replace=replacing)
    assert counts(built) == {"new": 3, "unchanged": 8}
    assert built.counts.encoded == 3
    check_built(out, folder, model, said(0, 3, 6, 9))


def test_few_pictures_are_in_memory_at_a_time(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch, model: DualEncoder
) -> None:
    for number in range(60):
        save_picture(folder / f"c/{number}.png", 200 + number)
    decoded, encoded, most = 0, 0, 0
    look, encode = pictures_code.preprocess_image, model.encode_images

    def count_decoded(*given: object) -> object:
        nonlocal decoded, most
        decoded += 1
        most = max(most, decoded - encoded)
        return look(*given)  # type: ignore[arg-type]

    def count_encoded(pixels: object, **given: bool) -> object:
        nonlocal encoded
        encoded += len(pixels)  # type: ignore[arg-type]
        time.sleep(0.05)  # the threads run ahead
        return encode(pixels, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(pictures_code, "preprocess_image", count_decoded)
    monkeypatch.setattr(model, "encode_images", count_encoded)
    make(folder, batch=4)
    assert decoded == encoded == 71
    assert 4 < most <= 14  # a batch that waits, two that are decoded ahead, and what the threads are at


def test_an_engine_stays_the_index_s_own(make: Make, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    make(folder, engine="faiss-ivf")
    make(folder)
    assert about_of(tmp_path / "x.hnc")[0].engine == "faiss-ivf"
    make(folder, engine="exact")
    assert about_of(tmp_path / "x.hnc")[0].engine == "exact"


def test_the_command(folder: Path, model_directory: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from hnclip.cli import main

    out = tmp_path / "photos.hnc"
    call = ["index", str(folder), "--out", str(out), "--model", str(model_directory), "--json"]
    assert main(call) == 0
    assert json.loads(capsys.readouterr().out)["new"] == 11
    assert main(["index", str(folder), "--out", str(out), "--quiet"]) == 1
    assert "was made with another model" in capsys.readouterr().err
    assert main(["index", str(tmp_path / "none"), "--out", str(out)]) == 1
    assert "is not known" in capsys.readouterr().err


def test_pictures_that_a_table_names_elsewhere_come_too(make: Make, folder: Path, tmp_path: Path) -> None:
    save_picture(tmp_path / "far/away.png", 50)
    for file in folder.rglob("*.txt"):
        file.unlink()
    rows = f"image,caption\n{tmp_path}/far/away.png,far away\na/00.png,here\n"
    (folder / "table.csv").write_text(rows)
    built = make(folder, read=ReadConfig())
    assert (built.pictures, built.captions) == (12, 2)
