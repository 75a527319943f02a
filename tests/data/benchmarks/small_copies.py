"""Benchmarks in miniature: the published layouts with a handful of rows and tiny pictures."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image


def write_json(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_lines(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_picture(path: Path, shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), (shade, 90, 160)).save(path)
    return path


def list_rows(names: list[str], where: str = "/home/somebody/data/images/") -> list[dict]:
    """A test list as GOAL publishes it, with the directories of a machine that nobody else has."""
    return [{"filename": f"{where}{name}", "caption": f"It shows {name}, at length."} for name in names]


def train_row(name: str, *segments: dict) -> dict:
    return {
        "original_filename": f"../somewhere/else/{name}",
        "original_caption": f"It shows {name}. In detail.",
        "segment": list(segments),
    }


def segment(sentence: str, score: float, box: tuple[int, int, int, int]) -> dict:
    left, top, right, bottom = box
    corners = {"x1": left, "y1": top, "x2": right, "y2": bottom, "width": right - left, "height": bottom - top}
    return {
        "filename": "x/crop.png",
        "caption": sentence,
        "similarity_score": score,
        "bbox_coordinates": corners,
    }
