"""Pictures as files, inside tar files, or behind a function: bytes in, checked pixels out."""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

from PIL import Image, UnidentifiedImageError

from hnclip.core import ImageSource, InvalidImage, upright_shape

Result = TypeVar("Result")

# Twice Pillow's warning level, where Pillow itself refuses: 0.5 GB as RGB. Beyond it a picture is not decoded.
MAX_PIXELS = 178_956_970

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".jfif"})

# Of all that Pillow knows these alone are decoded, whatever a file is called: some formats start other programs.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "PCX")


def is_image_name(name: str) -> bool:
    """Whether a file is a picture by its name; hidden files and macOS's companions are none."""
    base = name.rpartition("/")[2]
    return not base.startswith(".") and os.path.splitext(base)[1].lower() in IMAGE_SUFFIXES


def decode_picture(content: bytes, where: str) -> Image.Image:
    """The image in these bytes, fully decoded; InvalidImage says what is wrong with it and where it is."""
    image = _opened(io.BytesIO(content), where)
    try:
        image.load()
    except Exception as error:
        raise InvalidImage(_damage(error), f"{where} cannot be decoded: {error}") from error
    return image


def picture_shape(file: IO[bytes], where: str) -> tuple[int, int]:
    """Width and height of the upright picture in a file, of which only the head is read wherever that says it all."""
    image = _opened(file, where)
    try:
        if image.format == "TIFF":
            image.load()  # Pillow turns these itself, and only then says so
        return upright_shape(image)
    except Exception as error:  # a PNG may tell how it lies behind its pixels, and be damaged before that
        raise InvalidImage(_damage(error), f"{where} cannot be decoded: {error}") from error


def _opened(file: IO[bytes], where: str) -> Image.Image:
    """The picture in a file, not decoded yet."""
    if not file.read(1):
        raise InvalidImage("corrupt image", f"{where} is empty")
    file.seek(0)
    try:
        with warnings.catch_warnings():
            # The size is checked here, so that the answer does not hang on the warning filter of the process.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file, formats=_formats())
    except Image.DecompressionBombError as error:
        raise InvalidImage("oversized image", f"{where}: {error}") from error
    except UnidentifiedImageError as error:
        raise InvalidImage("corrupt image", f"{where} is no picture that Pillow knows") from error
    except Exception as error:  # Pillow's plugins raise whatever a damaged header makes them stumble over
        raise InvalidImage(_damage(error), f"{where} cannot be opened: {error}") from error
    if image.width * image.height > MAX_PIXELS:
        raise InvalidImage(
            "oversized image", f"{where} has {image.width} × {image.height} pixels; at most {MAX_PIXELS:,} are decoded"
        )
    return image


@cache
def _formats() -> tuple[str, ...]:
    """Of FORMATS those that this Pillow can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _damage(error: Exception) -> str:
    """Pillow says of most formats when it is only the end that is missing."""
    return "truncated image" if "truncated" in str(error).lower() else "corrupt image"


@dataclass(frozen=True)
class FileImage(ImageSource):
    """A picture that is a file of its own."""

    path: Path

    @property
    def key(self) -> str:
        return os.path.abspath(self.path)

    def stamp(self) -> str:
        found = _stat(self.path)
        return f"{found.st_size}-{found.st_mtime_ns}"

    def read(self) -> bytes:
        _stat(self.path)
        return _reading(self.path, self.path.read_bytes)

    def decode(self, content: bytes) -> Image.Image:
        return decode_picture(content, str(self.path))

    def shape(self) -> tuple[int, int]:
        def look() -> tuple[int, int]:
            with self.path.open("rb") as file:
                return picture_shape(file, str(self.path))

        _stat(self.path)
        return _reading(self.path, look)


@dataclass(frozen=True)
class TarImage(ImageSource):
    """A picture inside an uncompressed tar file, read where it lies: `size` bytes from `offset` on."""

    tar: Path
    name: str
    offset: int
    size: int

    @property
    def key(self) -> str:
        return f"{os.path.abspath(self.tar)}!{self.name}"

    def stamp(self) -> str:
        found = _stat(self.tar)
        return f"{found.st_size}-{found.st_mtime_ns}-{self.offset}-{self.size}"

    def read(self) -> bytes:
        def part() -> bytes:
            with open(self.tar, "rb") as file:
                file.seek(self.offset)
                return file.read(self.size)

        return _reading(self.tar, part)

    def decode(self, content: bytes) -> Image.Image:
        return decode_picture(content, f"{self.tar}!{self.name}")

    def shape(self) -> tuple[int, int]:
        def look() -> tuple[int, int]:
            with self.tar.open("rb") as file, io.BufferedReader(_Part(file, self.offset, self.size)) as part:
                return picture_shape(part, f"{self.tar}!{self.name}")

        return _reading(self.tar, look)


@dataclass(frozen=True)
class CellImage(ImageSource):
    """A picture that lies in a cell of a table, encoded as a file would be.

    Args:
        name: which cell, for messages and as the key: unique, and the same in every run.
        version: what changes when the table changes, for example a file's size and time.
        get: reads the cell's bytes.
    """

    name: str
    version: str
    get: Callable[[], bytes] = field(compare=False, repr=False)

    @property
    def key(self) -> str:
        return self.name

    def stamp(self) -> str:
        return self.version

    def read(self) -> bytes:
        return self.get()

    def decode(self, content: bytes) -> Image.Image:
        return decode_picture(content, self.name)

    def shape(self) -> tuple[int, int]:
        return picture_shape(io.BytesIO(self.read()), self.name)


class _Part(io.RawIOBase):
    """A stretch of a file as a file of its own, for readers that need only its beginning."""

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        self._file, self._offset, self._size, self._at = file, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._offset + self._at)
        found = self._file.read(wanted)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def _stat(path: Path) -> os.stat_result:
    """Of a file; to open a pipe would be to wait for whoever writes to it."""
    found = _reading(path, path.stat)
    if not stat.S_ISREG(found.st_mode):
        raise InvalidImage("missing image", f"{path} is no file")
    return found


def _reading(path: Path, action: Callable[[], Result]) -> Result:
    try:
        return action()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidImage("missing image", f"{path} does not exist") from error
    except OSError as error:
        raise InvalidImage("missing image", f"{path} cannot be read: {error.strerror or error}") from error
