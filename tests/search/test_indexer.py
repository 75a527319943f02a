"""`hnclip index`: what it reads, encodes, keeps, deletes, lists as problems and refuses; its thumbnails."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from small_index import bundled
from store_helpers import all_files, vectors_of

from encode_helpers import PROCESSES, save_image
from hnclip.cli import main
from hnclip.config import ReadConfig
from hnclip.core import InvalidImage, Problem
from hnclip.data.image_sources import FileImage, decode_image
from hnclip.data.images import to_rgb
from hnclip.models.load import load
from hnclip.search import indexer, update
from hnclip.search.database import Kind
from hnclip.search.indexer import build_index
from hnclip.search.reader import IndexReader
from hnclip.search.render import IndexResult
from hnclip.search.scan import open_source
from hnclip.search.update import make_thumbnail
from hnclip.search.writer import LOCK, Change, IndexWriter
from hnclip.util.files import Busy, exclusive_lock

COUNTS = ("added", "updated", "deleted", "unchanged", "encoded", "encoded_captions")
Captions = dict[str, tuple[str, ...]]


def caption_of(number: int) -> str:
    return f"a red house, number {number}, under the cloudy sky"


CAPTIONS: Captions = {f"{'ab'[n % 2]}/{n:02}.png": (caption_of(n),) for n in (0, 3, 6, 9)}


class Indexing:
    """`build_index` of a folder: 11 images in the directories a and b, every third with a caption. Lists the files that
    are read."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp, self.folder, self.out, self.read = tmp_path, tmp_path / "images", tmp_path / "x.hnc", list[str]()
        for number in range(11):
            image = self.folder / f"{'ab'[number % 2]}/{number:02}.png"
            save_image(image, number)
            if number % 3 == 0:
                image.with_suffix(".txt").write_text(caption_of(number) + "\n")

    def __call__(self, data: Path | str = "", out: Path | None = None, **changed: Any) -> IndexResult:
        self.read.clear()
        given = {"model": "bundled", "batch": 4, "workers": 2, "device": "cpu", "text_encoder": False, **changed}
        return build_index(str(data or self.folder), out or self.out, **given)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Indexing:
    """The bundled model is loaded once for all tests."""
    indexing, read = Indexing(tmp_path), FileImage.read
    monkeypatch.setattr(indexer, "load", lambda name, **given: bundled() if name == "bundled" else load(name, **given))
    monkeypatch.setattr(FileImage, "read", lambda image: indexing.read.append(image.path.name) or read(image))
    return indexing


def counts(result: IndexResult) -> dict[str, int]:
    """Those that are not 0, with the number of problems."""
    found = {**{name: getattr(result, name) for name in COUNTS}, "problems": len(result.problems)}
    return {name: count for name, count in found.items() if count}


def captions_in(out: Path) -> Captions:
    with IndexReader(out) as reader:
        return {file.name: file.captions for file in all_files(reader)}


def check_index(out: Path, folder: Path, captions: Captions) -> None:
    """The index holds all images of the folder that can be decoded, these captions, and the model's vectors of both."""
    images = {}
    for path in folder.rglob("*.png"):
        with suppress(InvalidImage):
            images[path.relative_to(folder).as_posix()] = FileImage(path).load()
    assert captions_in(out) == {name: captions.get(name, ()) for name in images}
    with IndexReader(out) as reader:
        inputs: dict[Kind, dict[int, Any]] = {
            "images": {file.image: images[file.name] for file in all_files(reader)},
            "captions": {id: one.text for id, one in reader.captions(reader.ids["captions"].tolist()).items()},
        }
        assert sorted(inputs["captions"].values()) == sorted({text for some in captions.values() for text in some})
        for kind, expected in inputs.items():
            vectors = vectors_of(reader, kind)
            for id, one in expected.items():
                assert np.abs(vectors[id] - bundled().encode([one])[0]).max() < 2e-3
        for file in all_files(reader):
            assert (file.width, file.height) == images[file.name].size
            assert reader.content(file) == (folder / file.name).read_bytes()


