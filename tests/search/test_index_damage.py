"""What is no index, or a damaged one: clear words, nothing removed that is not an index's own, and mending."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from index_helpers import Content, about, change_to, check_index, commit_all

from hnclip.search.index import reader as reader_code
from hnclip.search.index import writer as writer_code
from hnclip.search.index.compact import compact
from hnclip.search.index.layout import HEADER, About, write_header
from hnclip.search.index.opening import open_writer
from hnclip.search.index.reader import Index
from hnclip.search.index.writer import IndexWriter

CONTENT: Content = {f"{number}.jpg": (number, (f"caption {number}",)) for number in range(9)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "x.hnc"
    with open_writer(place, about()) as writer:
        commit_all(writer, CONTENT)
    return place


def opens(place: Path) -> Callable[[], object]:
    return lambda: Index(place)


def writes(place: Path) -> Callable[[], object]:
    return lambda: open_writer(place, about()).__enter__()


def text_file(place: Path) -> None:
    place.write_text("no index")


def directory(place: Path) -> None:
    place.mkdir()
    (place / "holiday.jpg").write_bytes(b"precious")
    (place / "000001").mkdir()


NO_INDEX = {
    "nothing": (lambda place: None, "does not exist: make it with hnclip index FOLDER --out", None),
    "a text file": (text_file, "is no index of hnclip, it has no index.json", "choose another --out"),
    "an empty directory": (Path.mkdir, "is no index of hnclip, it has no index.json", None),
    "a directory with other things": (directory, "is no index of hnclip", "holds other things than an index"),
}


@pytest.mark.parametrize("what", NO_INDEX)
def test_what_is_no_index(what: str, tmp_path: Path) -> None:
    make, reading, writing = NO_INDEX[what]
    place = tmp_path / "thing"
    make(place)
    with pytest.raises(ValueError, match=reading):
        Index(place)
    if writing is None:
        with open_writer(place, about()):
            pass
        Index(place).close()
    else:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ValueError, match=writing), open_writer(place, about()):
            pass
        assert sorted(tmp_path.rglob("*")) == before


def header(text: str) -> Callable[[Path], object]:
    return lambda place: (place / HEADER).write_text(text)


def cut_catalogue(size: int) -> Callable[[Path], object]:
    def cut(place: Path) -> None:
        file = place / "000001/catalogue.sqlite"
        file.write_bytes(file.read_bytes()[:size])

    return cut


def garbage(place: Path) -> None:
    (place / "000001/catalogue.sqlite").write_bytes(b"garbage " * 5000)


def no_about(place: Path) -> None:
    import sqlite3

    with sqlite3.connect(place / "000001/catalogue.sqlite") as database:
        database.execute("UPDATE about SET text = '{}'")
    database.close()


FUTURE = json.dumps({"format": "hnclip index", "layout": 2, "generations": ["a", "b"]})
DAMAGE = {
    "a cut header": (header('{"format": "hnclip ind'), "is damaged: index.json cannot be read"),
    "an empty header": (header(""), "is damaged: index.json cannot be read"),
    "a list as header": (header("[]"), "is damaged: index.json cannot be read"),
    "a layout from the future": (header(FUTURE), "has layout 2, this version of hnclip reads 1"),
    "no generation named": (header('{"format": "hnclip index", "layout": 1}'), "index.json names no generation"),
    "a generation that is not there": (
        header('{"format": "hnclip index", "layout": 1, "generation": 7}'),
        "000007/catalogue.sqlite is missing",
    ),
    "an empty catalogue": (cut_catalogue(0), "its catalogue is not whole"),
    "a cut catalogue": (cut_catalogue(5000), "its catalogue cannot be read"),
    "a catalogue of one page": (cut_catalogue(4096), "its catalogue"),
    "garbage as catalogue": (garbage, "its catalogue cannot be read"),
    "nothing said": (no_about, "does not say what it is about"),
}


# The generation itself is: it is gone on with.
WHOLE = {what for what in DAMAGE if "header" in what or "generation" in what or "layout" in what}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_that_cannot_be_mended_says_what_to_do(what: str, path: Path) -> None:
    damage, message = DAMAGE[what]
    damage(path)
    for action in (opens(path), writes(path)):
        with pytest.raises(ValueError, match=message) as error:
            action()
        assert str(path) in str(error.value)
        assert "hnclip index FOLDER --out" in str(error.value)
    whole = what in WHOLE
    with open_writer(path, about(), replace=True) as writer:
        assert writer.living()[0] == (len(CONTENT) if whole else 0)
        if not whole:
            commit_all(writer, CONTENT)
        writer.publish()
    with Index(path) as index:
        check_index(index, CONTENT)


def test_a_header_that_is_gone_empties_nothing(path: Path) -> None:
    (path / HEADER).unlink()
    before = sorted(path.rglob("*"))
    (path / "notes.txt").touch()  # an index may have other things beside it
    with pytest.raises(ValueError, match=f"is damaged: {HEADER} is missing.*--replace"), open_writer(path, about()):
        pass
    assert sorted(path.rglob("*")) == sorted([*before, path / "notes.txt"])
    with open_writer(path, about(), replace=True) as writer:
        assert writer.living()[0] == len(CONTENT)
        writer.publish()
    with Index(path) as index:
        check_index(index, CONTENT)


def test_what_was_killed_before_it_had_a_header_is_begun_anew(path: Path) -> None:
    for file in (path / "000001").iterdir():
        file.write_bytes(b"")
    (path / HEADER).unlink()
    with open_writer(path, about()) as writer:
        assert (writer.generation, writer.living()) == (1, (0, 0))
        commit_all(writer, CONTENT)


@pytest.mark.parametrize("content", ['{"name": "something else"}', '{"format": "other"}', "[]", "{", ""])
def test_an_index_json_of_somebody_else_stays(content: str, tmp_path: Path) -> None:
    place = tmp_path / "site"
    place.mkdir()
    (place / HEADER).write_text(content)
    for anew in (False, True):
        with pytest.raises(ValueError, match="is not that of an index of hnclip: choose another --out"):
            open_writer(place, about(), replace=anew).__enter__()
    assert [file.name for file in place.iterdir()] == [HEADER]
    assert (place / HEADER).read_text() == content


def test_another_header_beside_a_generation_stays_too(path: Path) -> None:
    header('{"name": "something else"}')(path)
    with pytest.raises(ValueError, match="is not that of an index of hnclip"):
        Index(path)
    with pytest.raises(ValueError, match="choose another --out"):
        open_writer(path, about(), replace=True).__enter__()


# Made in a directory, by names of files: an empty one is a directory.
FOREIGN = {
    "pictures of a month": "202301/a.png",
    "a folder of the name of a file": "202301/thumbnails/a.png",
    "engines of another kind": "202301/engines/diesel.png",
    "too short": "2023/",
    "not as a generation is spelt": "0000002/",
}


def put(place: Path, name: str) -> Path:
    file = place / name
    if name.endswith("/"):
        file.mkdir(parents=True)
    else:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"precious")
    return file


@pytest.mark.parametrize("what", FOREIGN)
def test_folders_whose_names_are_numbers_are_no_generations(what: str, path: Path, tmp_path: Path) -> None:
    precious = put(tmp_path / "other", FOREIGN[what])
    with pytest.raises(ValueError, match="holds other things than an index"), open_writer(tmp_path / "other", about()):
        pass
    assert precious.exists()
    assert len(list((tmp_path / "other").iterdir())) == 1
    precious = put(path, FOREIGN[what])
    for anew in (False, True):
        with open_writer(path, about(), check=lambda own: "no" if anew else "", replace=anew) as writer:  # noqa: B023
            compact(writer)
            writer.publish()
        assert precious.exists()
    assert len([file for file in path.iterdir() if (file / "catalogue.sqlite").exists()]) == 1


def test_what_somebody_puts_into_a_generation_stays(path: Path) -> None:
    (path / "000001/.DS_Store").write_text("not ours")
    with open_writer(path, about()) as writer:
        compact(writer)
        assert writer.generation == 2
    assert [file.name for file in (path / "000001").iterdir()] == [".DS_Store"]
    with open_writer(path, about()) as writer:
        compact(writer)
        assert writer.generation == 3
    with Index(path) as index:
        check_index(index, CONTENT)


@pytest.mark.parametrize("changed", [False, True])
def test_a_header_that_could_not_be_written_for_certain(
    changed: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer goes on with the generation that the header names."""

    def fail(place: Path, generation: int) -> None:
        if changed:
            write_header(place, generation)
        raise OSError("the disk fails")

    after: Content = {**CONTENT, "new.jpg": (77, ("another",))}
    with open_writer(path, about()) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(writer_code, "write_header", fail)
            with pytest.raises(OSError, match="the disk fails"):
                compact(writer)
        assert writer.generation == (2 if changed else 1)
        assert (path / "000002").exists() == changed
        writer.commit(change_to(writer, CONTENT, after))
    with Index(path) as index:
        check_index(index, after)


