"""Images of the index as browsers show them, and images that clients upload.

Only bytes that were indexed are given out, whatever is at their place now: a file that was changed, or swapped for a
link to another one, is treated like a deleted one.
"""

from __future__ import annotations

import io
import stat
from contextlib import suppress

from fastapi import HTTPException
from PIL import Image, UnidentifiedImageError

from hnclip.core import InvalidImage
from hnclip.data.image_sources import FileImage, TarImage
from hnclip.search.reader import IndexedImage, IndexReader

SHOWN = {  # by browsers
    "JPEG": "image/jpeg",
    "MPO": "image/jpeg",
    "PNG": "image/png",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
    "AVIF": "image/avif",
}
Image.init()  # otherwise Pillow loads its decoders on demand, and another thread may find only some of them
# Of the formats that Pillow knows, these are decoded: some of the others start other programs.
DECODED = tuple(name for name in (*SHOWN, "TIFF", "PPM") if name in Image.OPEN)
MAX_FILE = 256_000_000  # bytes of a file that is read
MAX_SCANS = 100  # of a JPEG: each takes as long to decode as a whole image, but only a few bytes
PLAIN_PPM = (b"P1", b"P2", b"P3")  # decimal numbers, which Pillow reads one by one


def thumbnail(reader: IndexReader, file: IndexedImage) -> tuple[bytes, str]:
    """A small JPEG of an image, and its type."""
    try:
        return reader.thumbnail(file.image), "image/jpeg"
    except KeyError:  # deleted since the file was looked up
        raise HTTPException(404, f"there is no image {file.id}") from None


def original(reader: IndexReader, file: IndexedImage, *, max_pixels: int) -> tuple[bytes, str]:
    """The indexed bytes of an image, and their type; if browsers do not show its format, a JPEG of it, or the thumbnail
    if it has more than `max_pixels` or cannot be decoded."""
    try:
        _check_file(reader, file)
        content = reader.content(file)
    except (InvalidImage, OSError) as error:
        raise HTTPException(410, "the image is gone, was changed since it was indexed, or is too large") from error
    with suppress(Exception), Image.open(io.BytesIO(content), formats=DECODED) as image:  # plugins raise anything
        if image.format in SHOWN:
            return content, SHOWN[image.format]
        if image.width * image.height <= max_pixels:
            return _jpeg(image), "image/jpeg"
    return thumbnail(reader, file)


def _check_file(reader: IndexReader, file: IndexedImage) -> None:
    """Check that the image is in a regular file of a size that can be read: a pipe would block, a device never end."""
    source = reader.source(file)
    if not isinstance(source, (FileImage, TarImage)):
        raise HTTPException(404, f"image {file.id} is not a file")
    status = (source.path if isinstance(source, FileImage) else source.tar).stat()  # of what a link points to
    size = status.st_size if isinstance(source, FileImage) else source.size
    if not stat.S_ISREG(status.st_mode) or size > MAX_FILE:
        raise InvalidImage("missing image", f"{file.name} cannot be read")


def _jpeg(image: Image.Image) -> bytes:
    from hnclip.data.images import to_rgb  # imports torch, which other images do not need

    content = io.BytesIO()
    to_rgb(image).save(content, "JPEG", quality=90)
    return content.getvalue()


def decode_upload(content: bytes, max_pixels: int) -> Image.Image:
    """The image that a client sent, decoded. HTTPException if it has too many pixels, would take too long to decode, or
    is not an image."""
    try:
        image = Image.open(io.BytesIO(content), formats=DECODED)
        if image.width * image.height > max_pixels:
            raise Image.DecompressionBombError
        _check_effort(image, content)
        image.load()
    except HTTPException:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise HTTPException(413, f"the image has too many pixels: at most {max_pixels:,} are accepted") from error
    except UnidentifiedImageError as error:
        raise HTTPException(422, f"this is not an image of a known format: {', '.join(DECODED)}") from error
    except Exception as error:  # Pillow's plugins raise many types
        raise HTTPException(422, "the image is damaged and cannot be decoded") from error
    return image


def _check_effort(image: Image.Image, content: bytes) -> None:
    """Refuse images of a few bytes that would take minutes to decode."""
    if image.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > MAX_SCANS:
        raise HTTPException(422, f"the JPEG has more than {MAX_SCANS} scans")
    if image.format == "TIFF" and "jpeg" in str(image.info.get("compression")):
        raise HTTPException(422, "a TIFF with JPEG inside is not accepted: send it as JPEG")
    if image.format == "PPM" and content[:2] in PLAIN_PPM:
        raise HTTPException(422, "a PPM of plain text is not accepted: send it as PNG")
