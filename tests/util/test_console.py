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


def log_all_levels():
    log.debug("details")
    log.info("reading")
    log.warning("slow disk")
    log.error("failed")


@pytest.mark.parametrize(
    ("quiet", "rank", "shown"),
    [
        (False, "0", ["reading", "warning: slow disk", "failed"]),
        (True, "0", ["warning: slow disk", "failed"]),
        (False, "1", ["failed"]),
    ],
)
def test_levels_on_standard_error(capsys, monkeypatch, quiet, rank, shown):
    monkeypatch.setenv("RANK", rank)
    configure_logging(quiet=quiet)
    log_all_levels()
    printed = capsys.readouterr()
    assert (printed.err.splitlines(), printed.out) == (shown, "")


def test_a_log_file_gets_everything_and_is_appended_to(tmp_path):
    file = tmp_path / "new" / "run.log"
    for _ in range(2):
        configure_logging(quiet=True, log_file=file)
        log_all_levels()
    lines = file.read_text().splitlines()
    assert len(lines) == 8
    assert lines[0].endswith("DEBUG hnclip.test: details")
    configure_logging()
    log_all_levels()
    assert len(file.read_text().splitlines()) == 8  # configuring again closes the file


def test_progress_is_a_line_every_interval_where_there_is_no_terminal(capsys):
    configure_logging()
    with progress("epoch 1", total=4, done=2) as bar:
        bar.advance(1, "loss 0.25")
    line = capsys.readouterr().err
    assert line.startswith("epoch 1: 3 of 4, ")
    assert line.endswith("loss 0.25\n")
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
    assert "warning: one image is damaged" in terminal.getvalue()
    assert ("encoding" in terminal.getvalue()) != quiet
    assert "encoding: 1 of 2" not in terminal.getvalue()
    assert "encoding: 1 of 2" in (tmp_path / "log").read_text()
    terminal.close()
    log.warning("standard error is closed")


def run(program, *words):
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)


def test_a_library_prints_nothing_unless_asked():
    program = """
import logging, sys
from hnclip.util import console
console.INTERVAL = 0.0
if sys.argv[1:]: logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("hnclip.x").info("hello")
with console.progress("work", 2) as bar: bar.advance(2)
"""
    assert run(program).stderr == ""
    first, second = run(program, "loud").stderr.splitlines()
    assert (first, second.startswith("work: 2 of 2")) == ("hello", True)


def test_reading_data_and_configuring_need_no_torch():
    program = (
        "import sys, json, hnclip.util.console, hnclip.util.files, hnclip.util.text, hnclip.core, hnclip.config, "
        "hnclip.data.sources; print(json.dumps(['torch' in sys.modules, 'rich' in sys.modules]))"
    )
    assert json.loads(run(program).stdout) == [False, False]
