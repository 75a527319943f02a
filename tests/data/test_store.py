from __future__ import annotations

import errno
import io
import os
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hnclip.data.store import Entry, MappedPixels, open_store
from hypothesis import given
from hypothesis import strategies as st

from hnclip.data import store as store_module

SIZE = 4
ROW = 3 * SIZE * SIZE


def entries(number: int, start: int = 0) -> list[Entry]:
    """Pictures that know their number."""
    return [
        Entry(f"name {n}".encode(), f"content {n}".encode(), torch.full((3, SIZE, SIZE), n % 256, dtype=torch.uint8))
        for n in range(start, start + number)
    ]


def fill(directory: Path, number: int, start: int = 0) -> dict[bytes, int]:
    with open_store(directory, SIZE) as store:
        return store.add(entries(number, start))


def shown(directory: Path, number: int) -> dict[int, int]:
    """Which of the pictures are in the store, and what they show."""
    names = [entry.name for entry in entries(number)]
    with open_store(directory, SIZE) as store:
        rows = store.rows(names)
        known = [n for n in range(number) if names[n] in rows]
        pixels = store.mapped([rows[names[n]] for n in known])[:]
    return {n: int(picture.unique()) for n, picture in zip(known, pixels)}


def same(number: int) -> dict[int, int]:
    return {n: n for n in range(number)}


# --- mapped pixels ---

PICTURES = np.random.default_rng(0).integers(0, 256, (6, 3, SIZE, SIZE), dtype=np.uint8)
ROWS = [4, 0, 5, 5, 1]  # not in the file's order, one twice, two never


@pytest.fixture(scope="module")
def mapped(tmp_path_factory) -> MappedPixels:
    path = tmp_path_factory.mktemp("mapped") / "pixels.u8"
    path.write_bytes(PICTURES.tobytes())
    with path.open("rb") as file:
        return MappedPixels(file, ROWS, SIZE)


TWIN = torch.from_numpy(PICTURES[ROWS])
INDEX = st.integers(-len(ROWS), len(ROWS) - 1)


@given(chosen=st.lists(INDEX, max_size=12))
def test_a_list_or_a_tensor_of_indices_is_that_of_a_tensor(mapped, chosen):
    expected = TWIN[torch.tensor(chosen, dtype=torch.int64)]
    for index in (chosen, tuple(chosen), torch.tensor(chosen, dtype=torch.int64), torch.tensor(chosen).int()):
        found = mapped[index]
        assert found.shape == expected.shape
        assert torch.equal(found, expected)


@given(chosen=st.slices(len(ROWS)).filter(lambda part: part.step is None or part.step > 0))
def test_a_slice_is_that_of_a_tensor(mapped, chosen):
    assert torch.equal(mapped[chosen], TWIN[chosen])


def test_it_has_the_length_and_shape_of_a_tensor(mapped):
    assert len(mapped) == len(TWIN)
    assert mapped.shape == TWIN.shape
    assert mapped[:].dtype == torch.uint8


def test_what_it_gives_can_be_written_to_without_harm(mapped):
    for chosen in (slice(0, 2), [0, 1]):
        mapped[chosen].zero_()
        assert torch.equal(mapped[chosen], TWIN[:2])


@pytest.mark.parametrize(
    "chosen",
    [
        [5],
        [-6],
        torch.tensor([0, 9]),
        torch.tensor([True, False, True, False, True]),
        [0.0],
        torch.tensor(1),
        [[0, 1]],
        2,
    ],
)
def test_other_indices_are_refused(mapped, chosen):
    with pytest.raises(IndexError):
        mapped[chosen]


# --- taking in ---


def test_rows_follow_each_other_and_survive_closing(tmp_path):
    assert fill(tmp_path / "store", 3) == {b"name 0": 0, b"name 1": 1, b"name 2": 2}
    assert fill(tmp_path / "store", 2, start=3) == {b"name 3": 3, b"name 4": 4}
    assert shown(tmp_path / "store", 6) == same(5)
    assert (tmp_path / "store" / "pixels.u8").stat().st_size == 5 * ROW


def test_content_that_is_there_gets_no_second_row_and_unknown_content_no_name(tmp_path):
    fill(tmp_path / "store", 2)
    (other,) = entries(1, start=2)
    with open_store(tmp_path / "store", SIZE) as store:
        named = store.add(
            [
                Entry(b"again", b"content 1", other.pixels),
                Entry(b"known", b"content 0", None),
                Entry(b"unknown", b"content 9", None),
                other,
                Entry(b"twice", other.content, other.pixels),
            ]
        )
        assert named == {b"again": 1, b"known": 0, b"name 2": 2, b"twice": 2}
        assert store.rows([b"unknown", *named]) == named
        assert store.contents() == {b"content 0", b"content 1", b"content 2"}
    assert shown(tmp_path / "store", 3) == same(3)


def test_many_names_are_asked_for_at_once(tmp_path):
    with open_store(tmp_path / "store", SIZE) as store:
        named = store.add(entries(1200))
        assert store.rows([b"nobody", *named]) == named
        assert len(named) == 1200


def test_a_disk_may_take_the_bytes_piece_by_piece(tmp_path, monkeypatch):
    class Small(io.FileIO):
        def write(self, content):
            return super().write(content[:7])

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_open_pixels", lambda file: Small(file, "w+"))
        fill(tmp_path / "store", 3)
    assert shown(tmp_path / "store", 3) == same(3)


def test_an_error_in_the_midst_takes_nothing_in(tmp_path, monkeypatch):
    fill(tmp_path / "store", 2)

    def interrupted(handle):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_module.os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fill(tmp_path / "store", 3, start=2)
    assert shown(tmp_path / "store", 5) == same(2)
    fill(tmp_path / "store", 3, start=2)
    assert shown(tmp_path / "store", 5) == same(5)


