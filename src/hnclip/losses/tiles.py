"""How the tiled loss cuts its matrix; plain numbers, so that `cost` can count the bytes of the same tiles."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

# A tile stays in a processor's cache while it is computed, reduced and multiplied. From 1 to 16 MiB no size was faster
# beyond the scatter of 15 % (one thread, 2,048 and 4,096 pairs). For accelerators, which need more work per kernel
# launch to stay busy, the size is a guess that nobody has measured.
TILE_BYTES = {"cpu": 2**22}
ACCELERATOR_TILE_BYTES = 2**26


def tile_bytes(device_type: str) -> int:
    """The size of the largest tile on this kind of device."""
    return TILE_BYTES.get(device_type, ACCELERATOR_TILE_BYTES)


def tile_sides(rows: int, columns: int, item_bytes: int, size: int) -> tuple[int, int]:
    """Height and width of the largest tile: square if there are rows enough, else as wide as `size` bytes allow."""
    elements = max(1, size // item_bytes)
    height = min(rows, isqrt(elements))
    return height, min(columns, elements // height)


def blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    """start … stop−1 as consecutive slices of at most `size`, as equal as possible."""
    count = -(-(stop - start) // size)
    for k in range(count):
        yield slice(start + (stop - start) * k // count, start + (stop - start) * (k + 1) // count)
