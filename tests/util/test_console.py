"""Messages and progress: on standard error, on a terminal, in a log file, and of a library."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

import pytest

from hnclip.util import console
from hnclip.util.console import configure_logging, progress

log = logging.getLogger("hnclip.test")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(console, "INTERVAL", 0.0)
    yield
    configure_logging(quiet=True)


@pytest.mark.parametrize(("quiet", "rank", "shown"), [(False, "0", 3), (True, "0", 2), (False, "1", 1)])
def test_levels_on_standard_error_and_in_a_log_file(capsys, monkeypatch, tmp_path, quiet, rank, shown):
    monkeypatch.setenv("RANK", rank)
    for _ in range(2):
        configure_logging(quiet=quiet, log_file=tmp_path / "new" / "run.log" if rank == "0" else None)
        for level in ("debug", "info", "warning", "error"):
            getattr(log, level)(level)
        printed = capsys.readouterr()
        assert (len(printed.err.splitlines()), printed.out) == (shown, "")
    if rank == "0":  # everything, appended
        assert len((tmp_path / "new" / "run.log").read_text().splitlines()) == 8


def test_progress_is_a_line_every_interval_where_there_is_no_terminal(capsys):
    configure_logging()
    with progress("epoch 1", total=4, done=2) as bar:
        bar.advance(1, "loss 0.25")
    line = capsys.readouterr().err
    assert ("epoch 1: 3 of 4, " in line, "loss 0.25" in line) == (True, True)
    with progress("tiles") as bar:  # iterating extends the total
        assert [*bar.iterate(range(2)), *bar.iterate("a")] == [0, 1, "a"]
    lines = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["tiles: 1 of 2", "tiles: 2 of 2", "tiles: 3 of 3"]


@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_shows_a_bar_and_the_log_file_the_lines(tmp_path, monkeypatch, quiet):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    configure_logging(quiet=quiet, log_file=tmp_path / "log")
    with progress("encoding", total=2) as bar:
        bar.advance(1, "loss 0.5")
        log.warning("one image is damaged")
        bar.advance()
    assert "one image is damaged" in terminal.getvalue()
    assert ("encoding" in terminal.getvalue()) != quiet
    assert "encoding: 1 of 2" in (tmp_path / "log").read_text()


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)


def test_a_library_prints_nothing_and_reading_data_needs_no_torch():
    program = """
import json, logging, sys
import hnclip.util.files, hnclip.util.text, hnclip.core, hnclip.config, hnclip.data.sources
from hnclip.util import console
console.INTERVAL = 0.0
logging.getLogger("hnclip.x").info("hello")
with console.progress("work", 2) as bar: bar.advance(2)
print(json.dumps(['torch' in sys.modules, 'rich' in sys.modules]))
"""
    found = run(program)
    assert (found.stderr, json.loads(found.stdout)) == ("", [False, False])
