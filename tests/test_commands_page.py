"""docs/reference/commands.md is what its script writes from the installed commands; messages name pages that exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from hnclip.cli.commands import COMMANDS, EXIT_CODES
from hnclip.cli.docs import find_pages

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "commands_page.py"))
PAGE = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")


def test_the_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # restored after the script has set it
    assert SCRIPT["commands_page"]() == PAGE, "run python scripts/commands_page.py"


def test_every_command_and_exit_code_is_on_the_page() -> None:
    for name in COMMANDS:
        assert f"## hnclip {name}\n" in PAGE
    for code in SCRIPT["EXIT_CODES"]:
        assert f"{code} " in EXIT_CODES


def test_messages_and_help_name_pages_that_exist() -> None:
    names = {name.rpartition("/")[2] for name in find_pages()}
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src" / "hnclip").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"\(hnclip docs ([a-z-]+)", text)}
    assert len(named) > 5
    assert named <= names
