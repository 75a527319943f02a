"""The examples as modules; their tests connect to no other machine and write into their own directories."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest

# On the path, and not loaded from their files: processes that an example starts must find it by its name.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """No connection to another machine, and relative paths lead to the test's own directory."""
    connect = socket.socket.connect

    def local_only(self, address):
        if self.family == socket.AF_UNIX or address[0] in ("localhost", "127.0.0.1", "::1"):
            return connect(self, address)
        raise AssertionError(f"an example connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", local_only)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def no_dropout_directory(model_directory, tmp_path_factory):
    """The small model without dropout, so that two ways to one gradient can be compared."""
    directory = tmp_path_factory.mktemp("models") / "no-dropout"
    shutil.copytree(model_directory, directory)
    config = json.loads((directory / "config.json").read_text())
    for tower in ("text_config", "vision_config"):
        config[tower]["attention_dropout"] = 0.0
    (directory / "config.json").write_text(json.dumps(config))
    return directory
