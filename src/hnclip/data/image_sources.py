"""Images as files, members of tar files, or cells of tables, and what is derived from them: crops and edge maps."""

from __future__ import annotations

import io
import os
import stat
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from hnclip.core import Box, ImageSource, InvalidImage
from hnclip.util.optional import import_extra

# The formats that are decoded, whatever a file is called. Pillow knows more, but some of those start other programs.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "PCX")
SUFFIXES = "jpg jpeg jpe jfif mpo png webp gif bmp tif tiff ppm pgm pbm pnm avif jp2 j2k jpx pcx"
IMAGE_SUFFIXES = frozenset(f".{suffix}" for suffix in SUFFIXES.split())


def is_image_name(name: str) -> bool:
    """Whether a file is an image by its suffix. Hidden files are not, among them the `._` files of macOS."""
    base = name.rpartition("/")[2]
    return not base.startswith(".") and os.path.splitext(base)[1].lower() in IMAGE_SUFFIXES


def decode_image(content: bytes, where: str) -> Image.Image:
    """The image in these bytes, fully decoded. Raises InvalidImage, which names `where`."""
    Image.init()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # twice that size is an error
            image = Image.open(io.BytesIO(content), formats=[name for name in FORMATS if name in Image.OPEN])
        image.load()
    except Image.DecompressionBombError as error:
        raise InvalidImage("oversized image", f"{where}: {error}") from error
    except UnidentifiedImageError as error:
        reason = "is not in an image format that Pillow reads" if content else "is empty"
        raise InvalidImage("corrupt image", f"{where} {reason}") from error
    except Exception as error:  # Pillow's plugins raise many types for damaged data
        kind = "truncated image" if "truncated" in str(error).lower() else "corrupt image"
        raise InvalidImage(kind, f"{where} cannot be decoded: {error}") from error
    return image


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
    """An image in a cell of a table: the bytes of an image file, or Hugging Face's {"bytes", "path"}. The path,
    relative to `folder`, is read if there are no bytes. `version` changes when the table changes; `cell` reads
    the cell in a row."""

    table: str
    row: int
    version: str
    cell: Callable[[int], Any] = field(compare=False, repr=False)
    folder: Path | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        return f"{self.table}:{self.row + 1}"

    def stamp(self) -> str:
        return self.version

    def read(self) -> bytes:
        path: Any = None
        try:
            cell: Any = self.cell(self.row)
        except Exception as error:  # the file has changed; the libraries raise many types
            raise InvalidImage("missing image", f"row {self.row + 1} cannot be read: {error}") from error
        if isinstance(cell, Mapping):
            cell, path = cell.get("bytes"), cell.get("path")
        if isinstance(cell, bytes):
            return cell
        if path:
            return FileImage(Path(self.folder or "", path)).read()
        raise InvalidImage("missing image", f"row {self.row + 1} holds no image")


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
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        reason = f"{path} does not exist" if missing else f"{str(path)!r} cannot be read: {error}"
        raise InvalidImage("missing image", reason) from error


@dataclass(frozen=True)
class DerivedImage(ImageSource):
    """An image that is computed from another one. Its bytes are those of the base and its tag, so that equal bytes are
    equal images."""

    base: ImageSource

    @property
    @abstractmethod
    def tag(self) -> str:
        """The operation with everything that its result depends on."""

    @abstractmethod
    def apply(self, image: Image.Image) -> Image.Image:
        """The operation on the base, an upright RGB or L image. Raises InvalidImage if it is not possible."""

    @property
    def key(self) -> str:
        return f"{self.base.key}{self.tag}"

    def stamp(self) -> str:
        return self.base.stamp()

    def read(self) -> bytes:
        return self.base.read() + self.tag.encode()

    def decode(self, content: bytes) -> Image.Image:
        return render(self, content[: -len(self.tag.encode())], {})


def root(source: ImageSource) -> ImageSource:
    """The image that is decoded for this one."""
    return root(source.base) if isinstance(source, DerivedImage) else source


def render(source: ImageSource, content: bytes, done: dict[str, Image.Image]) -> Image.Image:
    """An image from the bytes of its `root`. `done` holds the images of this root by key, so that each is made once."""
    from hnclip.data.images import to_rgb  # imports torch, without which data can be read

    if source.key not in done:
        if isinstance(source, DerivedImage):
            base = render(source.base, content, done)
            done[source.key] = source.apply(base if isinstance(source.base, DerivedImage) else to_rgb(base))
        else:
            done[source.key] = source.decode(content)
    return done[source.key]


@dataclass(frozen=True)
class CropImage(DerivedImage):
    """A box of an image. It is clipped to the image; without area inside the image it is invalid."""

    box: Box

    @property
    def tag(self) -> str:
        return "#crop={},{},{},{}".format(*self.box)

    def apply(self, image: Image.Image) -> Image.Image:
        left, top, right, bottom = self.box
        inside = (max(0, left), max(0, top), min(right, image.width), min(bottom, image.height))
        if inside[0] >= inside[2] or inside[1] >= inside[3]:
            size = f"{image.width} × {image.height} pixels"
            raise InvalidImage("missing image", f"{self.base.key}: the box {self.box} has no area in {size}")
        return image.crop(inside)


@dataclass(frozen=True)
class EdgeImage(DerivedImage):
    """The edge map of an image by OpenCV's Canny: white edges on black, from all three colour channels.

    `CropImage(EdgeImage(image), box)` is StructXLIP's edge crop: a part of the map, not the map of a part, which would
    have other edges at its border. StructXLIP does not publish its thresholds.
    """

    low: float = 100.0
    high: float = 200.0

    @property
    def tag(self) -> str:
        return f"#canny={self.low:g},{self.high:g}"

    def apply(self, image: Image.Image) -> Image.Image:
        cv2 = import_extra("cv2", "edge maps", "views")
        return Image.fromarray(cv2.Canny(np.asarray(image.convert("RGB")), self.low, self.high))
