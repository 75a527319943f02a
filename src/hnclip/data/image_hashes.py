"""Hashes of the content of images, remembered by their stamps: an image is read once, wherever its file is moved to.

The directory `image-hashes` of the cache directory holds files of 32-byte entries, a hash of the key and stamp of an
image and the hash of its content. Each file is written once and named by a hash of its own bytes, so a damaged file is
not used and writers need no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from hnclip.core import ImageSource, InvalidImage
from hnclip.data.decoding import AHEAD, cpu_count, decoding_threads, hash_bytes, in_order, source_hash
from hnclip.util.console import progress
from hnclip.util.files import replace_file

DIRECTORY, WIDTH = "image-hashes", 16
FEW = 4096  # images that are hashed without showing progress


def image_hashes(images: Sequence[ImageSource], cache: Path) -> list[str]:
    """A hash of the bytes of each image; of one that cannot be read, the kind of problem.

    Args:
        cache: the cache directory, where hashes are remembered by key and stamp. If it cannot be written, all images
            are read again the next time.
    """
    names = [_or_kind(source_hash, image) for image in images]
    known = _read(cache / DIRECTORY)
    missing = {name: image for name, image in zip(names, images) if isinstance(name, bytes) and name not in known}
    if missing:
        new = _hash(missing)
        known |= new
        content = b"".join(name + value for name, value in new.items() if isinstance(value, bytes))
        file = cache / DIRECTORY / f"{hash_bytes(content).hex()}.bin"
        with suppress(OSError), replace_file(file) as partial:
            partial.write_bytes(content)
    contents = [known[name] if isinstance(name, bytes) else name for name in names]
    return [content.hex() if isinstance(content, bytes) else content for content in contents]


def _or_kind(work: Callable[[ImageSource], bytes], image: ImageSource) -> bytes | str:
    try:
        return work(image)
    except InvalidImage as error:
        return error.kind


def _hash(images: dict[bytes, ImageSource]) -> dict[bytes, bytes | str]:
    read = partial(_or_kind, lambda image: hash_bytes(image.read()))
    with decoding_threads(cpu_count()) as pool, progress("hashing images") as bar:
        order = bar.iterate(range(len(images))) if len(images) > FEW else iter(range(len(images)))
        return {name: content for _, name, content in zip(order, images, in_order(pool, read, images.values(), AHEAD))}


def _read(directory: Path) -> dict[bytes, bytes | str]:
    known: dict[bytes, bytes | str] = {}
    for file in directory.glob("*.bin"):
        with suppress(OSError):
            content = file.read_bytes()
            if hash_bytes(content).hex() == file.stem:
                at = range(0, len(content), 2 * WIDTH)
                known |= {content[i : i + WIDTH]: content[i + WIDTH : i + 2 * WIDTH] for i in at}
    return known
