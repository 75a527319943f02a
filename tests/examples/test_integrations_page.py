from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "integrations.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def bare(text):
    """Without indentation: a snippet is at the margin, its original in a function."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_snippets_are_parts_of_the_examples(snippet):
    assert any(bare(snippet) in bare(file.read_text(encoding="utf-8")) for file in EXAMPLES)


def test_every_example_is_on_the_page():
    assert all(f"examples/{file.name}" in PAGE for file in EXAMPLES)
