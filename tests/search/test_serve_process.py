"""`hnclip serve` as a process: it starts before its model is there, it says where, and it stops when it is told to."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serve_helpers import ask, make_index, records, until

from hnclip.cli import main
from hnclip.search.options import ServeOptions
from hnclip.search.serve.run import is_local, listen, own_names, serve, url


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(tmp_path_factory.mktemp("process"), 4)


@contextmanager
def process(path: Path, *options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that serves, and its port."""
    command = [sys.executable, "-m", "hnclip", "serve", str(path), "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            found = re.search(r" at http://.*:(\d+)/ ", line)
            assert found, line
            yield server, int(found[1])
        finally:
            server.kill()


def rest(server: subprocess.Popen[str]) -> str:
    """What it says until it ends."""
    _, said = server.communicate(timeout=90)
    return said


@pytest.mark.slow
def test_the_life_of_a_server(path: Path) -> None:
    asked = {"text": records()[1].captions[0], "k": 3}
    with process(path) as (server, port):
        assert ask(port, "/healthz")[0] == 200
        assert ask(port, "/api/index")[1]["pictures"] == 4
        until(lambda: ask(port, "/api/search", asked)[0] == 200, seconds=120)  # not while the model is loaded
        assert len(ask(port, "/api/search", asked)[1]["results"]) == 3
        assert ask(port, "/healthz") == (200, {"ready": True})
        server.send_signal(signal.SIGTERM)
        assert rest(server) == "stopped\n"
        assert server.returncode == 0
        with pytest.raises(ConnectionRefusedError):
            ask(port, "/healthz")


def test_a_server_can_be_stopped_while_it_loads(path: Path) -> None:
    with process(path, "--token", "secret", HNCLIP_TOKEN="other") as (server, port):
        assert ask(port, "/api/index")[0] == 401
        server.send_signal(signal.SIGINT)
        assert rest(server) == "stopped\n"
        assert server.returncode == 0


def test_a_model_that_cannot_be_loaded_ends_the_server_with_a_sentence(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(path), "--port", "0", "--model", "/no/such/model", "--host", "0.0.0.0"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("warning: ")  # no token, and not this machine alone
    assert " at http://0.0.0.0:" in lines[1]
    assert lines[2].startswith("hnclip serve: ")
    assert "/no/such/model" in lines[2]
    assert len(lines) == 3


def test_what_is_wrong_is_said_before_anything_is_served(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hnclip")
    with pytest.raises(ValueError, match="does not exist"):
        serve(ServeOptions(index=tmp_path / "nothing.hnc"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="choose another with --port"):
        serve(ServeOptions(index=path, port=taken.getsockname()[1]))
    with pytest.raises(ValueError, match="--host"):
        serve(ServeOptions(index=path, host="no.such.host.invalid"))
    assert caplog.messages == []


def test_what_has_to_be_installed_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.serve.run.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'hnclip\[serve\]'"):
        serve(ServeOptions(index=path))


@pytest.mark.parametrize(
    "wrong", [{"port": 70000}, {"waiting": 0}, {"timeout": 0.0}, {"max_k": 0}, {"threads": -1}, {"host": " "}]
)
def test_options_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"--{next(iter(wrong)).replace('_', '-')}"):
        ServeOptions(index=Path("park.hnc"), **wrong)


def test_addresses() -> None:
    with listen("127.0.0.1", 0) as own, listen("0.0.0.0", 0) as all_of_them:
        assert is_local(own)
        assert not is_local(all_of_them)
        assert url("127.0.0.1", own) == f"http://127.0.0.1:{own.getsockname()[1]}/"
        assert url("::1", own).startswith("http://[::1]:")


def test_names_that_a_server_answers_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Lab7.example.org")
    with listen("127.0.0.1", 0) as own, listen("0.0.0.0", 0) as all_of_them:
        assert own_names("127.0.0.1", own, "secret") == ("localhost", "127.0.0.1")
        assert own_names("0.0.0.0", all_of_them, "secret") is None  # who has no token gets nothing
        open_to_all = own_names("Pictures.example", all_of_them, None)
        assert open_to_all == ("localhost", "pictures.example", "lab7.example.org", "lab7", "lab7.local")
