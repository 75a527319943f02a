from __future__ import annotations

import re
from pathlib import Path

import plain_loop
import pytest

from hnclip.data.scenes import scene_records

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


def test_the_plain_loop_runs(monkeypatch, capsys):
    monkeypatch.setattr(plain_loop, "scene_records", lambda *args, **_: scene_records(*args, families=4, members=4))
    plain_loop.main(steps=2, batch=8)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["R@1 before", "step  0", "step  1", "R@1 after"]
