"""Where the picture of an item lies, as text in the catalogue: a file, a part of a tar file, or no place of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hnclip.core import ImageSource
from hnclip.data.image_sources import FileImage, TarImage


def place_of(image: ImageSource, root: Path | None) -> str:
    """The place of a picture; of files below the root relative to it, so that the folder may move as a whole."""
    if isinstance(image, FileImage):
        return file_place(_relative(image.path, root))
    if isinstance(image, TarImage):
        tar = _relative(image.tar, root)
        return json.dumps({"tar": tar, "name": image.name, "offset": image.offset, "size": image.size})
    return "{}"


def file_place(path: str) -> str:
    """The place of a file, by its path below the root."""
    return json.dumps({"file": path})


def source_at(place: str, root: Path | None) -> ImageSource | None:
    """The picture at a place; None if only the data set that it came from could give it."""
    found = json.loads(place)
    if "file" in found:
        return FileImage(_absolute(found["file"], root))
    if "tar" in found:
        return TarImage(_absolute(found["tar"], root), found["name"], found["offset"], found["size"])
    return None


def _relative(path: Path, root: Path | None) -> str:
    absolute = Path(os.path.abspath(path))
    if root is not None and absolute.is_relative_to(root):
        return absolute.relative_to(root).as_posix()
    return absolute.as_posix()


def _absolute(path: str, root: Path | None) -> Path:
    return Path(path) if root is None else root / path  # an absolute path stays as it is
