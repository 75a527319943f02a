"""Images as files, members of tar files, or cells of tables: bytes in, checked pixels out."""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, TypeVar

from PIL import Image, UnidentifiedImageError

from hnclip.core import ImageSource, InvalidImage

Result = TypeVar("Result")

# Twice the size from which Pillow warns, where Pillow itself refuses: 0.5 GB as RGB.
MAX_PIXELS = 178_956_970

# The formats that are decoded, whatever a file is called, and their suffixes. Pillow knows more, but some of those
# start other programs.
FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "MPO": (".mpo",),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
    "JPEG2000": (".jp2", ".j2k", ".jpx"),
    "PCX": (".pcx",),
}
IMAGE_SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)


def is_image_name(name: str) -> bool:
    """Whether a file is an image by its suffix. Hidden files are not, among them the `._` files of macOS."""
    base = name.rpartition("/")[2]
    return not base.startswith(".") and os.path.splitext(base)[1].lower() in IMAGE_SUFFIXES


def decode_image(content: bytes, where: str) -> Image.Image:
    """The image in these bytes, fully decoded. Raises InvalidImage, which names `where`."""
    image = _open(io.BytesIO(content), where)
    try:
        image.load()
    except Exception as error:  # Pillow's plugins raise many types for damaged data
        raise InvalidImage(_damage(error), f"{where} cannot be decoded: {error}") from error
    return image


def _open(file: IO[bytes], where: str) -> Image.Image:
    """The image in a file, not decoded yet."""
    if not file.read(1):
        raise InvalidImage("corrupt image", f"{where} is empty")
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is checked below
            image = Image.open(file, formats=_formats())
    except Image.DecompressionBombError as error:
        raise InvalidImage("oversized image", f"{where}: {error}") from error
    except UnidentifiedImageError as error:
        raise InvalidImage("corrupt image", f"{where} is not in an image format that Pillow reads") from error
    except Exception as error:  # Pillow's plugins raise many types for damaged headers
        raise InvalidImage(_damage(error), f"{where} cannot be opened: {error}") from error
    if image.width * image.height > MAX_PIXELS:
        raise InvalidImage(
            "oversized image", f"{where} has {image.width} × {image.height} pixels; at most {MAX_PIXELS:,} are decoded"
        )
    return image


@cache
def _formats() -> tuple[str, ...]:
    """Those of FORMATS that the installed Pillow can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _damage(error: Exception) -> str:
    return "truncated image" if "truncated" in str(error).lower() else "corrupt image"


@dataclass(frozen=True, slots=True, eq=False)
class FileImage(ImageSource):
    """An image file: `name` below `base`. Readers pass an absolute, normalised `base` that many images share."""

    name: str | Path
    base: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileImage) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def path(self) -> Path:
        return Path(self.base, self.name)

    @property
    def key(self) -> str:
        return os.path.join(self.base, self.name) if self.base else os.path.abspath(self.name)

    def stamp(self) -> str:
        found = _stat(self.path)
        return f"{found.st_size}-{found.st_mtime_ns}"

    def read(self) -> bytes:
        _stat(self.path)
        return _reading(self.path, self.path.read_bytes)

    def decode(self, content: bytes) -> Image.Image:
        return decode_image(content, str(self.path))


@dataclass(frozen=True, slots=True)
class TarImage(ImageSource):
    """An image inside an uncompressed tar file, read in place: `size` bytes from `offset` on."""

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
        def read_part() -> bytes:
            with open(self.tar, "rb") as file:
                file.seek(self.offset)
                return file.read(self.size)

        return _reading(self.tar, read_part)

    def decode(self, content: bytes) -> Image.Image:
        return decode_image(content, f"{self.tar}!{self.name}")


@dataclass(frozen=True, slots=True)
class CellImage(ImageSource):
    """An image in a cell of a table, encoded as a file would be.

    Args:
        name: the cell, for messages and as the key: unique, and the same in every run.
        version: changes when the table changes, for example its size and time.
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
        return decode_image(content, self.name)


def _stat(path: Path) -> os.stat_result:
    """Status of a regular file. Opening a pipe would block until something is written to it."""
    found = _reading(path, path.stat)
    if not stat.S_ISREG(found.st_mode):
        raise InvalidImage("missing image", f"{path} is not a file")
    return found


def _reading(path: Path, action: Callable[[], Result]) -> Result:
    try:
        return action()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidImage("missing image", f"{path} does not exist") from error
    except OSError as error:
        raise InvalidImage("missing image", f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a null character in the path
        if isinstance(error, InvalidImage):
            raise
        raise InvalidImage("missing image", f"{str(path)!r} cannot be the path of a file") from error