def test_a_new_one_is_searched_by_the_engine_of_the_old(path: Path) -> None:
    with open_writer(path, about()) as writer:
        writer.set_about(replace(about(), engine="milvus", uri="http://there:1"))
    with open_writer(path, OTHER, check=other, replace=True) as writer:
        assert writer.about == replace(OTHER, engine="milvus", uri="http://there:1")
    header("")(path)  # nothing says which counts: the last is asked
    with open_writer(path, about(), check=lambda own: "no", replace=True) as writer:
        assert writer.about == replace(about(), engine="milvus", uri="http://there:1")


FILES = ["images.codes", "images.scales", "images.bf16", "captions.codes", "captions.bf16", "tokens.bf16", "thumbnails"]


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_is_mended_by_writing_what_is_missing_again(name: str, missing: bool, path: Path) -> None:
    file = path / "000001" / name
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 2 // 3])
    if missing:
        file.unlink()
    with pytest.raises(ValueError, match=f"000001/{name} (holds .* bytes of|is missing).*\n  hnclip index ") as error:
        Index(path)
    assert str(error.value).endswith(f"hnclip index 'pictures of a test' --out {path} --tokens")
    with open_writer(path, about()) as writer:
        left = dict(writer.known())
        assert len(left) == (0 if missing else pytest.approx(6, abs=1))
        assert writer.generation == 2  # rows are never given twice in one generation
        before = {name: CONTENT[name] for name in left}
        with Index(path) as index:
            check_index(index, before)
        writer.commit(change_to(writer, before, CONTENT))
    with Index(path) as index:
        check_index(index, CONTENT)


