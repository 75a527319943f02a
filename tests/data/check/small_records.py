"""Records with pictures and captions made for these tests."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
from PIL import Image

from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.data.records import DataSet


def blobs(seed: int, width: int = 80, height: int = 60) -> Image.Image:
    """A picture with a structure of its own: soft patches of colour."""
    noise = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def picture_file(folder: Path, name: str, image: Image.Image | bytes | int) -> FileImage:
    """A file of this picture, of these bytes, or of the picture of this seed."""
    path = folder / name
    if isinstance(image, bytes):
        path.write_bytes(image)
    else:
        (blobs(image) if isinstance(image, int) else image).save(path)
    return FileImage(path)


def record(id: str, image: FileImage, *captions: str, split: str | None = "train", group: str | None = None) -> Record:
    return Record(id, image, captions, split, group=group)


def data_set(*records: Record, **fields) -> DataSet:
    return DataSet("small", records, **fields)


def components(count: int, linked) -> list[list[int]]:
    """Groups of two and more, by the definition: neighbours are joined until nothing changes."""
    label = list(range(count))
    pairs = [pair for pair in combinations(range(count), 2) if linked(*pair)]
    changed = True
    while changed:
        changed = False
        for one, other in pairs:
            if label[one] != label[other]:
                label[one] = label[other] = min(label[one], label[other])
                changed = True
    groups: dict[int, list[int]] = {}
    for index, name in enumerate(label):
        groups.setdefault(name, []).append(index)
    return [members for members in groups.values() if len(members) > 1]
