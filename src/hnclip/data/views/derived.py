"""Pictures made from pictures: crops, grey ones and edge maps, as sources of their own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from PIL import Image

from hnclip.core import Box, ImageSource, InvalidImage
from hnclip.data.views import edges as edge_code
from hnclip.data.views.boxes import mapped
from hnclip.data.views.edges import EdgeMethod


def crop_of(image: ImageSource, box: Box) -> ImageSource:
    """A box of a picture, (left, top, right, bottom) in pixels of the upright picture, right and bottom exclusive.

    A box that overhangs is cut to the picture. One without area, or beside the picture, is a InvalidImage when it is
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


def grey_of(image: ImageSource) -> ImageSource:
    """A picture without its colours: how edge maps that somebody published are read.

    Reference:
        StructXLIP reads its maps as greyscale.
    """
    return GreyImage(image)


def map_crop_of(edges: ImageSource, box: Box, image: ImageSource) -> ImageSource:
    """The part of a picture's edge map that shows a box of the picture, for a map that may be smaller or larger.

    Args:
        edges: the map; one whose sides have another ratio than the picture's is a InvalidImage when it is looked at.
        box: in pixels of the picture, as of `crop_of`.
    """
    return MapCropImage(edges, box, image)


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
        """What is done to the picture, which is upright RGB. Raises InvalidImage if it cannot be done."""

    def recipe(self) -> str:
        """The same, where it takes a look at other pictures to say it all: asked for only when the picture is made."""
        return self.tag

    @property
    def key(self) -> str:
        return f"{self.base.key}{self.tag}"

    def stamp(self) -> str:
        return self.base.stamp()

    def read(self) -> bytes:
        return self.base.read() + self.recipe().encode()

    def decode(self, content: bytes) -> Image.Image:
        from hnclip.data.images import flat_picture  # torch comes with it

        picture = self.base.decode(content.removesuffix(self.recipe().encode()))
        try:
            flat = flat_picture(picture)
        except ValueError as error:
            raise InvalidImage("unusual image", f"{self.base.key}: {error}") from error
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
            raise InvalidImage("missing image", f"{self.base.key}: the box {self.box} has no area")
        inside = (max(0, left), max(0, top), min(right, picture.width), min(bottom, picture.height))
        if inside[0] >= inside[2] or inside[1] >= inside[3]:
            raise InvalidImage(
                "missing image",
                f"{self.base.key}: the box {self.box} lies outside the picture of {picture.width} × {picture.height} "
                "pixels",
            )
        return picture.crop(inside)


@dataclass(frozen=True)
class GreyImage(DerivedImage):
    """A picture without its colours; see `grey_of`."""

    @property
    def tag(self) -> str:
        return "#grey"

    def change(self, picture: Image.Image) -> Image.Image:
        return picture.convert("L")


@dataclass(frozen=True)
class MapCropImage(DerivedImage):
    """A part of an edge map; see `map_crop_of`."""

    box: Box
    image: ImageSource

    @property
    def tag(self) -> str:
        return "#crop={},{},{},{} of ".format(*self.box) + self.image.key

    def recipe(self) -> str:
        return "#crop={},{},{},{} of {},{}".format(*self.box, *self.image.shape())

    def stamp(self) -> str:
        return f"{self.base.stamp()} {self.image.stamp()}"

    def change(self, picture: Image.Image) -> Image.Image:
        size, shape = picture.size, self.image.shape()
        # A side of the map may be off by the pixel that rounding costs.
        if abs(size[0] * shape[1] - size[1] * shape[0]) > max(shape):
            raise InvalidImage(
                "unusual image",
                f"{self.base.key}: an edge map of {size[0]} × {size[1]} pixels is not of the shape of its picture of "
                f"{shape[0]} × {shape[1]}",
            )
        return CropImage(self.base, mapped(self.box, shape, size)).change(picture)


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
    code = b"".join(file.with_name(name).read_bytes() for name in (file.name, "hed.py", "shrink.py"))  # hed is heavy
    return blake2b(code, digest_size=4).hexdigest()
