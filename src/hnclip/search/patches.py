"""The patch vectors of pictures in an index: stored ones, or made again from the pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.core import InvalidImage
from hnclip.data.image_sources import decode_image
from hnclip.search.index.reader import Index, Item

if TYPE_CHECKING:
    from PIL import Image

    from hnclip.search.find import Finder

BATCH = 16  # pictures at a time: large ones have thousands of numbers for each of hundreds of patches


@dataclass(frozen=True)
class Patches:
    """Some items and the vectors of their patches; `approximate` where the thumbnail stands in for the picture.

    Shape:
        vectors [n, P, D] of length 1, float32, on the model's device
    """

    items: tuple[Item, ...]
    vectors: Tensor
    approximate: tuple[bool, ...]


def patch_batches(finder: Finder, items: Sequence[Item]) -> Iterator[Patches]:
    """The patch vectors of items, in their order, a few at a time: from the index if it keeps them, else made again.

    A picture that is gone, that has changed since it was indexed, or that has no file of its own is read from its
    thumbnail.
    """
    for start in range(0, len(items), BATCH):
        some = tuple(items[start : start + BATCH])
        stored = finder.index.tokens([item.row for item in some])  # [n, P, D]
        if stored is not None:
            vectors = torch.from_numpy(stored).to(finder.model.device)
            yield Patches(some, F.normalize(vectors, dim=-1), (False,) * len(some))  # bf16 has changed their lengths
            continue
        pictures, approximate = zip(*(_picture(finder.index, item) for item in some))
        with torch.no_grad():
            encoded = finder.model.encode_images(finder.model.preprocess_images(pictures), tokens=True)
        assert encoded.tokens is not None  # they were asked for
        yield Patches(some, encoded.tokens.float(), approximate)


def _picture(index: Index, item: Item) -> tuple[Image.Image, bool]:
    """The item's picture, or its thumbnail and True."""
    try:
        return decode_image(index.content(item), item.name), False
    except InvalidImage:
        return decode_image(index.thumbnail(item.row), f"the thumbnail of {item.name}"), True
