"""Region proposers by name: cells of grids, segments of even colour, SAM's masks."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from PIL import Image

from hnclip.core import Box
from hnclip.util.optional import import_extra

PROPOSERS = ("sam", "felzenszwalb", "grid", "felzenszwalb+grid")
SHARE = (0.01, 0.80)  # of the area of the image that a region may have, as in GOAL
SHORTEST = 2  # pixels; a crop of one row or column shows nothing
SAME = 0.9  # intersection over union from which two boxes count as one
GRIDS = ((2, 2), (3, 3))  # columns and rows
SCALES = (100.0, 300.0, 900.0)  # of the segmentation; a larger one gives larger segments
SIGMA = 0.8  # pixels of smoothing before the segmentation
LONGEST = 256  # side of the image that is segmented; time grows with the number of pixels
SETTINGS: dict[str, dict[str, Any]] = {
    "felzenszwalb": {"scales": SCALES, "sigma": SIGMA, "longest": LONGEST},
    "grid": {"grids": GRIDS},
}

FindBoxes = Callable[[Image.Image], list[Box]]  # in pixels of an upright RGB image


@contextmanager
def open_proposer(
    name: str, *, weights: Path | None = None, device: str = "auto", workers: int = 1
) -> Iterator[tuple[FindBoxes, dict[str, Any]]]:
    """What finds boxes, for up to `workers` threads at once, and all that they depend on in addition to the image."""
    if name not in PROPOSERS:
        raise ValueError(f"no proposer is called {name!r}: use {', '.join(PROPOSERS)} or auto")
    if (weights is None) == (name == "sam"):
        raise ValueError("--weights, a directory as of facebook/sam-vit-base on the hub, go with --proposer sam only")
    if weights is not None:
        from hnclip.prepare.sam import Sam, open_sam, weights_hash

        sam = Sam(open_sam(weights.expanduser(), device))
        yield union(sam), {"sam": {"weights": weights_hash(weights.expanduser()), **sam.settings}}
        return
    settings = {part: SETTINGS[part] for part in name.split("+")}
    with segment_workers(workers) if "felzenszwalb" in settings else nullcontext() as segments:
        yield union(*filter(None, (segments, grid_cells if "grid" in settings else None))), settings


def union(*functions: FindBoxes) -> FindBoxes:
    """The boxes of all of them that can be cropped and are not the whole image, in order, nearly equal ones once."""

    def find_boxes(image: Image.Image) -> list[Box]:
        kept: list[Box] = []
        for box in (box for function in functions for box in function(image)):
            croppable = min(box[2] - box[0], box[3] - box[1]) >= SHORTEST
            if croppable and box != (0, 0, *image.size) and all(overlap(box, other) < SAME for other in kept):
                kept.append(box)
        return kept

    return find_boxes


def grid_cells(image: Image.Image) -> list[Box]:
    """The cells of several grids, row by row. If the pixels cannot be divided evenly, cells differ by one pixel."""
    boxes = []
    for columns, rows in GRIDS:
        across = [image.width * column // columns for column in range(columns + 1)]
        down = [image.height * row // rows for row in range(rows + 1)]
        boxes += [(left, top, right, bottom) for top, bottom in pairwise(down) for left, right in pairwise(across)]
    return boxes


def felzenszwalb(image: Image.Image) -> list[Box]:
    """The tight boxes of a graph-based segmentation's segments, at several scales.

    Reference:
        Felzenszwalb and Huttenlocher, Efficient graph-based image segmentation, 2004; by scikit-image.
    """
    return _segments(_shrink(image), image.size)


def _shrink(image: Image.Image) -> np.ndarray:
    small = image.convert("RGB")  # a copy
    small.thumbnail((LONGEST, LONGEST), Image.Resampling.BILINEAR, reducing_gap=None)
    return np.asarray(small)  # [H, W, 3]


def _segments(pixels: np.ndarray, size: tuple[int, int]) -> list[Box]:
    from scipy.ndimage import find_objects
    from skimage.segmentation import felzenszwalb as segment

    small = (pixels.shape[1], pixels.shape[0])
    least = math.ceil(SHARE[0] * small[0] * small[1])  # smaller segments join a neighbour
    boxes = []
    for scale in SCALES:
        labels = segment(pixels, scale=scale, sigma=SIGMA, min_size=least)  # [H, W], from 0
        for count, (rows, columns) in zip(np.bincount(labels.ravel()), find_objects(labels + 1)):
            if is_region(count, small):
                boxes.append(scale_box((columns.start, rows.start, columns.stop, rows.stop), small, size))
    return boxes


@contextmanager
def segment_workers(count: int) -> Iterator[FindBoxes]:
    """`felzenszwalb` in `count` processes, to be called by as many threads: it holds the interpreter lock."""
    import_extra("skimage", "regions of felzenszwalb", "views")
    if count == 1:
        yield felzenszwalb
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(count, context, _start_worker) as pool:
        yield lambda image: pool.submit(_segments, _shrink(image), image.size).result()


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end when it ends, also if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()  # type: ignore[union-attr]


def is_region(pixels: float, size: tuple[int, int]) -> bool:
    """Whether this number of pixels is neither a speck nor nearly the whole image: 1 % to 80 %, as in GOAL."""
    return SHARE[0] <= pixels / (size[0] * size[1]) <= SHARE[1]


def scale_box(box: Box, size: tuple[int, int], other: tuple[int, int]) -> Box:
    """A box of an image of this width and height in the pixels of another size of it, rounded outwards."""
    (left, top, right, bottom), (x, y), (width, height) = box, other, size
    return left * x // width, top * y // height, -(-right * x // width), -(-bottom * y // height)


def overlap(first: Box, second: Box) -> float:
    """Intersection over union, 0 to 1."""
    across = min(first[2], second[2]) - max(first[0], second[0])
    down = min(first[3], second[3]) - max(first[1], second[1])
    common = max(0, across) * max(0, down)
    areas = ((right - left) * (bottom - top) for left, top, right, bottom in (first, second))
    return common / (sum(areas) - common) if common else 0.0
