"""The index on disk: commits, readers beside a writer, SIGKILL at any moment, damage, full disks, two writers."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import store_helpers
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import State, about, change_to, check_state, random_state, unit_vector

from hnclip.search import reader as reader_module
from hnclip.search import writer as writer_module
from hnclip.search.database import KINDS, is_index
from hnclip.search.reader import IndexReader
from hnclip.search.writer import Change, NewImage, open_writer
from hnclip.util.files import Busy

SECONDS = 60
REBUILD = re.escape("hnclip index d --model m --out ") + ".*--replace"


def write(path: Path, *states: State) -> Path:
    with open_writer(path, about()) as writer:
        for state in states:
            writer.commit(change_to(writer, state))
        writer.delete_unused()
        writer.publish()
    return path


@contextmanager
def writing(path: Path, log: Path, seed: int, kill_at: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes states, and does not outlive the test."""
    command = [sys.executable, store_helpers.__file__, str(path), str(log), str(seed), str(kill_at)]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait(SECONDS)


def possible_states(log: Path, before: State) -> list[State]:
    """What the index may show by what its writer said: the last state that was done, and the one that was begun."""
    states = [before]
    for line in log.read_text().splitlines(keepends=True) if log.exists() else []:
        if line.endswith("\n"):  # else the writer was killed while it wrote the log
            what, found = json.loads(line)
            state = {name: (number, tuple(texts)) for name, (number, texts) in found.items()}
            states = [state] if what == "done" else [states[0], state]
    return states


def shown_state(reader: IndexReader) -> State:
    numbers = {store_helpers.image_hash(number): number for number in range(25)}
    return {file.name: (numbers[file.hash], file.captions) for file in reader.all_files()}


def check_after_kill(path: Path, log: Path, turn: int, before: State) -> State:
    """The index shows what was done, or what was begun after it; and the next writer goes on. Its state."""
    if path.exists() and any(path.glob("index-*.db")):
        with IndexReader(path) as reader:
            state = shown_state(reader)
            assert state in possible_states(log, before)
            check_state(reader, state)
    with open_writer(path, about(), replace=True) as writer:  # a new database, or an interrupted one of this model
        state = random_state(np.random.default_rng(turn))
        writer.verify()
        writer.commit(change_to(writer, state))
        writer.delete_unused()
        writer.publish()
    with IndexReader(path) as reader:
        check_state(reader, state)
    own = {"lock", "command.txt"} | {name for rows in reader.files.values() for name in (rows.name, rows.ids_name)}
    assert {file.name for file in path.iterdir()} == own | {reader.database_file.name}
    return state


@pytest.mark.parametrize("first", range(0, 320, 40))
def test_sigkill_before_any_operation_on_the_disk(first: int, tmp_path: Path) -> None:
    for kill_at in range(first + 1, first + 41, 8):  # 40 moments in all
        path, log = tmp_path / f"{kill_at}.hnc", tmp_path / f"{kill_at}.log"
        with writing(path, log, seed=kill_at, kill_at=kill_at) as process:
            assert process.wait(SECONDS) == -9
        check_after_kill(path, log, kill_at, {})


def test_sigkill_at_random_moments_with_a_reader_beside_it(tmp_path: Path) -> None:
    path, log = tmp_path / "x.hnc", tmp_path / "log"
    random, state = np.random.default_rng(0), State()
    for turn in range(8):
        with writing(path, log, seed=turn) as process:
            end, reads = time.monotonic() + SECONDS, 0
            while reads < int(random.integers(3, 12)):
                assert process.poll() is None
                assert time.monotonic() < end
                if not any(path.glob("index-*.db")) or not log.exists():
                    continue
                with IndexReader(path) as reader:
                    rows = {kind: reader.vectors[kind].copy() for kind in KINDS}
                    shown_state(reader)  # every file has its image, whatever is committed meanwhile
                    ids = reader.ids["images"].tolist()
                    for image, files in reader.files_of(ids).items():
                        vector = rows["images"][ids.index(image)]
                        number = files[0].width - 1
                        assert np.array_equal(vector, unit_vector(number).astype(np.float16))
                    assert all(np.array_equal(reader.vectors[kind], rows[kind]) for kind in KINDS)
                reads += 1
            process.kill()
            process.wait(SECONDS)
        state = check_after_kill(path, log, turn, state)
        log.unlink()


