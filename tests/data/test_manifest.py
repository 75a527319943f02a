"""Manifests: continued after a kill, updated record by record, one writer, one file per source and kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hnclip.cli import main
from hnclip.core import Record, Region
from hnclip.data.image_sources import FileImage
from hnclip.data.manifest import KINDS, Kind, Manifest, apply_manifest, read_manifest, record_mark
from hnclip.data.manifest import write_manifest as open_manifest
from hnclip.data.scenes import scene_records

REGION = {"box": [1, 2, 30, 40], "sentence": "a tree", "score": 3.5}
TOOL = {"name": "test", "sizes": (1, 2)}


def writing(path: Path, kind: Kind = "text", tool: Any = TOOL, **options: Any) -> AbstractContextManager[Manifest]:
    return open_manifest(path, kind, by="a test", tool=tool, data="some", **options)


def write(path: Path, records: list[Record], kind: Kind = "text") -> None:
    with writing(path, kind) as manifest:
        for record in records:
            content = [REGION] if kind == "regions" else [f"short {record.id}"]
            manifest.append(record.id, record_mark(kind, record), content)


@pytest.fixture
def records() -> list[Record]:
    return scene_records("park", "train", families=3)


def test_records_get_what_was_prepared(tmp_path: Path, records: list[Record]) -> None:
    bare = [replace(record, regions=()) for record in records]
    write(tmp_path / "regions.jsonl", bare[1:], "regions")
    found, applied, changed = apply_manifest(bare, read_manifest(tmp_path / "regions.jsonl", "regions"))
    assert (found[0], applied, changed) == (bare[0], len(records) - 1, 0)
    assert found[1].regions == (Region((1, 2, 30, 40), "a tree", 3.5),)


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
    regions = read_manifest(tmp_path / "regions.jsonl", "regions")
    Image.new("RGB", (9, 9)).save(image)
    assert regions.current(record) is None
    assert read_manifest(tmp_path / "text.jsonl", "text").current(record) is not None


def test_another_tool_needs_permission_and_a_second_writer_is_refused(tmp_path: Path, records: list[Record]) -> None:
    path = tmp_path / "text.jsonl"
    write(path, records)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="--replace"), writing(path, tool={}):
        pass
    assert path.read_bytes() == before
    with writing(path, tool={}, overwrite=True) as manifest, pytest.raises(ValueError, match="another process"):
        write(path, [])
    assert not manifest.entries


def test_an_incomplete_line_is_cut_off_and_a_damaged_one_is_an_error(tmp_path: Path, records: list[Record]) -> None:
    path = tmp_path / "text.jsonl"
    write(path, records[:2])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "half')
    assert len(read_manifest(path, "text").entries) == 2
    with writing(path) as manifest:
        manifest.append(records[0].id, "mark", ["half a \ud83d pair, \u00e9"])
    assert path.read_bytes().startswith(whole + b'{"id": "park')
    assert read_manifest(path, "text").entries[records[0].id] == ("mark", ["half a \ud83d pair, \u00e9"])  # the later
    old = b'{"format": 0, "kind": "text", "by": "", "tool": {}}'
    for content, line in ((b"not JSON", 1), (old, 1), (whole + b'{"id": "a"}', 4)):
        path.write_bytes(content + b"\n")
        with pytest.raises(ValueError, match=f"line {line}"):
            read_manifest(path, "text")


FILTER = """
import os
from itertools import count
calls = count(1)

def upper(caption):
    if next(calls) == int(os.environ.get("KILL_AT", 0)):
        os.kill(os.getpid(), 9)
    return caption.upper()
"""


def test_a_killed_process_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "killing_filters.py").write_text(FILTER)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "out" / "text.jsonl"
    words = ["prepare", "text", "scenes/park/small", "--filter", "killing_filters:upper", "--split", "validation"]
    words += ["--read.prepared", str(path.parent), "--workers", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KILL_AT": "30"}
    killed = subprocess.run([sys.executable, "-m", "hnclip", *words], env=environment, check=False)
    done = len(read_manifest(path, "text").entries)
    assert killed.returncode == -9
    assert 20 <= done < 30  # the threads are at most 8 records ahead
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kept"], found["made"]) == (done, found["records"] - done)
    assert len(path.read_bytes().splitlines()) == 1 + found["records"]  # nothing was made twice
