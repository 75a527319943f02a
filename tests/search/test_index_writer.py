"""An index, version by version: what is written is read, and who has opened a version keeps it."""

from __future__ import annotations

import errno
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from index_helpers import (
    WIDTH,
    Content,
    about,
    change_to,
    check_index,
    commit_all,
    content_of,
    image_vector,
    living,
    new_item,
    new_picture,
    random_content,
    text_vector,
)

from hnclip.core import Problem
from hnclip.search.index import vectors as vector_code
from hnclip.search.index.catalogue import texts_hash
from hnclip.search.index.changes import Change, Known, NewPicture
from hnclip.search.index.compact import compact
from hnclip.search.index.layout import Storage
from hnclip.search.index.opening import open_writer
from hnclip.search.index.reader import Index

FIRST: Content = {"a.jpg": (1, ("one", "two")), "b.jpg": (2, ()), "copy of a.jpg": (1, ("two",))}


@pytest.mark.parametrize("storage", ["bf16", "int8"])
@pytest.mark.parametrize("patches", [0, 3])
def test_random_versions_are_read_as_written_and_kept_by_their_readers(
    storage: Storage, patches: int, tmp_path: Path
) -> None:
    random = np.random.default_rng(patches)
    path = tmp_path / "x.hnc"
    readers: list[tuple[Index, Content]] = []
    content: Content = {}
    with open_writer(path, about(storage=storage, patches=patches)) as writer:
        for turn in range(14):
            after = random_content(random, content)
            writer.commit(change_to(writer, content, after))
            content = after
            if turn % 5 == 4:
                compact(writer)
                assert writer.dead("images") == writer.dead("captions") == writer.ended()[0] == 0
            readers.append((Index(path), content))
            assert writer.living()[0] == len(content)
    assert len({index.generation for index, _ in readers}) == 3
    for index, expected in readers:
        with index:
            assert index.stale() == (index is not readers[-1][0])
            check_index(index, expected)


def test_an_empty_index(tmp_path: Path) -> None:
    with open_writer(tmp_path / "x.hnc", about()):
        pass
    with Index(tmp_path / "x.hnc") as index:
        check_index(index, {})
        assert index.tokens([]) is not None
        assert index.problems() == []
        assert index.item(1) is index.item(10**30) is index.item(-(10**30)) is None


def test_an_item_that_stays_keeps_its_id_and_no_id_comes_twice(tmp_path: Path) -> None:
    path = tmp_path / "x.hnc"
    versions: list[Content] = [FIRST, {**FIRST, "b.jpg": (3, ())}, {**FIRST, "b.jpg": (2, ())}]
    seen: dict[int, tuple[str, int]] = {}
    with open_writer(path, about()) as writer:
        before: Content = {}
        for number, content in enumerate([*versions, {"a.jpg": FIRST["a.jpg"]}, FIRST]):
            writer.commit(change_to(writer, before, content))
            before = content
            if number > 2:
                compact(writer)
            with Index(path) as index:
                ids = {item.name: item.id for item in index.all_items()}
            for name, item in ids.items():
                assert seen.setdefault(item, (name, content[name][0])) == (name, content[name][0])
            assert ids["a.jpg"] == 1
    assert len(seen) == 7  # a, its copy twice, b four times over


def test_content_that_comes_back_has_its_old_row(tmp_path: Path) -> None:
    path = tmp_path / "x.hnc"
    with open_writer(path, about()) as writer:
        commit_all(writer, FIRST, {"b.jpg": (2, ())})
        assert (writer.dead("images"), writer.dead("captions")) == (1, 2)
        with Index(path) as between:
            commit = change_to(writer, {"b.jpg": (2, ())}, {"b.jpg": (2, ()), "again.jpg": (1, ("two",))})
            assert not commit.pictures
            assert not commit.captions
            writer.commit(commit)
            # The reader was opened when these rows were dead; to it they still are.
            assert between.dead("images").tolist() == [0]
            check_index(between, {"b.jpg": (2, ())})
        assert (writer.dead("images"), writer.dead("captions"), writer.state.images) == (0, 1, 2)


