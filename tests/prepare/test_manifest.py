"""Manifests: what comes back from one, what is stale, and what kills, full disks, damage and other writers do to it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from hnclip.data.views.edges import edge_method
from PIL import Image

from hnclip.core import Record, Region
from hnclip.data.pictures import FileImage
from hnclip.prepare import lines
from hnclip.prepare.lines import Entry, Kind, open_writer, read_manifest
from hnclip.prepare.manifest import apply_manifest, manifest_path, mark_of

GRID = {"name": "grid", "version": "1"}
FILTER = {"name": "lexicon", "version": "1"}
BOX = {"box": [1, 2, 5, 7], "sentence": "A cat.", "score": 21.5, "source": "grid"}
OTHER = {"box": [0, 0, 4, 4], "sentence": "A dog – „rot“.", "score": None, "source": "grid"}


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    """Three pictures with two captions each."""
    made = []
    for number in range(3):
        path = tmp_path / f"{number}.png"
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(path)
        made.append(Record(f"r{number}", FileImage(path), (f"A cat {number}.", "A red dog."), "train"))
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "views" / "m.jsonl"


def canny() -> dict[str, str]:
    return {"name": "canny:50,150", "version": edge_method("canny:50,150").version}


def write(
    path: Path, kind: Kind, settings: dict[str, Any], contents: dict[str, Any], records: Sequence[Record]
) -> None:
    by_id = {record.id: record for record in records}
    with open_writer(path, "mine") as writer:
        key = writer.tool(kind, settings)
        writer.add(kind, [Entry(id, mark_of(kind, by_id[id]), key, content) for id, content in contents.items()])


def test_what_was_prepared_comes_back(records: list[Record], path: Path) -> None:
    write(path, "regions", GRID, {"r0": [BOX, OTHER], "r2": []}, records)
    write(path, "edges", canny(), {"r1": "canny:50,150"}, records)
    write(path, "text", FILTER, {"r1": ["A cat 1.", "A dog."]}, records)
    made, prepared = apply_manifest(records, path)
    assert made[0] == replace(
        records[0], regions=(Region((1, 2, 5, 7), "A cat.", 21.5), Region((0, 0, 4, 4), "A dog – „rot“."))
    )
    assert made[1].filtered == ("A cat 1.", "A dog.")
    assert made[1].edges is not None
    assert made[1].edges.load().size == (8, 8)
    assert made[1].edges.key != records[1].image.key
    assert made[2] == records[2]
    assert (prepared.found, prepared.stale) == ({"regions": 2, "edges": 1, "text": 1}, dict.fromkeys(lines.KINDS, 0))
    assert prepared.missing == {"regions": 1, "edges": 2, "text": 2}
    assert prepared.tools["regions"] == ({"of": "regions", **GRID},)
    assert prepared.to_text() == (
        "prepared: regions 2 of 3 records by grid; edges 1 of 3 records by canny:50,150; "
        f"text 1 of 3 records by lexicon ({path})"
    )
    assert apply_manifest(made, path)[0] == made  # and once more changes nothing


def test_without_a_manifest_nothing_is_prepared(records: list[Record], path: Path) -> None:
    made, prepared = apply_manifest(records, path)
    assert made == records
    assert prepared.missing == dict.fromkeys(lines.KINDS, 3)
    assert prepared.to_text() == f"prepared: nothing ({path})"
    assert not path.exists()


def test_what_has_changed_since_is_stale(records: list[Record], path: Path) -> None:
    for kind, settings, content in (
        ("regions", GRID, [BOX]),
        ("edges", canny(), "canny:50,150"),
        ("text", FILTER, ["a"]),
    ):
        write(path, kind, settings, {"r0": content, "r1": content, "r2": content}, records)
    records[0] = replace(records[0], captions=("A cat 0.", "A blue dog."))
    os.utime(records[1].image.path, ns=(1, 1))
    made, prepared = apply_manifest(records, path)
    assert [bool(record.regions) for record in made] == [False, False, True]
    assert [record.edges is not None for record in made] == [True, False, True]
    assert [bool(record.filtered) for record in made] == [False, True, True]
    assert prepared.found == {"regions": 1, "edges": 2, "text": 2}
    assert prepared.stale == {"regions": 2, "edges": 1, "text": 1}
    assert "1 of 3 records by grid, 2 stale;" in prepared.to_text()

    records[1].image.path.unlink()  # a picture that is gone is no reason to fail here
    assert apply_manifest(records, path)[1].stale == prepared.stale


def test_edges_of_another_version_are_stale(records: list[Record], path: Path) -> None:
    write(path, "edges", {"name": "canny", "version": "of long ago"}, {"r0": "canny"}, records)
    made, prepared = apply_manifest(records, path)
    assert made[0].edges is None
    assert prepared.stale["edges"] == 1


HED = {"name": "hed", "version": "torch", "weights": "/nowhere/hed.pth"}


def test_only_the_kinds_that_are_asked_for_are_looked_at(records: list[Record], path: Path) -> None:
    write(path, "regions", GRID, {"r0": [BOX]}, records)
    write(path, "edges", HED, {"r0": "hed", "r1": "hed"}, records)
    write(path, "text", FILTER, {"r0": ["a", "b"]}, records)
    made, prepared = apply_manifest(records, path, {"regions"})
    assert (bool(made[0].regions), made[0].filtered, made[0].edges) == (True, (), None)
    for counts in (prepared.found, prepared.own, prepared.stale, prepared.missing):
        assert counts["edges"] == counts["text"] == 0
    assert prepared.to_text() == f"prepared: regions 1 of 3 records by grid ({path})"
    with pytest.raises(ValueError, match=rf"edges in {path} are by hed.*nowhere/hed.pth.*hnclip prepare edges"):
        apply_manifest(records, path, {"edges", "text"})


def test_edges_of_the_manifest_take_the_place_of_all_own_maps(records: list[Record], path: Path) -> None:
    whole, part = FileImage(Path("whole.png")), FileImage(Path("part.png"))
    regions = (Region((0, 0, 4, 4), "A cat.", 2.0, part), Region((0, 0, 5, 5), "A dog.", 1.0))
    records = [replace(record, edges=whole, regions=regions) for record in records]
    write(path, "edges", canny(), {"r0": "canny:50,150"}, records)
    made, prepared = apply_manifest(records, path)
    assert (prepared.found["edges"], prepared.own["edges"]) == (1, 2)
    assert made[0].edges not in (None, whole)
    assert made[0].regions == tuple(replace(region, edges=None) for region in regions)
    assert made[1:] == records[1:]
    assert apply_manifest(records, path, {"regions"})[0] == records


def test_who_made_what_is_stale(records: list[Record], path: Path) -> None:
    write(path, "regions", GRID, {"r0": [BOX]}, records)
    write(path, "regions", {"name": "sam", "version": "1"}, {"r1": [BOX]}, records)
    changed = [replace(record, captions=("Other.",)) for record in records]
    prepared = apply_manifest(changed, path)[1]
    assert [tool["name"] for tool in prepared.stale_tools["regions"]] == ["grid", "sam"]
    reason = "regions of 2 of 3 records, by grid and sam, are stale: their pictures or captions have changed since"
    assert prepared.stale_reason("regions") == f"{reason} ({path})"
    assert prepared.stale_reason("edges") == ""
    assert apply_manifest(records, path)[1].stale_tools["regions"] == ()


def test_data_may_be_moved_with_their_times(records: list[Record], path: Path, tmp_path: Path) -> None:
    write(path, "regions", GRID, {record.id: [BOX] for record in records}, records)
    (tmp_path / "elsewhere").mkdir()
    moved = []
    for record in records:
        copy = shutil.copy2(record.image.path, tmp_path / "elsewhere")
        moved.append(replace(record, image=FileImage(Path(copy))))
    assert apply_manifest(moved, path)[1].found["regions"] == 3
    os.utime(moved[0].image.path)  # as a copy without its time
    other = moved[1].image.path.rename(tmp_path / "elsewhere" / "another.png")
    moved[1] = replace(moved[1], image=FileImage(other))
    assert apply_manifest(moved, path)[1].stale["regions"] == 2


def test_own_regions_are_kept_unless_the_manifest_has_some(records: list[Record], path: Path) -> None:
    own = Region((0, 0, 8, 8), "All of it.", None, FileImage(Path("edges.png")))
    records = [replace(record, regions=(own,)) for record in records]
    write(path, "regions", GRID, {"r0": [BOX], "r1": []}, records)
    made, prepared = apply_manifest(records, path)
    assert [record.regions[0].sentence for record in made] == ["A cat.", "All of it.", "All of it."]
    assert (prepared.found["regions"], prepared.own["regions"], prepared.missing["regions"]) == (1, 2, 0)
    assert "2 bring their own" in prepared.to_text()
    # Of the truth a manifest is a copy, without what it cannot keep.
    write(path, "regions", {"name": "truth", "version": ""}, {"r0": [BOX]}, records)
    made, prepared = apply_manifest(records, path)
    assert made[0].regions == (own,)
    assert prepared.found["regions"] == 1


def test_later_lines_win(records: list[Record], path: Path) -> None:
    write(path, "regions", GRID, {"r0": [BOX], "r1": [BOX]}, records)
    write(path, "regions", {"name": "felzenszwalb", "version": "2"}, {"r0": [OTHER]}, records)
    write(path, "regions", GRID, {"r1": [OTHER, BOX]}, records)
    made, prepared = apply_manifest(records, path)
    assert [len(record.regions) for record in made] == [1, 2, 0]
    assert made[0].regions[0].sentence == OTHER["sentence"]
    assert {tool["name"] for tool in prepared.tools["regions"]} == {"grid", "felzenszwalb"}
    kinds = [json.loads(line)["kind"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert kinds == ["manifest", "tool", "regions", "regions", "tool", "regions", "regions"]  # each tool once


def test_a_piece_of_a_line_is_overlooked_and_cut_off(records: list[Record], path: Path) -> None:
    write(path, "regions", GRID, {"r0": [BOX]}, records)
    whole = path.read_bytes()
    write(path, "regions", GRID, {"r1": [OTHER]}, records)
    longer = path.read_bytes()
    for length in range(len(whole), len(longer)):
        path.write_bytes(longer[:length])
        assert list(read_manifest(path).entries["regions"]) == ["r0"]
        if length % 20 == 0:
            write(path, "regions", GRID, {"r1": [OTHER]}, records)
            assert path.read_bytes() == longer
    path.write_bytes(whole + b"x" * (2 * lines.BLOCK))  # longer than what is looked through at once
    write(path, "regions", GRID, {"r1": [OTHER]}, records)
    assert path.read_bytes() == longer


def region(**changed: Any) -> bytes:
    line = {"kind": "regions", "id": "r0", "mark": "m", "tool": "KEY", "regions": [{**BOX, **changed}]}
    return json.dumps(line).encode()


@pytest.mark.parametrize(
    "damage",
    [
        b'{"kind": "regions", "id": "r0", "ma',
        b"\0\0\0\0",
        b"[]",
        b'{"kind": "sounds", "id": "r0"}',
        b'{"kind": "regions", "id": "r0", "mark": "m", "tool": "nobody", "regions": []}',
        b'{"kind": "regions", "mark": "m", "tool": "KEY", "regions": []}',
        b'{"kind": "regions", "id": "r0", "mark": 3, "tool": "KEY", "regions": []}',
        b'{"kind": "regions", "id": "r0", "mark": "m", "tool": "KEY"}',
        b'{"kind": "regions", "id": "r0", "mark": "m", "tool": "KEY", "regions": [{"box": [1, 2, 5, 7]}]}',
        region(box=[5, 2, 1, 7]),
        region(box=[1, 2.5, 5, 7]),
        region(box=[1, 2, 5]),
        region(score="1"),
        region(sentence=None),
        b'{"kind": "text", "id": "r0", "mark": "m", "tool": "KEY", "captions": [3]}',
        b'{"kind": "edges", "id": "r0", "mark": "m", "tool": "KEY", "method": null}',
        b'{"kind": "tool", "of": "regions", "key": "k", "version": "1"}',
    ],
)
def test_a_damaged_line_is_named(records: list[Record], path: Path, damage: bytes) -> None:
    write(path, "regions", GRID, {"r0": [BOX], "r1": [BOX]}, records)
    content = path.read_bytes().splitlines()
    key = json.loads(content[1])["key"].encode()
    content[3] = damage.replace(b"KEY", key)
    path.write_bytes(b"\n".join(content) + b"\n")
    before = path.read_bytes()
    for read in (
        read_manifest,
        lambda path: apply_manifest(records, path),
        lambda path: open_writer(path, "").__enter__(),
    ):
        with pytest.raises(ValueError, match=f"line 4 of {path} is damaged"):
            read(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"no line", b'{"image": "a.jpg"}\n{"image": "b', b'{"kind": "manifest"}\n'])
def test_a_file_that_is_no_manifest_is_left_alone(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a manifest"), open_writer(path, "mine"):
        pass
    with pytest.raises(ValueError, match="is not a manifest"):
        read_manifest(path)
    assert path.read_bytes() == content


def test_one_writer_at_a_time(records: list[Record], path: Path) -> None:
    with open_writer(path, "mine") as writer:
        with pytest.raises(ValueError, match=f"another process is writing {path}"), open_writer(path, "mine"):
            pass
        writer.tool("regions", GRID)
        assert apply_manifest(records, path)[0] == records  # reading waits for nobody
    write(path, "regions", GRID, {"r0": [BOX]}, records)
    assert list(read_manifest(path).entries["regions"]) == ["r0"]


def test_a_full_disk_leaves_what_was_there(records: list[Record], path: Path) -> None:
    write(path, "regions", GRID, {"r0": [BOX]}, records)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_writer(path, "mine") as writer:
        entries = [Entry(f"n{number}", "m", writer.tool("regions", GRID), [BOX]) for number in range(9)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 500, limits[1]))  # room for two and a half
        try:
            with pytest.raises(OSError, match=r"could not write .*m\.jsonl.*intact"):
                writer.add("regions", entries)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before
        assert list(writer.manifest.entries["regions"]) == ["r0"]
        writer.add("regions", entries)
    assert list(read_manifest(path).entries["regions"]) == ["r0", *(f"n{number}" for number in range(9))]


def test_an_interruption_leaves_what_was_there(
    records: list[Record], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, "regions", GRID, {"r0": [BOX]}, records)
    before = path.read_bytes()

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    with open_writer(path, "mine") as writer:
        entries = [Entry("n", "m", writer.tool("regions", GRID), [BOX])]
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.add("regions", entries)
        assert path.read_bytes() == before
        writer.add("regions", entries)
    assert list(read_manifest(path).entries["regions"]) == ["r0", "n"]


KILLED = """
import os, signal, sys
from pathlib import Path
from hnclip.prepare.lines import Entry, open_writer

