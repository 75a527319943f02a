"""Pictures made from pictures: crops and edge maps, as sources of their own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from PIL import Image

from hnclip.data.images import flat_picture
from hnclip.data.records import BadPicture, ImageSource
from hnclip.data.views import edges as edge_code
from hnclip.data.views.edges import EdgeMethod

Box = tuple[int, int, int, int]


def crop_of(image: ImageSource, box: Box) -> ImageSource:
    """A box of a picture, (left, top, right, bottom) in pixels of the upright picture, right and bottom exclusive.

    A box that overhangs is cut to the picture. One without area, or beside the picture, is a BadPicture when it is
    looked at.
    """
    return CropImage(image, box)


def edges_of(image: ImageSource, method: EdgeMethod) -> ImageSource:
    """The edge map of a picture, upright.

    Relations:
        `crop_of(edges_of(image, method), box)` is StructXLIP's edge crop: a part of the map, not the map of a part,
        which would find other edges at its border.
    """
    return EdgeImage(image, method)


@dataclass(frozen=True)
class DerivedImage(ImageSource):
    """A picture that is another one, changed.

    The bytes that it is made from are those of the other, and after them what is done to it: the store knows pictures
    by their bytes, and a crop is not the picture that it is cut from.
    """

    base: ImageSource

    @property
    @abstractmethod
    def tag(self) -> str:
        """What is done to the picture, and all that the result depends on beside it."""

    @abstractmethod
    def change(self, picture: Image.Image) -> Image.Image:
        """What is done to the picture, which is upright RGB. Raises BadPicture if it cannot be done."""

    @property
    def key(self) -> str:
        return f"{self.base.key}{self.tag}"

    def stamp(self) -> str:
        return self.base.stamp()

    def read(self) -> bytes:
        return self.base.read() + self.tag.encode()

    def decode(self, content: bytes) -> Image.Image:
        picture = self.base.decode(content.removesuffix(self.tag.encode()))
        try:
            flat = flat_picture(picture)
        except ValueError as error:
            raise BadPicture("unusual image", f"{self.base.key}: {error}") from error
        return self.change(flat)


@dataclass(frozen=True)
class CropImage(DerivedImage):
    """A box of a picture; see `crop_of`."""

    box: Box

    @property
    def tag(self) -> str:
        return "#crop={},{},{},{}".format(*self.box)

    def change(self, picture: Image.Image) -> Image.Image:
        left, top, right, bottom = self.box
        if left >= right or top >= bottom:
            raise BadPicture("missing image", f"{self.base.key}: the box {self.box} has no area")
        inside = (max(0, left), max(0, top), min(right, picture.width), min(bottom, picture.height))
        if inside[0] >= inside[2] or inside[1] >= inside[3]:
            raise BadPicture(
                "missing image",
                f"{self.base.key}: the box {self.box} lies outside the picture of {picture.width} × {picture.height} "
                "pixels",
            )
        return picture.crop(inside)


@dataclass(frozen=True)
class EdgeImage(DerivedImage):
    """The edge map of a picture; see `edges_of`."""

    method: EdgeMethod

    @property
    def tag(self) -> str:
        return f"#edges={self.method.name} {self.method.version} {_edge_code()}"

    def change(self, picture: Image.Image) -> Image.Image:
        return self.method(picture)


@cache
def _edge_code() -> str:
    """The store must not keep maps that another state of the code made."""
    file = Path(edge_code.__file__)
    code = file.read_bytes() + file.with_name("hed.py").read_bytes()  # which is heavy to import
    return blake2b(code, digest_size=4).hexdigest()
