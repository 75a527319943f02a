"""Segments of even colour as regions, without any network."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import PIL
from PIL import Image

from hnclip.data.needs import needs
from hnclip.data.parts import scale_box
from hnclip.data.views.shrink import shrunk
from hnclip.prepare.proposal import Proposal
from hnclip.prepare.proposers.boxes import SHARE, distinct, fitting_share, usable

SIGMA = 0.8  # pixels that the picture is smoothed by beforehand, as the method's authors do


@dataclass(frozen=True)
class Felzenszwalb:
    """The tight boxes of a graph-based segmentation's segments, at several scales.

    A segment's own area, not its box's, must be a fitting share of the picture. Boxes that are nearly the same at two
    scales are given once.

    Args:
        scales: of the segmentation; a larger one gives larger segments.
        longest: side that larger pictures are shrunk to before; time grows with the number of pixels, and a region has
            at least a hundredth of them.

    Reference:
        Felzenszwalb and Huttenlocher, Efficient graph-based image segmentation, 2004; by scikit-image.
    """

    scales: tuple[float, ...] = (100.0, 300.0, 900.0)
    longest: int = 256

    def __post_init__(self) -> None:
        if not self.scales or not all(0 < scale < math.inf for scale in self.scales):
            raise ValueError(f"scales must be finite numbers greater than 0, got {self.scales}")
        if self.longest < 16:
            raise ValueError(f"longest must be at least 16 pixels, got {self.longest}")
        object.__setattr__(self, "scales", tuple(map(float, self.scales)))  # equal ones have equal versions

    @property
    def name(self) -> str:
        return "felzenszwalb"

    @property
    def version(self) -> str:
        skimage = needs("skimage", "felzenszwalb needs", "views")
        scales = ",".join(map(str, self.scales))
        tools = f"scikit-image {skimage.__version__} Pillow {PIL.__version__}"
        return f"{tools} scales={scales} longest={self.longest} sigma={SIGMA}"

    def __call__(self, image: Image.Image) -> list[Proposal]:
        return self.segments(self.small(image), image.size)

    def small(self, image: Image.Image) -> Image.Image:
        """All that it looks at of a picture."""
        return shrunk(image.convert("RGB"), (self.longest, self.longest), Image.Resampling.BILINEAR)

    def segments(self, small: Image.Image, size: tuple[int, int]) -> list[Proposal]:
        """What it finds there, in the pixels of the picture of this size."""
        segmentation = needs("skimage.segmentation", "felzenszwalb needs", "views")
        find_objects = needs("scipy.ndimage", "felzenszwalb needs", "views").find_objects
        pixels = np.asarray(small)  # [H, W, 3]
        least = math.ceil(SHARE[0] * small.width * small.height)  # smaller segments join a neighbour
        boxes = []
        for scale in self.scales:
            labels = segmentation.felzenszwalb(pixels, scale=scale, sigma=SIGMA, min_size=least)  # [H, W], from 0
            areas = np.bincount(labels.ravel())
            for count, (rows, columns) in zip(areas, find_objects(labels + 1)):
                if fitting_share(count, small.size):
                    box = (columns.start, rows.start, columns.stop, rows.stop)
                    boxes.append(scale_box(box, small.size, size))
        return distinct(Proposal(box, self.name) for box in boxes if usable(box, size))
