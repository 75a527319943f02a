"""Pictures of the index as browsers show them, and pictures that clients send.

Only content that was indexed is ever given out, whatever lies at its place by now: a link is followed, and what it
leads to must be those very bytes. So a file that was swapped for a link to another is gone, as if it were deleted.
"""

from __future__ import annotations

import io
import stat
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from PIL import Image, UnidentifiedImageError

from hnclip.core import InvalidImage
from hnclip.data.image_sources import FileImage, TarImage
from hnclip.search.index.reader import Index, Item
from hnclip.search.serve.failures import Refused

# By Pillow's name, what browsers show.
SHOWN = {
    "JPEG": "image/jpeg",
    "MPO": "image/jpeg",
    "PNG": "image/png",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
    "AVIF": "image/avif",
}
Image.init()  # Pillow loads its decoders when they are needed, and threads that need one at once may miss it
# Of all that Pillow knows these alone are decoded: some formats start other programs.
DECODED = tuple(name for name in (*SHOWN, "TIFF", "PPM") if name in Image.OPEN)
LARGEST = 256_000_000  # bytes of a file that is read to be shown
SCANS = 100  # of a JPEG that is decoded: each takes as long as the picture, and only a few bytes
PLAIN = (b"P1", b"P2", b"P3")  # numbers in words, which Pillow reads one by one


@dataclass(frozen=True)
class Shown:
    """Bytes for a browser, their type ("" if browsers do not show them), and what changes when they do."""

    content: bytes
    type: str
    tag: str


def thumbnail(index: Index, number: int) -> Shown:
    """A small picture of an item.

    Raises:
        Refused: there is no such item.
    """
    item = index.item(number)
    if item is None:
        raise Refused(404, f"there is no picture {number}")
    return tagged(index.thumbnail(item.row), "image/jpeg")


def original_size(index: Index, number: int) -> int:
    """Bytes of the file of an item.

    Raises:
        Refused: there is no such item, or its picture is gone.
    """
    return _file(index, number)[1]


def original(index: Index, number: int) -> Shown:
    """The picture of an item as it was indexed; of the type "" if it is to be `converted` first.

    Raises:
        Refused: there is no such item, or its picture has changed or is gone.
    """
    item, _ = _file(index, number)
    try:
        content = index.content(item)
    except (InvalidImage, OSError) as error:
        raise Refused(410) from error
    kind = ""
    # Pillow's plugins raise whatever they stumble over.
    with suppress(Exception), Image.open(io.BytesIO(content), formats=DECODED) as picture:
        kind = SHOWN.get(picture.format or "", "")
    return tagged(content, kind)


def converted(index: Index, number: int, content: bytes, max_pixels: int) -> Shown:
    """The content of an item as a JPEG, or its thumbnail where it has more than `max_pixels` or is of a rare format."""
    with suppress(Exception), Image.open(io.BytesIO(content), formats=DECODED) as picture:
        if picture.width * picture.height <= max_pixels:
            return tagged(_jpeg(picture), "image/jpeg")
    return thumbnail(index, number)


def _file(index: Index, number: int) -> tuple[Item, int]:
    """An item whose picture is a file that can be read to its end, and how many bytes it has.

    Raises:
        Refused: there is no such item, or no such file.
    """
    item = index.item(number)
    source = None if item is None else index.source(item)
    if item is None or source is None:
        raise Refused(404, f"there is no file of picture {number}" if item else f"there is no picture {number}")
    path = source.path if isinstance(source, FileImage) else source.tar if isinstance(source, TarImage) else None
    try:
        found = None if path is None else path.stat()  # of what a link leads to
        size = source.size if isinstance(source, TarImage) else 0 if found is None else found.st_size
        if found is None or not stat.S_ISREG(found.st_mode) or size > LARGEST:
            raise Refused(410)
    except (InvalidImage, OSError) as error:
        raise Refused(410) from error
    return item, size


def decode_upload(content: bytes, max_pixels: int) -> Image.Image:
    """The picture that a client sent, decoded.

    Raises:
        Refused: it has too many pixels, would take too long, or is none.
    """
    try:
        picture = Image.open(io.BytesIO(content), formats=DECODED)
        if picture.width * picture.height > max_pixels:
            raise Refused(413, f"the picture has {picture.width} × {picture.height} pixels, at most {max_pixels:,} do")
        _check_effort(picture, content)
        picture.load()
    except Refused:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refused(413, f"the picture has too many pixels, at most {max_pixels:,} do") from error
    except UnidentifiedImageError as error:
        raise Refused(422, f"the body is no picture of a known format: {', '.join(DECODED)}") from error
    except Exception as error:  # Pillow's plugins raise whatever they stumble over
        raise Refused(422, "the picture is damaged and cannot be decoded") from error
    return picture


def _check_effort(picture: Image.Image, content: bytes) -> None:
    """A few bytes must not take minutes to decode."""
    if picture.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > SCANS:
        raise Refused(422, f"the JPEG has more than {SCANS} scans")
    if picture.format == "TIFF" and "jpeg" in str(picture.info.get("compression")):
        raise Refused(422, "a TIFF that has JPEG inside is not read: send it as JPEG")
    if picture.format == "PPM" and content[:2] in PLAIN:
        raise Refused(422, "a PPM of plain text is not read: send it as PNG")


def _jpeg(picture: Image.Image) -> bytes:
    from hnclip.data.images import to_rgb

    content = io.BytesIO()
    to_rgb(picture).save(content, "JPEG", quality=90)
    return content.getvalue()


def tagged(content: bytes, kind: str) -> Shown:
    return Shown(content, kind, f'"{blake2b(content, digest_size=16).hexdigest()}"')