def forbid(patch: pytest.MonkeyPatch, names: set[str]) -> None:
    """Simulate files of these names that cannot be read, and directories that cannot be listed: root could."""
    for place, name in ((Path, "stat"), (Path, "open"), (Path, "read_bytes"), (os, "scandir")):
        real = getattr(place, name)

        def call(path: Any, *given: Any, real: Any = real, listing: bool = name == "scandir", **named: Any) -> Any:
            if os.path.basename(path) in names and listing == os.path.isdir(path):
                raise PermissionError(13, "not now", str(path))
            return real(path, *given, **named)

        patch.setattr(place, name, call)


def test_a_new_index_and_one_that_is_up_to_date(build: Indexing, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    result = build(threads=threads + 1)
    assert torch.get_num_threads() == threads
    assert counts(result) == {"added": 11, "encoded": 11, "encoded_captions": 4}
    check_index(build.out, build.folder, CAPTIONS)
    build.read.clear()
    with IndexReader(build.out) as reader:
        assert main(["index", str(build.folder), "--out", str(build.out), "--no-text-encoder", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)  # the index remembers its model
        assert (found["unchanged"], found["added"], found["encoded"], build.read) == (11, 0, 0, [])
        assert not reader.changed()


def test_an_update_reads_what_has_changed_and_encodes_what_is_new(build: Indexing) -> None:
    build()
    folder = build.folder
    os.utime(folder / "a/00.png", ns=(10**18, 10**18))
    save_image(folder / "b/01.png", 101)
    (folder / "a/02.png").rename(folder / "b/moved.png")
    shutil.copy(folder / "b/05.png", folder / "copy.png")
    (folder / "a/04.png").unlink()
    save_image(folder / "c/new.png", 102)
    (folder / "b/07.png").rename(folder / "a/08.png")  # one is deleted, the other changed
    assert counts(build()) == {"added": 3, "updated": 2, "deleted": 3, "unchanged": 6, "encoded": 2}
    assert sorted(build.read) == ["00.png", "01.png", "08.png", "copy.png", "moved.png", "new.png"]
    check_index(build.out, folder, CAPTIONS)
    (folder / "b/01.txt").write_text("two small trees")
    (folder / "a/00.txt").write_text(caption_of(3))  # is in the index
    (folder / "a/06.txt").unlink()
    assert counts(build()) == {"updated": 3, "unchanged": 8, "encoded_captions": 1}
    changed: Captions = {"b/01.png": ("two small trees",), "a/00.png": (caption_of(3),)}
    check_index(build.out, folder, {name: CAPTIONS[name] for name in ("b/03.png", "b/09.png")} | changed)
    assert (counts(build()), build.read) == ({"unchanged": 11}, [])


def test_bad_images_are_listed_and_tried_again_when_they_change(build: Indexing) -> None:
    build()
    folder = build.folder
    (folder / "a/00.png").write_bytes((folder / "a/00.png").read_bytes()[:700])
    (folder / "b/01.png").write_bytes(b"")
    (folder / "bad\x1b[2J.png").write_text("no image")
    (folder / "link.png").symlink_to("nowhere.png")
    result = build()
    assert counts(result) == {"deleted": 2, "unchanged": 9, "problems": 4}
    kinds = ["corrupt image", "corrupt image", "missing image", "truncated image"]
    assert sorted(problem.kind for problem in result.problems) == kinds
    assert "\x1b" not in result.to_text()
    check_index(build.out, folder, {name: found for name, found in CAPTIONS.items() if name != "a/00.png"})
    again = build()
    assert (counts(again), set(again.problems)) == ({"unchanged": 9, "problems": 4}, set(result.problems))
    assert build.read == []
    save_image(folder / "b/01.png", 77)
    save_image(folder / "nowhere.png", 78)  # what the link links to
    assert counts(build()) == {"added": 3, "unchanged": 9, "encoded": 2, "problems": 2}


@pytest.mark.parametrize(
    ("hidden", "where"),
    [
        ({"b"}, {"b"}),
        ({"00.png", "02.png"}, {"a/00.png", "a/02.png"}),
        ({"00.txt", "03.txt"}, {"a/00.txt", "b/03.txt"}),
    ],
)
def test_unreadable_files_and_folders_keep_their_entries(
    hidden: set[str], where: set[str], build: Indexing, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    (build.folder / "a/06.txt").unlink()  # of a file that can be read
    with monkeypatch.context() as patch:
        forbid(patch, hidden)
        result = build()
    assert {problem.where for problem in result.problems} == where
    assert counts(result) == {"updated": 1, "unchanged": 10, "problems": len(where)}
    check_index(build.out, build.folder, {name: found for name, found in CAPTIONS.items() if name != "a/06.png"})
    assert counts(build()) == {"unchanged": 11}


def test_captions_are_kept_while_their_table_cannot_be_read(build: Indexing) -> None:
    (build.folder / "captions.csv").write_text("image,caption\nb/01.png,two small trees\n")
    build()
    (build.folder / "other.csv").write_text("image,caption\n")  # which of the two has the captions?
    assert counts(build()) == {"unchanged": 11, "problems": 1}
    check_index(build.out, build.folder, {"b/01.png": ("two small trees",)})


def test_what_would_empty_or_mix_an_index_is_refused(build: Indexing, model_directory: Path) -> None:
    build()
    folder, out, other, new = build.folder, build.out, build.tmp / "other", build.tmp / "new.hnc"
    save_image(other / "test/1.png", 1)
    (other / "test/1.txt").write_text("a house")
    (build.tmp / "empty").mkdir()
    for message, data, changed in (
        ("another model", folder, {"model": str(model_directory)}),
        ("is an index of", other, {}),
        ("holds split all", other, {"split": "test"}),
        ("has no split", folder, {"split": "test"}),
        ("no images", build.tmp / "empty", {"out": new}),
        *(("--out", folder, {"out": place, "replace": True}) for place in (folder, folder.parent, folder / "a/..")),
        ("engine", folder, {"engine": "best", "out": new}),
        ("password", folder, {"engine": "milvus", "uri": "http://me:secret@x", "out": new}),
        ("--model", folder, {"model": None, "out": new}),
        ("is a file", folder, {"out": folder / "a/00.png"}),
    ):
        with pytest.raises(ValueError, match=message):
            build(data, **changed)
    assert not new.exists()
    with exclusive_lock(out / LOCK, ""), pytest.raises(Busy, match="another process is writing"):
        build(model="it is not loaded")
    check_index(out, folder, CAPTIONS)
    (out / "index-1.db").unlink()
    with pytest.raises(ValueError, match=r"is damaged.*no database"):
        build(model=None)
    result = build(other, split="test", model=str(model_directory), replace=True)
    assert counts(result) == {"added": 1, "encoded": 1, "encoded_captions": 1}
    assert captions_in(out) == {"test/1.png": ("a house",)}


def index_until(end: str, data: Path, out: Path, replacing: bool) -> None:
    """Two commits of 4 files, then SIGKILL or an error."""
    commit, changes = IndexWriter.commit, list[Change]()

    def counted(writer: IndexWriter, change: Change) -> None:
        changes.append(change)
        if len(changes) == 3 and end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(changes) == 3:
            raise OSError("the disk fails")
        commit(writer, change)

    update.TOGETHER, IndexWriter.commit = 4, counted  # type: ignore[method-assign]
    build_index(str(data), out, model="bundled", batch=2, replace=replacing, text_encoder=False, device="cpu")


@pytest.mark.parametrize(("end", "replacing"), [("killed", False), ("failed", True)])
def test_a_run_that_was_killed_or_failed_is_resumed(end: str, replacing: bool, build: Indexing) -> None:
    if replacing:
        save_image(build.tmp / "other/1.png", 1)
        build(build.tmp / "other")
    process = PROCESSES.Process(target=index_until, args=(end, build.folder, build.out, replacing))
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if end == "killed" else 1)
    assert len(captions_in(build.out)) == (1 if replacing else 8)
    expected = {"added": 3, "unchanged": 8, "encoded": 3, "encoded_captions": 1}
    assert counts(build(replace=replacing)) == expected
    check_index(build.out, build.folder, CAPTIONS)


def test_a_folder_that_has_moved_is_not_read_again(build: Indexing) -> None:
    build()
    moved = build.folder.rename(build.tmp / "elsewhere")
    assert (counts(build(moved)), build.read) == ({"unchanged": 11}, [])
    check_index(build.out, moved, CAPTIONS)


def test_captions_that_the_model_cannot_read_are_listed(build: Indexing) -> None:
    (build.folder / "a/00.txt").write_text("<|endoftext|>")
    for expected in ({"added": 11, "encoded": 11, "encoded_captions": 3}, {"unchanged": 11}):
        result = build()
        assert counts(result) == {**expected, "problems": 1}
        assert [problem.kind for problem in result.problems] == ["empty caption"]
    check_index(build.out, build.folder, {name: some for name, some in CAPTIONS.items() if name != "a/00.png"})


def test_images_of_a_tar_file(build: Indexing) -> None:
    images = [build.folder / name for name in CAPTIONS]
    with tarfile.open(build.tmp / "shard.tar", "w") as tar:
        for file in sorted([*images, *(image.with_suffix(".txt") for image in images)], key=lambda file: file.name):
            tar.add(file, file.name)
    for expected in ({"added": 4, "encoded": 4, "encoded_captions": 4}, {"unchanged": 4}):
        assert counts(build(build.tmp / "shard.tar")) == expected
    with IndexReader(build.out) as reader:
        assert [reader.content(file) for file in all_files(reader)] == [image.read_bytes() for image in images]


def test_images_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scanned(data: Path | str, split: str = "all") -> tuple[Captions, list[Problem]]:
        source = open_source(str(data), ReadConfig(), split=split)
        return {record.id: record.captions for record in source.records}, list(source.problems)

    for name in ("val/a.png", "test/b.png", "test/b.jpg", "c.png", ".hidden/d.png", "docci/.e.png", "docci/f.png"):
        save_image(tmp_path / name, 0)
    for name in ("val/a", "test/b", "c", "README"):
        (tmp_path / f"{name}.txt").write_text(name)
    captions, problems = scanned(tmp_path)
    expected = {"c.png": (), "docci/f.png": (), "test/b.jpg": ("test/b",), "test/b.png": (), "val/a.png": ("val/a",)}
    assert captions == expected
    assert [problem.where for problem in problems] == ["c.png"]  # its caption is in none of the splits
    assert scanned(tmp_path, "validation")[0] == {"val/a.png": ("val/a",)}
    monkeypatch.chdir(tmp_path)
    assert list(scanned("./docci")[0]) == ["f.png"]
    with pytest.raises(ValueError, match="docci"):  # the benchmark
        scanned("docci")
    forbid(monkeypatch, {tmp_path.name})
    with pytest.raises(ValueError, match="cannot be listed"):
        scanned(tmp_path)


@pytest.mark.parametrize("turn", range(1, 9))
def test_thumbnails_are_small_upright_and_without_metadata(turn: int) -> None:
    exif, content = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Make] = turn, "SECRET camera"
    colours = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 0]]], np.uint8)  # one in each corner
    corners = Image.fromarray(colours).resize((900, 600), Image.Resampling.NEAREST)
    corners.save(content, "JPEG", exif=exif, icc_profile=b"SECRET", comment=b"SECRET", xmp=b"SECRET")
    image = decode_image(content.getvalue(), "image")
    small = make_thumbnail(image)
    expected, found = to_rgb(image), decode_image(small, "thumbnail")
    assert found.size == ((320, 213) if expected.width > expected.height else (213, 320))
    for x, y in ((0.25, 0.25), (0.25, 0.75), (0.75, 0.25), (0.75, 0.75)):
        pixels = [one.getpixel((int(x * one.width), int(y * one.height))) for one in (expected, found)]
        assert np.abs(np.subtract(*pixels)).max() < 40
    assert b"SECRET" not in small
    assert not found.getexif()