# --- damage ---


@pytest.mark.parametrize("left", [2 * ROW, 2 * ROW + 7, 0, None])
def test_rows_that_a_short_file_lost_are_forgotten(tmp_path, left):
    fill(tmp_path / "store", 5)
    pixels = tmp_path / "store" / "pixels.u8"
    if left is None:
        pixels.unlink()
    else:
        os.truncate(pixels, left)
    whole = (left or 0) // ROW
    assert shown(tmp_path / "store", 5) == same(whole)
    with open_store(tmp_path / "store", SIZE) as store:
        assert len(store.contents()) == whole
    fill(tmp_path / "store", 5)
    assert shown(tmp_path / "store", 5) == same(5)


def spoil(index: Path, how: str) -> None:
    content = index.read_bytes()
    if how == "gone":
        index.unlink()
    else:
        index.write_bytes({"text": b"text " * 4000, "cut": content[: len(content) // 2], "empty": b""}[how])


@pytest.mark.parametrize("how", ["text", "cut", "empty", "gone"])
def test_a_damaged_index_is_given_up_and_pictures_in_use_stay_as_they_are(tmp_path, how):
    rows = fill(tmp_path / "store", 60)
    with open_store(tmp_path / "store", SIZE) as store:
        used = store.mapped(list(rows.values()))
    spoil(tmp_path / "store" / "index.sqlite", how)
    assert shown(tmp_path / "store", 60) == {}
    assert sum(file.stat().st_size for file in tmp_path.rglob("pixels.u8")) == 0
    fill(tmp_path / "store", 10, start=50)
    assert shown(tmp_path / "store", 60) == {n: n for n in range(50, 60)}
    assert used[:].flatten(1).float().mean(1).tolist() == list(range(60))


# --- disks ---


def test_too_little_room_is_said_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000 * ROW))
    with open_store(tmp_path / "store", SIZE) as store:
        store.require_room(1000)
        with pytest.raises(OSError, match=rf"{tmp_path}.*48,048 bytes are needed, 48,000 bytes are free") as caught:
            store.require_room(1001)
    assert caught.value.errno == errno.ENOSPC
    assert "--read.cache or HNCLIP_CACHE" in str(caught.value)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_is_said_and_what_was_there_stays(tmp_path, monkeypatch, code):
    fill(tmp_path / "store", 4)

    class Full(io.FileIO):
        room = 20

        def write(self, content):
            if not self.room:
                raise OSError(code, os.strerror(code))
            self.room = 0
            return super().write(content[:20])

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_open_pixels", lambda file: Full(file, "r+"))
        with pytest.raises(OSError, match=rf"no room.*{tmp_path}.*96 bytes are needed.*--read.cache") as caught:
            fill(tmp_path / "store", 2, start=4)
    assert caught.value.errno == errno.ENOSPC
    assert shown(tmp_path / "store", 6) == same(4)
    fill(tmp_path / "store", 2, start=4)
    assert shown(tmp_path / "store", 6) == same(6)


def connecting(monkeypatch, pragma: str) -> None:
    connect = sqlite3.connect

    def with_pragma(*args, **kwargs):
        index = connect(*args, **kwargs)
        index.execute(pragma)
        return index

    monkeypatch.setattr(sqlite3, "connect", with_pragma)


def test_an_index_damaged_while_it_is_in_use_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    fill(tmp_path / "store", 3000)
    connecting(monkeypatch, "PRAGMA cache_size = 1")  # else SQLite remembers what the file said before
    with open_store(tmp_path / "store", SIZE) as store:
        index = tmp_path / "store" / "index.sqlite"
        index.write_bytes(index.read_bytes()[:4096] + bytes(index.stat().st_size - 4096))
        with pytest.raises(
            OSError, match=r"malformed.*mend or remove it, or choose another directory with --read.cache"
        ):
            store.rows([f"name {n}".encode() for n in range(3000)])


def test_a_disk_that_is_too_full_for_the_index_is_said(tmp_path, monkeypatch):
    fill(tmp_path / "store", 1)
    connecting(monkeypatch, "PRAGMA max_page_count = 5")
    with pytest.raises(OSError, match="no room for the picture cache") as caught:
        fill(tmp_path / "store", 1000)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert shown(tmp_path / "store", 9) == same(1)


def test_a_store_that_cannot_be_written_can_be_read(tmp_path, monkeypatch):
    fill(tmp_path / "store", 3)

    def forbidden(path):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "touch", forbidden)
    connecting(monkeypatch, "PRAGMA query_only = ON")
    assert shown(tmp_path / "store", 5) == same(3)
    with pytest.raises(OSError, match=rf"{tmp_path}.*readonly database.*choose another directory with --read.cache"):
        fill(tmp_path / "store", 1, start=3)
    with (
        open_store(tmp_path / "store", SIZE) as store,
        pytest.raises(OSError, match=rf"{tmp_path}.*Read-only file system.*choose another directory with --read.cache"),
    ):
        store.require_room(1)


def test_a_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(OSError, match=rf"{tmp_path}.*cannot be used.*choose another directory with --read.cache"),
        open_store(tmp_path / "file" / "store", SIZE),
    ):
        pass


def test_a_writer_that_never_ends_is_not_waited_for_without_end(tmp_path, monkeypatch):
    fill(tmp_path / "store", 2)
    other = sqlite3.connect(tmp_path / "store" / "index.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(store_module, "PATIENCE", 0.05)
    assert shown(tmp_path / "store", 2) == same(2)
    with pytest.raises(OSError, match="database is locked"):
        fill(tmp_path / "store", 1, start=2)
    other.close()
    fill(tmp_path / "store", 1, start=2)
    assert shown(tmp_path / "store", 3) == same(3)
