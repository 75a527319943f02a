"""Images of one colour, which tests recognise, and tar files of given members."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from hnclip.core import ImageSource


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