def test_bytes_behind_the_committed_ones_do_not_matter(path: Path) -> None:
    for name in FILES:
        with (path / "000001" / name).open("ab") as file:
            file.write(b"left by a killed writer")
    with Index(path) as index:
        check_index(index, CONTENT)
    after: Content = {**CONTENT, "new.jpg": (77, ("another",))}
    with open_writer(path, about()) as writer:
        assert writer.generation == 1
        writer.commit(change_to(writer, CONTENT, after))
    with Index(path) as index:
        check_index(index, after)


def test_what_a_killed_writer_left_is_cleared_away_and_nothing_else(path: Path) -> None:
    for left in ("000002", "000007"):
        shutil.copytree(path / "000001", path / left)
    (path / f".{HEADER}.new-01234567").touch()
    (path / "notes").mkdir()
    (path / "notes/own.txt").write_text("the user's")
    with open_writer(path, about()) as writer:
        assert writer.generation == 1
    assert sorted(file.name for file in path.iterdir()) == ["000001", HEADER, "lock", "notes"]
    assert (path / "notes/own.txt").exists()


def other(own: IndexWriter) -> str:
    return "" if own.about.model == "other" else "made with another model"


OTHER = replace(about(), model="other")


def test_an_index_that_does_not_fit_is_left_alone(path: Path) -> None:
    with pytest.raises(ValueError, match="made with another model"), open_writer(path, OTHER, check=other):
        pass
    with Index(path) as index:
        check_index(index, CONTENT)


