"""A handful of images on disk, and the options that make runs of them short."""

from __future__ import annotations

import json
from pathlib import Path

from hnclip.data.scenes import scene_records

COUNTS = {"train": 16, "validation": 8, "test": 8}
SHORT = ["optim.epochs=1", "optim.micro_batch=4", "optim.accumulate=1", "save_minutes=0.0"]


def write_pairs(folder: Path, style: str = "park", *, test: bool = True, counts: dict[str, int] = COUNTS) -> Path:
    """A JSONL file next to its images."""
    folder.mkdir(parents=True)
    lines = []
    for split, count in counts.items():
        if split == "test" and not test:
            continue
        for number, record in enumerate(scene_records(style, split, families=-(-count // 4), members=4)[:count]):
            name = f"{split}-{number}.png"
            record.image.load().resize((48, 48)).save(folder / name)
            lines.append({"image": name, "caption": record.captions[0], "split": split})
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def asked(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    """Options of `hnclip study` for a plan of seconds."""
    words = ["--model", str(model), "--recipe", "demo", "--data", str(data), "--out", str(out)]
    return [*words, "--set", *SHORT, "--seeds", "42", "--threads", "1", *more]
