"""Images derived from others: crops, and edge maps by Canny."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
from PIL import Image

from hnclip.core import Box, ImageSource, InvalidImage
from hnclip.data.images import to_rgb
from hnclip.util.optional import import_extra


@dataclass(frozen=True)
class DerivedImage(ImageSource):
    """An image that is computed from another one, `base`.

    Its bytes are those of the base followed by its tag, so that equal bytes are equal images.
    """

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


def render(source: ImageSource, content: bytes, done: dict[str, Image.Image]) -> Image.Image:
    """Decode an image, and of a derived one its bases and what they share with other images only once.

    Args:
        content: the bytes of `root(source)`.
        done: images with the same root by key; filled on the way.
    """
    if source.key not in done:
        if isinstance(source, DerivedImage):
            base = render(source.base, content, done)
            done[source.key] = source.apply(base if isinstance(source.base, DerivedImage) else to_rgb(base))
        else:
            done[source.key] = source.decode(content)
    return done[source.key]


def root(source: ImageSource) -> ImageSource:
    """The image that is decoded for this one."""
    while isinstance(source, DerivedImage):
        source = source.base
    return source


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

    Args:
        low, high: thresholds of the gradient; between them an edge must continue one above `high`.

    Relations:
        `CropImage(EdgeImage(image), box)` is StructXLIP's edge crop: a part of the map, not the map of a part, which
        would have other edges at its border.

    Reference:
        StructXLIP names Canny as its extractor; its thresholds are not published.
    """

    low: float = 100.0
    high: float = 200.0

    @property
    def tag(self) -> str:
        return f"#canny={self.low:g},{self.high:g}"

    def apply(self, image: Image.Image) -> Image.Image:
        cv2 = import_extra("cv2", "edge maps", "views")
        return Image.fromarray(cv2.Canny(np.asarray(image.convert("RGB")), self.low, self.high))
