from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "integrations.md").read_text(encoding="utf-8")


def bare(text):
    """Lines without indentation: a snippet stands at the margin, its original in a function."""
    return [line.strip() for line in text.strip().splitlines()]


def blocks():
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_there_are_snippets():
    assert len(blocks()) >= 6


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.split("\n")[0][:40])
def test_snippets_are_parts_of_the_examples(block):
    snippet = bare(block)
    for file in (ROOT / "examples").glob("*.py"):
        lines = bare(file.read_text())
        if any(lines[start : start + len(snippet)] == snippet for start in range(len(lines))):
            return
    pytest.fail("no example contains this snippet")


def test_every_example_is_on_a_page():
    """On this one, or where the photographs of a study are made ready."""
    studies = (ROOT / "docs" / "how-to" / "studies.md").read_text(encoding="utf-8")
    for file in (ROOT / "examples").glob("*.py"):
        assert f"examples/{file.name}" in PAGE + studies
