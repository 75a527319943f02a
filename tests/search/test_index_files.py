"""The index on disk: commits, readers during writes, SIGKILL at any moment, damage, full disks, two writers."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_helpers
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import (
    State,
    about,
    all_files,
    check_state,
    commit_state,
    random_state,
    show_state,
    unit_vector,
    vectors_of,
)

from hnclip.search import reader as reader_module
from hnclip.search import writer as writer_module
from hnclip.search.database import KINDS, is_index, published_database
from hnclip.search.reader import IndexReader
from hnclip.search.writer import open_writer
from hnclip.util.files import Busy


def write(path: Path, state: State, *, compact: bool = False, replace: bool = False) -> Path:
    with open_writer(path, about(), replace=replace) as writer:
        writer.verify()
        show_state(writer, state)
        if compact:
            writer.compact(least=1)
        writer.publish()
    return path


def possible_states(log: Path) -> list[State]:
    """What the index may hold by the log of its writer: the last state that was done, or the one that was begun, before
    or after its files were deleted."""
    states = [State()]
    for line in log.read_text().splitlines(keepends=True) if log.exists() else []:
        if line.endswith("\n"):  # otherwise the writer was killed while it wrote the log
            what, found = json.loads(line)
            state = {name: (number, tuple(texts)) for name, (number, texts) in found.items()}
            states = [state] if what == "done" else [states[0], states[0] | state, state]
    return states


def check_after_kill(path: Path, log: Path, seed: int) -> None:
    """The index holds what was done, or what was begun after it, and the next writer continues."""
    numbers = {store_helpers.image_hash(number): number for number in range(25)}
    if published_database(path):
        with IndexReader(path) as reader:
            state = {file.name: (numbers[file.hash], file.captions) for file in all_files(reader)}
            assert state in possible_states(log)
            check_state(reader, state)
    state = random_state(np.random.default_rng(seed))
    write(path, state, replace=True)  # a new database, or an interrupted one of this model
    with IndexReader(path) as reader:
        check_state(reader, state)
    own = {"lock", "command.txt", reader.database_file.name} | {rows.name for rows in reader.files.values()}
    assert {file.name for file in path.iterdir()} == own


@pytest.mark.parametrize("first", range(0, 320, 40))
def test_sigkill_before_any_operation_on_the_disk(first: int, tmp_path: Path) -> None:
    for kill_at in range(first + 1, first + 41, 8):  # 40 moments in all
        path, log = tmp_path / f"{kill_at}.hnc", tmp_path / f"{kill_at}.log"
        command = [sys.executable, store_helpers.__file__, str(path), str(log), str(kill_at), str(kill_at)]
        assert subprocess.run(command).returncode == -signal.SIGKILL
        check_after_kill(path, log, kill_at)


def test_sigkill_at_any_moment_while_readers_open_the_index(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for turn in range(8):
        path, log = tmp_path / f"{turn}.hnc", tmp_path / f"{turn}.log"
        command = [sys.executable, store_helpers.__file__, str(path), str(log), str(turn), "0"]
        with subprocess.Popen(command) as process:
            try:
                reads = int(random.integers(3, 12))
                while reads and process.poll() is None:
                    if not published_database(path) or not log.exists():
                        continue
                    with IndexReader(path) as reader:
                        vectors = vectors_of(reader, "images")
                        for file in all_files(reader):  # of a later state, if there was a commit since
                            assert np.array_equal(vectors[file.image], unit_vector(file.width - 1).astype(np.float16))
                    reads -= 1
            finally:
                process.kill()
        assert reads == 0
        check_after_kill(path, log, turn)


@settings(max_examples=12)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.booleans())
def test_any_sequence_of_changes_is_read_as_written(seeds: list[int], compacted: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        for seed in seeds:
            state = random_state(np.random.default_rng(seed))
            path = write(Path(place) / "x.hnc", state, compact=compacted)
            with IndexReader(path) as reader:
                check_state(reader, state)


def test_a_reader_keeps_its_state_while_the_index_is_compacted_and_replaced(tmp_path: Path) -> None:
    first: State = {f"{number}.jpg": (number, (f"caption {number}",)) for number in range(20)}
    path = write(tmp_path / "x.hnc", first)
    with IndexReader(path) as old:
        vectors = {kind: old.vectors[kind].copy() for kind in KINDS}
        assert not old.changed()
        kept = {name: shown for name, shown in first.items() if shown[0] % 3 == 0}
        with open_writer(path, about()) as writer:
            show_state(writer, kept)
            assert writer.compact(least=3)
            writer.publish()
        assert old.changed()
        assert {file.name for file in all_files(old)} == set(kept)  # deleted images are not found any more
        with open_writer(path, about(fingerprint="another"), replace=True) as writer:
            show_state(writer, {"other.jpg": (3, ())})
            with IndexReader(path) as reader:  # until the new one is published
                check_state(reader, kept)
                assert len(reader.ids["images"]) == len(kept)
            writer.publish()
        with IndexReader(path) as reader:
            check_state(reader, {"other.jpg": (3, ())})
        assert all(np.array_equal(old.vectors[kind], vectors[kind]) for kind in KINDS)


def test_a_second_writer_is_refused_at_once(tmp_path: Path) -> None:
    with open_writer(tmp_path / "x.hnc", about()) as writer:
        for replace in (False, True):
            with pytest.raises(Busy, match="another process is writing"):
                write(tmp_path / "x.hnc", {}, replace=replace)
        commit_state(writer, {"0.jpg": (0, ())})
    with IndexReader(tmp_path / "x.hnc") as reader:
        check_state(reader, {"0.jpg": (0, ())})


def test_a_look_at_an_index_does_not_end_the_locks_of_its_writer(tmp_path: Path) -> None:
    """Otherwise SQLite in another process would delete the log that the writer goes on with."""
    read = "import sys; from hnclip.search.reader import IndexReader; IndexReader(sys.argv[1]).close()"
    path = tmp_path / "x.hnc"
    with open_writer(path, about()) as writer:
        commit_state(writer, {"0.jpg": (0, ())})
        assert is_index(path)
        assert published_database(path) == path / "index-1.db"
        subprocess.run([sys.executable, "-c", read, path], check=True)
        assert (path / "index-1.db-wal").exists()


def append_half(file: Path, start: int, content: bytes) -> None:
    os.truncate(file, start + len(content) // 2)
    raise OSError(errno.ENOSPC, "No space left on device", str(file))


@pytest.mark.parametrize("where", ["vectors", "database"])
def test_a_full_disk_is_reported_and_loses_nothing(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, connect = {f"{number}.jpg": (number, (f"caption {number}",)) for number in range(9)}, writer_module.connect
    path = write(tmp_path / "x.hnc", state)

    def connect_full(file: Path) -> sqlite3.Connection:
        database = connect(file)
        database.execute("PRAGMA max_page_count = 1")  # SQLite's error is that of a full disk
        return database

    with monkeypatch.context() as patch:
        name, full = ("append_bytes", append_half) if where == "vectors" else ("connect", connect_full)
        patch.setattr(writer_module, name, full)
        with pytest.raises(OSError, match=r"is full.*is intact"):
            write(path, {"new.jpg": (20, ("new " * 20_000,))})
    with IndexReader(path) as reader:
        check_state(reader, state)
    write(path, {"new.jpg": (20, ("new",))})
    with IndexReader(path) as reader:
        check_state(reader, {"new.jpg": (20, ("new",))})


def overwrite_meta(path: Path) -> None:
    with sqlite3.connect(path / "index-1.db") as database:
        database.execute("UPDATE meta SET value = '{}' WHERE key = 'images'")


def flip_bit(path: Path, name: str = "images-1.f16") -> None:
    content = bytearray((path / name).read_bytes())
    content[-40] ^= 1
    (path / name).write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "not a database": lambda path: (path / "index-1.db").write_bytes(b"something else" * 1000),
    "meta": overwrite_meta,
    "vectors cut": lambda path: os.truncate(path / "images-1.f16", 100),
    "vectors deleted": lambda path: (path / "captions-1.f16").unlink(),
    "a bit of an image": flip_bit,
    "a bit of a caption": lambda path: flip_bit(path, "captions-1.f16"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_with_the_command_that_rebuilds_the_index(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.hnc", {f"{number}.jpg": (number, (f"caption {number}",)) for number in range(20)})
    DAMAGES[damage](path)
    rebuild = re.escape("hnclip index d --model m --out ") + ".*--replace"
    with pytest.raises(ValueError, match=rf"(?s)is damaged.*{rebuild}"), IndexReader(path) as reader:
        all_files(reader)
    if "bit" in damage:  # readers verify files up to a size limit; an update verifies all
        with open_writer(path, about()) as writer, pytest.raises(ValueError, match="checksum"):
            writer.verify()
        monkeypatch.setattr(reader_module, "CHECKED", 0)
        IndexReader(path).close()


def test_other_formats_and_other_directories_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hnc", {"0.jpg": (0, ())})
    with closing(sqlite3.connect(path / "index-1.db")) as database:
        database.execute("PRAGMA user_version = 99")
    (tmp_path / "notes.txt").write_text("mine")
    for other, message in ((path, "format 99"), (tmp_path, "not an index"), (tmp_path / "none", "does not exist")):
        assert is_index(other) == (other == path)
        with pytest.raises(ValueError, match=message):
            IndexReader(other)
    with pytest.raises(ValueError, match="holds other files"), open_writer(tmp_path, about(), replace=True):
        pass
