"""Images as files, members of tar files, or cells of tables: bytes in, checked pixels out."""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from hnclip.core import ImageSource, InvalidImage

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
    if not content:
        raise InvalidImage("corrupt image", f"{where} is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is checked below
            image = Image.open(io.BytesIO(content), formats=_formats())
        if image.width * image.height > MAX_PIXELS:
            size = f"{image.width} × {image.height} pixels; at most {MAX_PIXELS:,} are decoded"
            raise Image.DecompressionBombError(size)
        image.load()
    except Image.DecompressionBombError as error:
        raise InvalidImage("oversized image", f"{where}: {error}") from error
    except UnidentifiedImageError as error:
        raise InvalidImage("corrupt image", f"{where} is not in an image format that Pillow reads") from error
    except Exception as error:  # Pillow's plugins raise many types for damaged data
        kind = "truncated image" if "truncated" in str(error).lower() else "corrupt image"
        raise InvalidImage(kind, f"{where} cannot be decoded: {error}") from error
    return image


@cache
def _formats() -> tuple[str, ...]:
    """Those of FORMATS that the installed Pillow can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


class EncodedImage(ImageSource):
    """An image whose bytes are those of an image file."""

    __slots__ = ()

    def decode(self, content: bytes) -> Image.Image:
        return decode_image(content, self.key)


@dataclass(frozen=True, slots=True, eq=False)
class FileImage(EncodedImage):
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
        return _stamp(self.path)

    def read(self) -> bytes:
        _stamp(self.path)  # opening a pipe would block until something is written to it
        with _reading(self.path):
            return self.path.read_bytes()


@dataclass(frozen=True, slots=True)
class TarImage(EncodedImage):
    """An image inside an uncompressed tar file, read in place: `size` bytes from `offset` on."""

    tar: Path
    name: str
    offset: int
    size: int

    @property
    def key(self) -> str:
        return f"{os.path.abspath(self.tar)}!{self.name}"

    def stamp(self) -> str:
        return f"{_stamp(self.tar)}-{self.offset}-{self.size}"

    def read(self) -> bytes:
        with _reading(self.tar), open(self.tar, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


@dataclass(frozen=True, slots=True)
class CellImage(EncodedImage):
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


def _stamp(path: Path) -> str:
    """Size and time of a regular file."""
    with _reading(path):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise InvalidImage("missing image", f"{path} is not a file")
    return f"{found.st_size}-{found.st_mtime_ns}"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidImage("missing image", f"{path} does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise InvalidImage("missing image", f"{str(path)!r} cannot be read: {error}") from error
