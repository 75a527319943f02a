"""Pictures inside the page: small copies as `data:` addresses."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from hnclip.data.images import to_rgb

SIDE = 320  # pixels of the longer side: sharp in a column of the page, small in the file
FLAT = 16 * 1024  # bytes up to which a picture stays PNG, which loses nothing: tiny ones, and drawings with few colours


def png_address(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def picture_address(picture: Image.Image) -> tuple[str, int, int]:
    """The address, width and height of a copy that is upright, on white, and at most `SIDE` pixels long."""
    small = to_rgb(picture)
    small.thumbnail((SIDE, SIDE))
    png = _encode(small, format="PNG", optimize=True)
    if len(png) <= FLAT:
        return png_address(png), *small.size
    jpeg = _encode(small, format="JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}", *small.size


def _encode(picture: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, **options)
    return buffer.getvalue()
