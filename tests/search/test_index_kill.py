"""SIGKILL at any moment of writing, with real processes: what was committed is there, whole, and the next one goes on.

A child says what it is about to commit and when that is done; whatever the index shows afterwards must be the last
state that was done, or the one that was begun after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from index_helpers import Content, about, change_to, check_index, content_of
from index_writing import as_content

from hnclip.search.index.compact import compact
from hnclip.search.index.opening import open_writer
from hnclip.search.index.reader import Index

SECONDS = 60
SCRIPT = Path(__file__).with_name("index_writing.py")

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that do not outlive the test, however it ends."""
    processes = []

    def begin(way: str, *arguments: Any) -> subprocess.Popen[bytes]:
        given = [str(value) if isinstance(value, Path) else value for value in arguments]
        processes.append(subprocess.Popen([sys.executable, str(SCRIPT), way, json.dumps(given)]))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    assert process.poll() is None
    process.kill()
    process.wait(SECONDS)


def wait_for(file: Path, process: subprocess.Popen[bytes], word: str, count: int = 1) -> None:
    """Until the process has said a word so often."""
    end = time.monotonic() + SECONDS
    while not (file.exists() and file.read_text().count(word) >= count):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.001)


def possible(log: Path) -> list[Content]:
    """What the index may show now, by what the writer said; nothing if that was nothing."""
    states: list[Content] = []
    for line in log.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # else the kill hit the log
            kind, found = json.loads(line)
            states = [as_content(found)] if kind == "done" else [*states[:1], as_content(found)]
    return states


def check_shown(path: Path, states: list[Content]) -> Content:
    """Which of the states it is; everything about it is checked."""
    with Index(path) as index:
        contents = dict(index._ask("SELECT row, content FROM pictures"))
        found = {item.name: (contents[item.row], item.captions) for item in index.all_items()}
        for state in states:
            if found == {name: (content_of(number), captions) for name, (number, captions) in state.items()}:
                check_index(index, state)
                return state
    raise AssertionError(f"the index shows {found}, none of {states}")


def directories(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if entry.is_dir()]


def test_kills_at_random_moments(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "x.hnc"
    random = np.random.default_rng(0)
    content: Content = {}
    for turn in range(4):
        log = tmp_path / f"log-{turn}"
        process = start("write_on", path, log, content, turn)
        wait_for(log, process, "done", int(random.integers(1, 6)))
        time.sleep(float(random.uniform(0, 0.02)))
        kill(process)
        content = check_shown(path, possible(log))
    with open_writer(path, about()) as writer:
        assert len(directories(path)) == 1
        writer.commit(change_to(writer, content, {"last.jpg": (3, ("the end",))}))
    with Index(path) as index:
        check_index(index, {"last.jpg": (3, ("the end",))})


COMMIT = ["vectors are written", "a transaction is half done", "a transaction is all but committed"]
COMPACTION = [
    "rows are copied",
    "the new catalogue is half full",
    "the header is about to change",
    "the header has changed",
]


@pytest.mark.parametrize("moment", [*COMMIT, *COMPACTION])
def test_a_kill_at_the_worst_moment(moment: str, start: Start, tmp_path: Path) -> None:
    path, sign = tmp_path / "x.hnc", tmp_path / "sign"
    first: Content = {f"{number}.jpg": (number, (f"caption {number} " * 50,)) for number in range(24)}
    before: Content = {name: shown for name, shown in first.items() if shown[0] % 3}
    after: Content = {f"{number}.jpg": (number, (f"other caption {number} " * 50,)) for number in range(12, 40)}
    with open_writer(path, about()) as writer:
        writer.commit(change_to(writer, {}, first))
        writer.commit(change_to(writer, first, before))
    with Index(path) as old:
        process = start("stop_at", path, sign, before, after, moment)
        wait_for(sign, process, "here")
        with pytest.raises(ValueError, match="another process is writing"), open_writer(path, about()):
            pass
        if "transaction" in moment:
            kill(process)
            # The file is half of either version now: the first to read it has to undo that.
            assert (path / "000001/catalogue.sqlite-journal").stat().st_size > 4096
        else:
            check_index(old, before)
            kill(process)
        with Index(path) as index:
            assert index.generation == (2 if moment == "the header has changed" else 1)
            check_index(index, before)
        check_index(old, before)
        with open_writer(path, about()) as writer:
            writer.commit(change_to(writer, before, after))
            compact(writer)
            assert len(directories(path)) == 1
        with Index(path) as index:
            check_index(index, after)
        assert old.stale()
        check_index(old, before)


def test_readers_do_not_wait_for_a_long_transaction(tmp_path: Path) -> None:
    path = tmp_path / "x.hnc"
    with open_writer(path, about(patches=0)) as writer:
        database = writer._database
        database.execute("PRAGMA cache_size = 10")
        database.execute("BEGIN IMMEDIATE")
        database.executemany("INSERT INTO problems VALUES (?, '', ?, '')", ((str(n), "x" * 999) for n in range(500)))
        begun = time.monotonic()
        with Index(path) as index:
            assert index.problems() == []
        assert time.monotonic() - begun < 5
        database.execute("ROLLBACK")


def test_readers_keep_their_version_while_another_process_writes(start: Start, tmp_path: Path) -> None:
    path, log, seen, sign = (tmp_path / name for name in ("x.hnc", "log", "seen", "sign"))
    writer = start("write_on", path, log, {}, 1)
    wait_for(log, writer, "done")
    reader = start("read_on", path, seen, sign)
    wait_for(seen, reader, "kept", 8)
    sign.touch()
    assert reader.wait(SECONDS) == 0
    kill(writer)
    check_shown(path, possible(log))
