"""Manifests: continued after a kill, updated record by record, one writer, one file per source and kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from hnclip.config import ReadConfig
from hnclip.core import Record, Region
from hnclip.data.image_sources import FileImage
from hnclip.data.manifest import (
    KINDS,
    Kind,
    Manifest,
    apply_manifest,
    manifest_path,
    read_manifest,
    record_mark,
    write_manifest,
)
from hnclip.data.scenes import scene_records

REGION = {"box": [1, 2, 30, 40], "sentence": "a tree", "score": 3.5}
TOOL = {"name": "test", "sizes": (1, 2)}


def write(path: Path, records: list[Record], kind: Kind = "regions", overwrite: bool = False) -> None:
    with write_manifest(path, kind, by="a test", tool=TOOL, data="some", overwrite=overwrite) as manifest:
        for record in records:
            content = [REGION] if kind == "regions" else [f"short {record.id}"]
            manifest.append(record.id, record_mark(kind, record), content)


@pytest.fixture
def records() -> list[Record]:
    return scene_records("park", "train", families=3)


def test_records_get_what_was_prepared(tmp_path: Path, records: list[Record]) -> None:
    bare = [replace(record, regions=()) for record in records]
    write(tmp_path / "regions.jsonl", bare[1:])
    write(tmp_path / "text.jsonl", records[:2], "text")
    found, applied, changed = apply_manifest(bare, read_manifest(tmp_path / "regions.jsonl", "regions"))
    assert (applied, changed) == (len(records) - 1, 0)
    assert found[0] == bare[0]
    assert found[1].regions == (Region((1, 2, 30, 40), "a tree", 3.5),)
    found, applied, _ = apply_manifest(records, read_manifest(tmp_path / "text.jsonl", "text"))
    assert applied == 2
    assert found[0] == replace(records[0], filtered=(f"short {records[0].id}",))
    assert read_manifest(tmp_path / "none.jsonl", "text") == Manifest(tmp_path / "none.jsonl", "text")
    with write_manifest(tmp_path / "empty.jsonl", "regions", by="a test", tool=TOOL, data="some") as manifest:
        manifest.append(records[0].id, record_mark("regions", records[0]), [])
    found, applied, _ = apply_manifest(records, read_manifest(tmp_path / "empty.jsonl", "regions"))
    assert (found, applied) == (records, 1)  # own regions stay if none were found


def test_changed_images_and_captions_do_not_count(tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(image)
    record = Record("a", FileImage(image), ("one", "two"), None)
    for kind in KINDS:
        write(tmp_path / f"{kind}.jsonl", [record], kind)
        manifest = read_manifest(tmp_path / f"{kind}.jsonl", kind)
        assert manifest.current(record) is not None
        other = replace(record, captions=("one", "2"))
        assert apply_manifest([other], manifest) == ([other], 0, 1)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    os.rename(image, moved / "a.png")  # keeps its time
    assert record_mark("regions", replace(record, image=FileImage(moved / "a.png"))) == manifest_mark(tmp_path)
    assert read_manifest(tmp_path / "regions.jsonl", "regions").current(record) is None  # no image any more
    Image.new("RGB", (9, 9)).save(image)
    assert read_manifest(tmp_path / "regions.jsonl", "regions").current(record) is None
    assert read_manifest(tmp_path / "text.jsonl", "text").current(record) is not None


def manifest_mark(directory: Path) -> str:
    return read_manifest(directory / "regions.jsonl", "regions").entries["a"][0]


def test_another_tool_needs_permission(tmp_path: Path, records: list[Record]) -> None:
    path = tmp_path / "text.jsonl"
    write(path, records, "text")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="--replace"), write_manifest(path, "text", by="x", tool={}, data="some"):
        pass
    assert path.read_bytes() == before
    with write_manifest(path, "text", by="x", tool={}, data="some", overwrite=True) as manifest:
        assert not manifest.entries
    assert read_manifest(path, "text") == Manifest(path, "text", by="x", size=path.stat().st_size)


def test_a_second_writer_gets_a_message(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    with write_manifest(path, "text", by="x", tool={}, data="some"), pytest.raises(ValueError, match="another process"):
        write(path, [], "text")


def test_a_torn_line_is_cut_off_the_later_counts_and_a_damaged_one_is_named(
    tmp_path: Path, records: list[Record]
) -> None:
    path = tmp_path / "text.jsonl"
    write(path, records[:2], "text")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "half')
    assert len(read_manifest(path, "text").entries) == 2
    with write_manifest(path, "text", by="a test", tool=TOOL, data="some") as manifest:
        manifest.append(records[0].id, "mark", ["half a \ud83d pair, \u00e9"])
    assert path.read_bytes().startswith(whole + b'{"id": "park')
    assert read_manifest(path, "text").entries[records[0].id] == ("mark", ["half a \ud83d pair, \u00e9"])
    for content in (
        b"not JSON\n",
        b"[]\n",
        b'{"format": 0, "kind": "text", "by": "", "tool": {}}\n',
        b'{"kind": "text"}\n',
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="line 1"):
            read_manifest(path, "text")
    path.write_bytes(whole + b'{"id": "a"}\n')
    with pytest.raises(ValueError, match="line 4"):
        read_manifest(path, "text")


def test_every_source_has_its_own_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.csv").touch()
    monkeypatch.chdir(tmp_path)
    sources = ["scenes/park", "scenes/park/small", "scenes/park/doubles", "my.csv", "docci=my", "docci", "*.tar"]
    paths = [manifest_path(ReadConfig(), source, kind) for source in sources for kind in KINDS]
    assert len(set(paths)) == len(paths)
    monkeypatch.chdir("/")
    absolute = [str(tmp_path / "my.csv"), f"docci={tmp_path / 'my'}", str(tmp_path / "*.tar")]
    assert {manifest_path(ReadConfig(), source, "text") for source in absolute} <= set(paths)
    assert manifest_path(ReadConfig(prepared="~/mine"), "my.csv", "text") == Path.home() / "mine" / "text.jsonl"


SLOW = "import time\ndef slow(caption):\n    time.sleep(0.05)\n    return caption.upper()\n"


def test_a_killed_process_continues(tmp_path: Path) -> None:
    (tmp_path / "slow_filters.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    out = tmp_path / "out"
    words = ["prepare", "text", "scenes/park/small", "--filter", "slow_filters:slow", "--out", str(out), "--json"]
    command = [sys.executable, "-m", "hnclip", *words, "--split", "validation"]
    for lines in (5, 30):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            deadline = time.monotonic() + 60
            while not (out / "text.jsonl").exists() or (out / "text.jsonl").read_bytes().count(b"\n") < lines:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
    done = len(read_manifest(out / "text.jsonl", "text").entries)
    found = json.loads(subprocess.run([*command, "--workers", "8"], env=environment, capture_output=True).stdout)
    assert (found["kept"], found["made"]) == (done, found["records"] - done)
    assert done >= 29
    assert len((out / "text.jsonl").read_bytes().splitlines()) == 1 + found["records"]  # nothing was made twice