with open_writer(Path(sys.argv[1]), "mine") as writer:
    key = writer.tool("text", {"name": "lexicon", "version": "1"})
    for number in range(3):
        writer.add("text", [Entry(str(number), "m", key, ["a"])])
    writer._file.write(b'{"kind": "text", "id": "half')
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_costs_half_a_line_and_no_lock(path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes().endswith(b'"half')
    assert list(read_manifest(path).entries["text"]) == ["0", "1", "2"]
    with open_writer(path, "mine") as writer:  # nobody holds it any more
        assert path.read_bytes().endswith(b"}\n")
        writer.add("text", [Entry("3", "m", writer.tool("text", FILTER), ["a"])])
    assert list(read_manifest(path).entries["text"]) == ["0", "1", "2", "3"]


def test_superseded_lines_are_dropped_when_they_are_most(
    records: list[Record], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, "text", FILTER, {"r0": ["a", "b"]}, records)
    for number in range(3):
        write(path, "regions", {"name": "grid", "version": str(number)}, {"r0": [BOX], "r1": [OTHER]}, records)
    assert len(path.read_bytes().splitlines()) == 1 + 1 + 1 + 3 * 3  # four superseded lines, three that count
    before = apply_manifest(records, path)
    assert len(read_manifest(path).entries["regions"]) == 2
    monkeypatch.setattr(lines, "FEW", 3)
    with open_writer(path, "mine"):
        pass
    assert apply_manifest(records, path) == before
    kinds = [json.loads(line)["kind"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert kinds == ["manifest", "tool", "tool", "regions", "regions", "text"]
    assert not list(path.parent.glob(".*.new-*"))


def test_readers_see_one_moment_while_a_writer_appends(path: Path) -> None:
    done = Event()
    seen: list[list[str]] = []

    def read() -> None:
        while not done.is_set():
            seen.append(list(read_manifest(path).entries["text"]))

    with open_writer(path, "mine") as writer:
        key = writer.tool("text", FILTER)
        reader = Thread(target=read)
        reader.start()
        try:
            for number in range(0, 300, 3):
                writer.add("text", [Entry(str(number + step), "m", key, ["word " * 500]) for step in range(3)])
        finally:
            done.set()
            reader.join()
    assert len(seen) > 2
    assert all(ids == [str(number) for number in range(len(ids))] for ids in seen)
    assert list(map(len, seen)) == sorted(map(len, seen))


def test_a_reader_does_not_mix_what_a_killed_writer_left_with_what_comes_after(path: Path) -> None:
    with open_writer(path, "mine") as writer:
        key = writer.tool("text", FILTER)
        writer.add("text", [Entry("a", "m", key, ["x" * 100_000])])
    with path.open("ab") as file:
        file.write(b'{"kind": "te')
    with path.open("rb") as file:
        found = lines._lines(path, file)
        assert next(found)[0] == 2
        with open_writer(path, "mine") as writer:
            writer.add("text", [Entry("b", "m", key, ["y"])])
        assert [json.loads(line)["id"] for _, line in found] == ["a"]


def test_captions_that_no_file_can_hold_as_they_are(path: Path) -> None:
    strange = Record("id \ud83d", FileImage(Path("a.png")), ("half \ud83d of a pair", "a\nb\u2028c"), None)
    write(path, "text", FILTER, {strange.id: list(strange.captions)}, [strange])
    assert apply_manifest([strange], path)[0][0].filtered == strange.captions


def test_one_file_per_data_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my photos.csv").touch()
    (tmp_path / "b").mkdir()
    (tmp_path / "scenes" / "park").mkdir(parents=True)  # `--data scenes/park` are the generated ones nevertheless
    (tmp_path / "b" / "my photos.csv").touch()

    def where(data: str) -> Path:
        return manifest_path(tmp_path / "cache", data)

    assert where("my photos.csv") == where(str(tmp_path / "my photos.csv")) == where("b/../my photos.csv")
    assert where("my photos.csv").parent == tmp_path / "cache" / "views"
    assert where("my photos.csv").name.startswith("my-photos-csv-")
    assert where("scenes") == where("scenes/park")
    assert where("docci=b") == where(f"docci={tmp_path}/b")
    sources = [
        "my photos.csv",
        "b/my photos.csv",
        "b",
        "b/*.csv",
        "scenes/park",
        "scenes/shelf",
        "docci",
        "docci=b",
        "a/b",
    ]
    assert len({where(source) for source in sources}) == len(sources)
