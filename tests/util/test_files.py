from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from hnclip.util.files import exclusive_lock, recover_directory, replace_directory, replace_file


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def write(path, text):
    with replace_directory(path) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "a.txt").write_text(text)


def read(path):
    return (path / "inner" / "a.txt").read_text()


def test_a_file_appears_whole_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "a.txt"
    for text in ("first", "second"):
        with replace_file(path) as partial:
            partial.write_text(text)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == text
    assert names(path.parent) == ["a.txt"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def interrupted():
        with replace_file(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_one_process_at_a_time(tmp_path, umask):
    path = tmp_path / "new" / ".lock"
    with exclusive_lock(path, "busy: wait"):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask  # others may write here another time
        with pytest.raises(ValueError, match="busy: wait"), exclusive_lock(path, "busy: wait"):
            pass
    with exclusive_lock(path, "busy: wait"):
        pass


def test_a_lock_that_cannot_be_had_is_not_called_busy(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refused(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with (
        pytest.raises(ValueError, match="cannot be locked"),
        exclusive_lock(tmp_path / "lock", "busy: wait"),
    ):
        pass


def test_a_directory_appears_whole_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "run"
    write(path, "first")
    with replace_directory(path) as partial:
        (partial / "b.txt").write_text("second")
        assert read(path) == "first"
    assert names(path) == ["b.txt"]
    assert names(path.parent) == ["run"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_the_old_directory_and_nothing_else(tmp_path, error):
    write(tmp_path / "run", "old")

    def interrupted():
        with replace_directory(tmp_path / "run") as partial:
            (partial / "a.txt").write_text("half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert read(tmp_path / "run") == "old"
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failing_rename_leaves_the_old_directory(tmp_path, monkeypatch, failing):
    write(tmp_path / "run", "old")
    calls = []
    rename = os.replace

    def sometimes(source, target):
        calls.append(target)
        if len(calls) == failing:
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(os, "replace", sometimes)
    with pytest.raises(OSError, match="no"):
        write(tmp_path / "run", "new")
    assert read(tmp_path / "run") == "old"
    assert names(tmp_path) == ["run"]


KILLED = """
import os, sys
from pathlib import Path
from hnclip.util.files import exclusive_lock, recover_directory, replace_directory, replace_file

rename, calls = os.replace, []

def stop_at(source, target):
    calls.append(target)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
    rename(source, target)

os.replace = stop_at
with replace_directory(Path(sys.argv[1])) as partial:
    (partial / "inner").mkdir()
    (partial / "inner" / "a.txt").write_text("new")
"""


@pytest.mark.parametrize("call", [1, 2])
def test_a_killed_swap_is_recovered(tmp_path, call):
    path = tmp_path / "run"
    write(path, "old")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), str(call)], env=environment, check=False)
    assert killed.returncode == -9
    assert path.exists() == (call == 1)
    assert len(names(tmp_path)) == 2  # the old one and the unfinished one
    recover_directory(path)
    assert read(path) == "old"
    assert names(tmp_path) == ["run"]


def test_a_kill_after_the_swap_keeps_the_new_directory(tmp_path, monkeypatch):
    write(tmp_path / "run", "old")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *args, **kwargs: None)  # what a kill leaves undone
        write(tmp_path / "run", "new")
    assert len(names(tmp_path)) == 2
    recover_directory(tmp_path / "run")
    assert read(tmp_path / "run") == "new"
    assert names(tmp_path) == ["run"]


def test_recovery_leaves_everybody_else_alone(tmp_path):
    others = [".run.old.new-01234567", ".run.older", ".run2.old-01234567", ".runs.new-01234567", "run.old-01234567"]
    for name in others:
        (tmp_path / name).mkdir()
    recover_directory(tmp_path / "run")
    assert names(tmp_path) == sorted(others)
    recover_directory(tmp_path / "nowhere" / "run")
    assert not (tmp_path / "nowhere").exists()


def test_names_with_special_characters_are_recovered(tmp_path):
    path = tmp_path / "run[1]*"
    write(path, "old")
    path.rename(tmp_path / f".{path.name}.old-01234567")
    recover_directory(path)
    assert read(path) == "old"


def test_permissions_are_those_of_any_new_file(tmp_path, umask):
    with replace_file(tmp_path / "a.txt") as partial:
        partial.unlink()
        os.close(os.open(partial, os.O_CREAT, 0o600))  # a writer that makes its own, private file
    write(tmp_path / "run", "text")
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o777 & ~umask
    assert (tmp_path / "run" / "inner" / "a.txt").stat().st_mode & 0o777 == 0o666 & ~umask


def test_private_files_in_a_directory_become_readable(tmp_path):
    with replace_directory(tmp_path / "run") as partial:
        (partial / "a.txt").touch(mode=0o600)
        (partial / "b.txt").touch()
    assert (tmp_path / "run" / "a.txt").stat().st_mode == (tmp_path / "run" / "b.txt").stat().st_mode


def test_behind_a_link_the_linked_directory_is_replaced(tmp_path):
    write(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "real") == "new"


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ValueError, match="run exists and is not a directory"):
        write(tmp_path / "run", "new")
    assert (tmp_path / "run").read_text() == "mine"
    assert names(tmp_path) == ["run"]
