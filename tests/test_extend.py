"""docs/how-to/extend.md: its edits, applied to a copy of the package, and its examples, run with the copy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hnclip
from hnclip.data.scenes import scene_records

PAGE = (Path(__file__).parents[1] / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|diff)\n(.*?)```", PAGE, re.DOTALL)


def apply_edits(package: Path) -> str:
    """Write the page's files and edits into a copy of the package; returns its other code, which is to be run."""
    examples = []
    for kind, block in BLOCKS:
        first, _, rest = block.partition("\n")
        path = package / first.partition("src/hnclip/")[2]
        if kind == "diff":
            lines = rest.splitlines()
            old, new = ("\n".join(line[1:] for line in lines if line[:1] != sign) for sign in "+-")
            text = path.read_text(encoding="utf-8")
            assert text.count(old) == 1, f"{path.name} does not contain these lines once:\n{old}"
            path.write_text(text.replace(old, new), encoding="utf-8")
        elif first.startswith("# src/"):
            assert not path.exists()
            path.write_text(rest, encoding="utf-8")
        else:
            examples.append(block)
    return "\n".join(examples)


def write_list(folder: Path) -> None:
    lines = []
    for split, families in {"train": 6, "test": 2}.items():
        for number, record in enumerate(scene_records("park", split, families=families, members=4)):
            name = f"{split}-{number}.png"
            record.image.load().save(folder / name)
            lines.append(f"{split}|{name}|{record.captions[0]}")
    (folder / "photos.list").write_text("\n".join(lines), encoding="utf-8")


def test_the_examples_run_with_the_edits_of_the_page(tmp_path: Path) -> None:
    package = tmp_path / "copy" / "hnclip"
    shutil.copytree(Path(hnclip.__file__).parent, package, ignore=shutil.ignore_patterns("pages", "__pycache__"))
    (tmp_path / "example.py").write_text(apply_edits(package), encoding="utf-8")
    write_list(tmp_path)
    places = {"PYTHONPATH": str(package.parent), "HNCLIP_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env={**os.environ, **places}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "{'train': 24, 'test': 8}" in done.stdout
    for run, term in {"power": "global", "uniform": "uniform", "uniform-hn": "uniform"}.items():
        lines = (tmp_path / "runs" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]
        assert steps
        assert all(term in json.dumps(entry) for entry in steps)
    assert (tmp_path / "runs" / "studies" / "power" / "power.json").exists()