def test_a_picture_without_an_item_is_not_found(tmp_path: Path) -> None:
    with open_writer(tmp_path / "x.hnc", about()) as writer:
        writer.commit(Change(pictures=[new_picture(7)], captions={"nobody says this": text_vector("nobody")}))
        commit_all(writer, FIRST)
    with Index(tmp_path / "x.hnc") as index:
        assert len(index.vectors("images")) == 3
        check_index(index, FIRST)


def test_the_next_run_learns_what_it_compares(tmp_path: Path) -> None:
    problems = [Problem("corrupt image", "c.jpg", "no picture"), Problem("missing image", "d.jpg", "gone")]
    with open_writer(tmp_path / "x.hnc", about()) as writer:
        commit_all(writer, {**FIRST, "e.jpg": (4, ())}, FIRST)
        writer.commit(Change(stamps={"b.jpg": "newer"}, problems=[(problem, "then") for problem in problems]))
    with open_writer(tmp_path / "x.hnc", about()) as writer:
        known = dict(writer.known())
        assert known["b.jpg"] == Known("newer", '{"file": "b.jpg"}', content_of(2), texts_hash(()))
        assert {name: found.captions for name, found in known.items()} == {
            name: texts_hash(captions) for name, (_, captions) in FIRST.items()
        }
        assert writer.contents() == {content_of(number) for number in (1, 2, 4)}
        assert writer.problems() == {problem.where: (problem, "then") for problem in problems}
        writer.commit(Change(solved=["c.jpg"], problems=[(replace(problems[1], detail="still"), "now")]))
        assert writer.problems() == {"d.jpg": (replace(problems[1], detail="still"), "now")}
    with Index(tmp_path / "x.hnc") as index:
        assert [problem.detail for problem in index.problems()] == ["still"]


def test_captions_of_other_order_are_other_captions() -> None:
    assert len({texts_hash(some) for some in ((), ("",), ("a", "b"), ("b", "a"), ("ab",), ("a",))}) == 6


def test_a_reader_learns_that_the_folder_has_moved(tmp_path: Path) -> None:
    path = tmp_path / "x.hnc"
    with open_writer(path, about()) as writer:
        commit_all(writer, FIRST)
        with Index(path) as index:
            assert not index.stale()
            writer.set_about(replace(writer.about, root="/elsewhere"))
            assert index.stale()
            assert index.root is None
    with Index(path) as index:
        assert index.root == Path("/elsewhere")
        check_index(index, FIRST)


def test_only_one_writes(tmp_path: Path) -> None:
    with (
        open_writer(tmp_path / "x.hnc", about()),
        pytest.raises(ValueError, match="another process is writing"),
        open_writer(tmp_path / "x.hnc", about()),
    ):
        pass
    with open_writer(tmp_path / "x.hnc", about()):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Change(items=[new_item("x.jpg", (9, ()))]), "x.jpg: its picture or a caption of it has no vector"),
        (Change(items=[new_item("x.jpg", (1, ("nobody says this",)))]), "has no vector"),
        (Change(pictures=[replace(new_picture(9), vector=np.full(WIDTH, np.nan))]), "must be finite"),
        (Change(pictures=[replace(new_picture(9), vector=np.ones(WIDTH + 1))]), f"must be {WIDTH} numbers"),
        (
            Change(
                pictures=[new_picture(8), replace(new_picture(9), vector=1.02 * image_vector(9))],
                items=[new_item("long.jpg", (9, ())), new_item("copy.jpg", (9, ()))],
            ),
            r"the vector of 'long\.jpg' must be finite and of length 1, its length is 1\.02",
        ),
        (Change(captions={"short": text_vector("short"), "long": 9 * text_vector("long")}), "the vector of 'long'"),
        (Change(pictures=[replace(new_picture(9), tokens=None)]), "every picture needs 3 patch vectors"),
        (Change(pictures=[new_picture(8), replace(new_picture(9), tokens=np.ones((2, WIDTH)))]), "patch vectors"),
    ],
)
def test_a_change_that_cannot_be_made_changes_nothing(change: Change, message: str, tmp_path: Path) -> None:
    with open_writer(tmp_path / "x.hnc", about()) as writer:
        commit_all(writer, FIRST)
        before = writer.state
        with pytest.raises(ValueError, match=message):
            writer.commit(replace(change, gone=["a.jpg"]))
        assert writer.state == before
        with Index(tmp_path / "x.hnc") as index:
            check_index(index, FIRST)
        writer.commit(change_to(writer, FIRST, {"b.jpg": (5, ("new",))}))
    with Index(tmp_path / "x.hnc") as index:
        check_index(index, {"b.jpg": (5, ("new",))})


