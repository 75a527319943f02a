"""The examples as modules; their tests write into their own directories."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

# On the path, and not loaded from their files: processes that an example starts must find it by its name.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


@pytest.fixture(autouse=True)
def _own_directory(monkeypatch, tmp_path):
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
