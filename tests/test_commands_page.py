"""docs/reference/commands.md is what its script writes from the installed commands; messages name pages that exist."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from hnclip.cli import read_options
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
    assert len(names) == len(find_pages())  # a page is found by its name without its folder
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src" / "hnclip").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"\(hnclip docs ([a-z-]+)", text)}
    assert len(named) > 5
    assert named <= names


def commands_of(text: str) -> list[list[str]]:
    """The words of every complete `hnclip` command in the shell blocks of a page."""
    found = []
    for block in re.findall(r"```(?:sh|console)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ")
            if line.startswith("hnclip ") and not re.search(r"…|\[--", line):
                words = shlex.split(line, comments=True)
                end = next((at for at, word in enumerate(words) if word in ("&", "<", "|")), len(words))
                found.append(words[1:end])
    return found


PAGES = [ROOT / "README.md", *find_pages().values()]
WITH_COMMANDS = [path for path in PAGES if commands_of(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_command_of_a_page_is_accepted(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands_of(page.read_text(encoding="utf-8")):
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
        if {"--resume", "--config"} & {*words}:  # these read files
            continue
        assert name is not None, words
        try:
            read_options(name, words[len(name.split()) :])
        except SystemExit:
            pytest.fail(f"{shlex.join(words)}\n{capsys.readouterr()}")