@pytest.mark.parametrize("where", ["vectors", "catalogue"])
def test_a_full_disk_loses_nothing(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.hnc"
    after = {f"{number}.jpg": (number, (f"caption {number} " * 200,)) for number in range(40)}
    with open_writer(path, about()) as writer:
        commit_all(writer, FIRST)
        with monkeypatch.context() as patch:
            if where == "vectors":
                patch.setattr(vector_code.os, "fsync", _full)
            else:
                writer._database.execute(f"PRAGMA max_page_count = {pages(writer._database) + 3}")
            with pytest.raises(OSError, match=r"no room for .*x\.hnc: make some, then the same command goes on"):
                writer.commit(change_to(writer, FIRST, after))
        with Index(path) as index:
            check_index(index, FIRST)
        writer._database.execute("PRAGMA max_page_count = 100000")
        writer.commit(change_to(writer, FIRST, after))
    with Index(path) as index:
        check_index(index, after)


def pages(database: sqlite3.Connection) -> int:
    return database.execute("PRAGMA page_count").fetchone()[0]


def _full(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_thumbnails_of_no_bytes_and_rows_asked_for_in_any_order(tmp_path: Path) -> None:
    with open_writer(tmp_path / "x.hnc", about()) as writer:
        pictures = [replace(new_picture(number), thumbnail=b"x" * size) for number, size in enumerate((0, 3, 0, 2))]
        items = [new_item(f"{number}", (number, (f"caption {number % 2}",))) for number in range(4)]
        captions = {text: text_vector(text) for text in ("caption 0", "caption 1")}
        writer.commit(Change(pictures=pictures[:2], items=items[:2], captions=captions))
        writer.commit(Change(pictures=pictures[2:], items=items[2:]))
        compact(writer)
    with Index(tmp_path / "x.hnc") as index:
        assert [index.thumbnail(row) for row in (3, 2, 1, 0)] == [b"xx", b"", b"xxx", b""]
        assert [some[0].name for some in index.items([3, 0, 1]).values()] == ["0", "1", "3"]
        assert index.items([4, 77]) == index.captions([9]) == {}
        assert {row: [item.name for item in found.items] for row, found in index.captions([1, 0]).items()} == {
            0: ["0", "2"],
            1: ["1", "3"],
        }
        assert living(index, "images") == {0, 1, 2, 3}
        with pytest.raises(ValueError, match="has no picture in row 9"):
            index.thumbnail(9)


def test_many_items_are_asked_for_in_parts(tmp_path: Path) -> None:
    content = {f"{number}.jpg": (number, (f"caption {number}",)) for number in range(1203)}
    with open_writer(tmp_path / "x.hnc", about(patches=0)) as writer:
        commit_all(writer, content)
    with Index(tmp_path / "x.hnc") as index:
        assert len(index.items(range(1203))) == len(index.captions(range(1203))) == index.count() == 1203
        assert [item.id for item in index.all_items()] == list(range(1, 1204))


def test_new_pictures_of_the_same_content_are_one(tmp_path: Path) -> None:
    twice: list[NewPicture] = [new_picture(1), new_picture(1)]
    with open_writer(tmp_path / "x.hnc", about()) as writer:
        writer.commit(Change(pictures=twice, items=[new_item("a", (1, ())), new_item("b", (1, ()))]))
        writer.commit(Change(pictures=twice, items=[new_item("c", (1, ()))]))
        assert writer.state.images == 1
    with Index(tmp_path / "x.hnc") as index:
        check_index(index, dict.fromkeys("abc", (1, ())))