def test_another_takes_its_place_only_when_it_is_complete(path: Path) -> None:
    new: Content = {"a.jpg": (50, ("new",))}
    old = Index(path)
    with open_writer(path, OTHER, check=other, replace=True) as writer:
        commit_all(writer, new)
        with Index(path) as index:
            assert index.about.model == "bundled"
            check_index(index, CONTENT)
    # The process ended before it was complete: whoever wants the same goes on, and then it counts.
    with open_writer(path, OTHER, check=other, replace=True) as writer:
        assert writer.living() == (1, 1)
        more: Content = {**new, "b.jpg": (51, ())}
        writer.commit(change_to(writer, new, more))
        writer.publish()
        assert not old.directory.exists()
    with Index(path) as index:
        assert index.about.model == "other"
        check_index(index, more)
    assert old.stale()
    check_index(old, CONTENT)
    old.close()


def test_a_beginning_for_something_else_is_not_gone_on_with(path: Path) -> None:
    third = replace(about(), model="third")
    with open_writer(path, third, check=lambda own: "no", replace=True) as writer:
        commit_all(writer, {"x.jpg": (3, ())})
    with open_writer(path, OTHER, check=other, replace=True) as writer:
        assert writer.living() == (0, 0)
        assert writer.about == OTHER
    with Index(path) as index:
        check_index(index, CONTENT)
    with open_writer(path, about()) as writer:  # the old one, after all
        assert writer.living()[0] == len(CONTENT)
    assert sorted(file.name for file in path.iterdir()) == ["000001", HEADER, "lock"]


def test_a_damaged_beginning_is_mended_without_counting(path: Path) -> None:
    with open_writer(path, OTHER, check=other, replace=True) as writer:
        commit_all(writer, CONTENT)
        file = writer.directory / "images.codes"
    file.write_bytes(file.read_bytes()[:-1])
    with open_writer(path, OTHER, check=other, replace=True) as writer:
        assert writer.living()[0] == len(CONTENT) - 1
        with Index(path) as index:
            assert index.about.model == "bundled"


def test_opening_while_a_new_generation_takes_its_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generation is removed between the header that was read and the files that it names."""
    read_header = reader_code.read_header

    def slow(place: Path) -> int:
        found = read_header(place)
        monkeypatch.setattr(reader_code, "read_header", read_header)
        with open_writer(place, about()) as writer:
            compact(writer)
        return found

    monkeypatch.setattr(reader_code, "read_header", slow)
    with Index(path) as index:
        assert index.generation == 2
        check_index(index, CONTENT)


def test_an_index_is_read_without_torch(path: Path) -> None:
    code = (
        "import sys\nfrom hnclip.search.index.reader import Index\n"
        "from hnclip.search.index.opening import open_writer\n"
        f"print(Index({str(path)!r}).count())\nassert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "9\n"


def test_the_command_of_an_index_names_what_is_not_usual() -> None:
    plain = About("bundled", "", "", {"context": None, "keep": 20}, 8, "bf16", 0, "/a b/c", "/a b/c")
    assert plain.command(Path("x.hnc")) == "hnclip index '/a b/c' --out x.hnc"
    given = replace(plain, model="m", split="test", storage="int8", patches=4, opening={"context": 77, "keep": 20})
    assert given.command(Path("x"), engine="faiss-ivf") == (
        "hnclip index '/a b/c' --out x --model m --split test --storage int8 --engine faiss-ivf --tokens --context 77"
    )
