"""Files and directories that appear whole or not at all, locks, and imports of optional packages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hnclip.util.files import exclusive_lock, read_json, recover_directory, replace_directory, replace_file
from hnclip.util.optional import import_extra


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def write_file(path, text, error=None):
    with replace_file(path) as partial:
        partial.write_text(text)
        if error:
            raise error


def write(path, text, error=None):
    with replace_directory(path) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "a.txt").write_text(text)
        if error:
            raise error


def read(path):
    return (path / "inner" / "a.txt" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("replace", [write_file, write])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_the_new_content_is_there_whole_or_after_an_error_the_old_one(tmp_path, replace, error):
    path = tmp_path / "new" / "run"
    for text in ("first", "second"):
        replace(path, text)
        assert read(path) == text
    with pytest.raises(error):
        replace(path, "half", error)
    assert read(path) == "second"
    assert names(path.parent) == ["run"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failing_rename_leaves_the_old_directory(tmp_path, monkeypatch, failing):
    write(tmp_path / "run", "old")
    calls, rename = iter(range(1, 9)), os.replace

    def sometimes(source, target):
        if next(calls) == failing:
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(os, "replace", sometimes)
    with pytest.raises(OSError, match="no"):
        write(tmp_path / "run", "new")
    assert (read(tmp_path / "run"), names(tmp_path)) == ("old", ["run"])


KILLED = """
import os, shutil, sys
from pathlib import Path
from hnclip.util.files import replace_directory

left = [int(sys.argv[2])]

def kill_at(function):
    def call(*arguments, **options):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), 9)
        return function(*arguments, **options)
    return call

os.replace, shutil.rmtree = kill_at(os.replace), kill_at(shutil.rmtree)
with replace_directory(Path(sys.argv[1])) as partial:
    (partial / "inner").mkdir()
    (partial / "inner" / "a.txt").write_text("new")
"""


@pytest.mark.parametrize(("call", "there", "expected"), [(1, True, "old"), (2, False, "old"), (3, True, "new")])
@pytest.mark.parametrize("name", ["run", "run[1]*"])
def test_a_killed_swap_is_recovered(tmp_path, name, call, there, expected):
    """Before and between the two renames the old directory is kept, after them the new one."""
    path = tmp_path / name
    others = [".run.old.new-01234567", ".run2.old-01234567", "run.old-01234567"]
    for other in others:
        (tmp_path / other).mkdir()
    write(path, "old")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), str(call)], env=environment, check=False)
    assert (killed.returncode, path.exists(), len(names(tmp_path))) == (-9, there, 5)
    recover_directory(path)
    assert read(path) == expected
    assert names(tmp_path) == sorted([name, *others])  # nothing of other directories is deleted


def test_behind_a_link_the_linked_directory_is_replaced_and_a_file_in_the_way_is_refused(tmp_path):
    write(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "new")
    assert ((tmp_path / "link").is_symlink(), read(tmp_path / "real")) == (True, "new")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="not a directory"):
        write(tmp_path / "file", "new")
    assert read(tmp_path / "file") == "mine"


def test_one_process_at_a_time(tmp_path):
    path = tmp_path / "new" / ".lock"
    for _ in range(2):
        with (
            exclusive_lock(path, "busy: wait"),
            pytest.raises(ValueError, match="busy: wait"),
            exclusive_lock(path, "busy: wait"),
        ):
            pass


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff{}"])
def test_only_json_objects_are_read(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_a_missing_package_is_an_error_with_its_extra():
    with pytest.raises(ValueError, match=r"no_such_package.*hnclip\[data\]"):
        import_extra("no_such_package.part", "Parquet files", "data")
