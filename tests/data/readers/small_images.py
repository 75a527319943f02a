"""Images of one colour, which tests recognise, tar files of given members, and what was read."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from hnclip.config import ReadConfig
from hnclip.core import ImageSource
from hnclip.data.records import DataSet
from hnclip.data.sources import open_data


def png(shade: int) -> bytes:
    """An image of 2 × 2 pixels; `shade` in 0 … 255 is its red."""
    content = io.BytesIO()
    Image.new("RGB", (2, 2), (shade, 0, 0)).save(content, "PNG")
    return content.getvalue()


def write_png(path: Path, shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(shade))
    return path


def shade(image: ImageSource) -> int:
    pixel = image.load().getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel[0]


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def read(path: Path | str, **settings: Any) -> DataSet:
    return open_data(str(path), ReadConfig(**settings))


def found(data: DataSet) -> list[tuple[str, tuple[str, ...], str | None, int]]:
    """Ids, captions, splits and shades."""
    return [(record.id, record.captions, record.split, shade(record.image)) for record in data.records]


def problems(data: DataSet) -> set[tuple[str, str]]:
    """Kinds and the last parts of places."""
    return {(problem.kind, problem.where.rpartition(":")[2]) for problem in data.problems}