@settings(max_examples=12)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.booleans())
def test_any_sequence_of_changes_is_read_as_written(seeds: list[int], compacted: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        path, state = Path(place) / "x.hnc", State()
        for seed in seeds:
            with open_writer(path, about()) as writer:
                state = random_state(np.random.default_rng(seed))
                writer.commit(change_to(writer, state))
                writer.delete_unused()
                if compacted:
                    writer.compact(least=1)
                writer.publish()
                writer.verify()
            with IndexReader(path) as reader:
                check_state(reader, state)


def test_a_reader_goes_on_while_the_index_is_compacted_and_replaced(tmp_path: Path) -> None:
    first: State = {f"{number}.jpg": (number, (f"caption {number}",)) for number in range(20)}
    path = write(tmp_path / "x.hnc", first)
    with IndexReader(path) as old:
        vectors = {kind: old.vectors[kind].copy() for kind in KINDS}
        assert not old.changed()
        kept = {name: shown for name, shown in first.items() if shown[0] % 3 == 0}
        with open_writer(path, about()) as writer:
            writer.commit(change_to(writer, kept))
            writer.delete_unused()
            assert writer.compact(least=3)
            writer.publish()
        assert old.changed()
        assert all(np.array_equal(old.vectors[kind], vectors[kind]) for kind in KINDS)
        check = old.files_of(old.ids["images"].tolist())  # deleted images are not found, the others are the same
        assert {file.name for files in check.values() for file in files} == set(kept)
        with IndexReader(path) as reader:
            check_state(reader, kept)
            assert len(reader.ids["images"]) == len(kept)
        with open_writer(path, about(fingerprint="another"), replace=True) as writer:
            writer.commit(change_to(writer, {"other.jpg": (3, ())}))
            with IndexReader(path) as reader:  # until the new one is published
                check_state(reader, kept)
            writer.publish()
        with IndexReader(path) as reader:
            check_state(reader, {"other.jpg": (3, ())})
        assert all(np.array_equal(old.vectors[kind], vectors[kind]) for kind in KINDS)


def test_an_interrupted_replacement_is_continued_if_it_is_of_the_same_model(tmp_path: Path) -> None:
    state: State = {"1.jpg": (1, ("one",))}
    path = write(tmp_path / "x.hnc", {"0.jpg": (0, ())})
    for fingerprint, known in (("a", set()), ("a", {"1.jpg"}), ("b", set())):
        with open_writer(path, about(fingerprint=fingerprint), replace=True) as writer:
            assert writer.known().keys() == known
            writer.commit(change_to(writer, state))
    with IndexReader(path) as reader:
        check_state(reader, {"0.jpg": (0, ())})


def test_a_second_writer_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.hnc"
    with open_writer(path, about()) as writer:
        for replace in (False, True):
            with pytest.raises(Busy, match="another process is writing"), open_writer(path, about(), replace=replace):
                pass
        writer.commit(change_to(writer, {"0.jpg": (0, ())}))
    with IndexReader(path) as reader:
        check_state(reader, {"0.jpg": (0, ())})


@pytest.mark.parametrize("where", ["vectors", "database"])
def test_a_full_disk_is_said_and_loses_nothing(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state: State = {f"{number}.jpg": (number, (f"caption {number}",)) for number in range(9)}
    path = write(tmp_path / "x.hnc", state)
    with open_writer(path, about()) as writer, monkeypatch.context() as patch:
        if where == "vectors":

            def full(file: Path, start: int, content: bytes) -> None:
                os.truncate(file, start + len(content) // 2)
                raise OSError(errno.ENOSPC, "No space left on device", str(file))

            patch.setattr(writer_module, "append_bytes", full)
        else:
            writer._database.execute("PRAGMA max_page_count = 1")  # SQLite's error is that of a full disk
        with pytest.raises(OSError, match=r"is full.*is intact"):
            writer.commit(change_to(writer, {"new.jpg": (20, ("new " * 20_000,))}))
    with IndexReader(path) as reader:
        check_state(reader, state)
    write(path, {"new.jpg": (20, ("new",))})
    with IndexReader(path) as reader:
        check_state(reader, {"new.jpg": (20, ("new",))})


def damage_database(path: Path) -> None:
    file = path / "index-1.db"
    content = bytearray(file.read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    file.write_bytes(content)


def damage_meta(path: Path) -> None:
    with sqlite3.connect(path / "index-1.db") as database:
        database.execute("UPDATE meta SET value = '{}' WHERE key = 'images'")


DAMAGES = {
    "no database": lambda path: (path / "index-1.db").unlink(),
    "not a database": lambda path: (path / "index-1.db").write_bytes(b"something else" * 1000),
    "pages of zeros": damage_database,
    "meta": damage_meta,
    "vectors cut": lambda path: os.truncate(path / "images-1.f16", 100),
    "vectors gone": lambda path: (path / "captions-1.f16").unlink(),
    "ids gone": lambda path: (path / "images-1.ids").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_said_with_the_command_that_rebuilds_the_index(damage: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.hnc", {f"{number}.jpg": (number, (f"caption {number}",)) for number in range(20)})
    DAMAGES[damage](path)
    with pytest.raises(ValueError, match=rf"(?s)is damaged.*{REBUILD}"), IndexReader(path) as reader:
        list(reader.all_files())


@pytest.mark.parametrize("checked", [2**26, 0])
def test_a_bit_that_changed_is_noticed(checked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By readers of small files, by the next update in any."""
    monkeypatch.setattr(reader_module, "CHECKED", checked)
    path = write(tmp_path / "x.hnc", {f"{number}.jpg": (number, (f"caption {number}",)) for number in range(20)})
    for name in ("images-1.f16", "captions-1.f16", "images-1.ids"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
        with open_writer(path, about()) as writer, pytest.raises(ValueError, match=rf"(?s)checksum.*{REBUILD}"):
            writer.verify()
        if checked:
            with pytest.raises(ValueError, match=rf"(?s)checksum.*{REBUILD}"):
                IndexReader(path)
        else:
            IndexReader(path).close()
        (path / name).write_bytes(content)
    with open_writer(path, about()) as writer:
        writer.verify()


def test_what_is_not_an_index_of_this_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hnc", {"0.jpg": (0, ())})
    assert is_index(path)
    with sqlite3.connect(path / "index-1.db") as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match=rf"(?s)format 99.*{REBUILD}"):
        IndexReader(path)
    (tmp_path / "old.hnc").mkdir()
    (tmp_path / "old.hnc/index.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes.txt").write_text("mine")
    for name, message in (("old.hnc", "earlier version"), ("folder", "not an index"), ("none", "does not exist")):
        assert not is_index(tmp_path / name)
        with pytest.raises(ValueError, match=message):
            IndexReader(tmp_path / name)
    for name, message in (("old.hnc", "earlier version"), ("folder", "holds other files")):
        with pytest.raises(ValueError, match=message), open_writer(tmp_path / name, about(), replace=True):
            pass
    assert (tmp_path / "folder/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, 3.0])
def test_vectors_that_are_not_of_length_one_are_refused(bad: float, tmp_path: Path) -> None:
    state: State = {"0.jpg": (0, ())}
    path = write(tmp_path / "x.hnc", state)
    with open_writer(path, about()) as writer:
        image = NewImage(store_helpers.image_hash(9), bad * unit_vector(9), (1, 1), b"")
        with pytest.raises(ValueError, match="not of length 1"):
            writer.commit(Change(images=[image]))
    with IndexReader(path) as reader:
        check_state(reader, state)


def test_an_index_is_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    state: State = {"0.jpg": (0, ("a caption",))}
    path = write(tmp_path / "x.hnc", state)
    copy = tmp_path / "copy.hnc"
    shutil.copytree(path, copy)
    for file in copy.iterdir():
        file.chmod(0o444)
    copy.chmod(0o555)
    try:
        with IndexReader(copy) as reader:
            check_state(reader, state)
            assert not reader.changed()
    finally:
        copy.chmod(0o755)
