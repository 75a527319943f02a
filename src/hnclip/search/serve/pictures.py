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

from hnclip.data.pictures import FileImage, TarImage
from hnclip.data.records import BadPicture
from hnclip.search.index.reader import Index
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


@dataclass(frozen=True)
class Shown:
    """Bytes for a browser, their type, and what changes when they do."""

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


def original(index: Index, number: int, max_pixels: int) -> Shown:
    """The picture of an item as it was indexed. If browsers do not know its format it is a JPEG, or the thumbnail where
    it has more than `max_pixels` or is of a rare format.

    Raises:
        Refused: there is no such item, or its picture has changed or is gone.
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
        content = index.content(item)
    except (BadPicture, OSError) as error:
        raise Refused(410) from error
    # Pillow's plugins raise whatever they stumble over.
    with suppress(Exception), Image.open(io.BytesIO(content), formats=DECODED) as picture:
        if picture.format in SHOWN:
            return tagged(content, SHOWN[picture.format])
        if picture.width * picture.height <= max_pixels:
            return tagged(_jpeg(picture), "image/jpeg")
    return tagged(index.thumbnail(item.row), "image/jpeg")


def decode_upload(content: bytes, max_pixels: int) -> Image.Image:
    """The picture that a client sent, decoded.

    Raises:
        Refused: it has too many pixels, or is none.
    """
    try:
        picture = Image.open(io.BytesIO(content), formats=DECODED)
        if picture.width * picture.height > max_pixels:
            raise Refused(413, f"the picture has {picture.width} × {picture.height} pixels, at most {max_pixels:,} do")
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


def _jpeg(picture: Image.Image) -> bytes:
    from hnclip.data.images import flat_picture

    content = io.BytesIO()
    flat_picture(picture).save(content, "JPEG", quality=90)
    return content.getvalue()


def tagged(content: bytes, kind: str) -> Shown:
    return Shown(content, kind, f'"{blake2b(content, digest_size=16).hexdigest()}"')
