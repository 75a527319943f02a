"""Images into model input: the geometry of a model, applied once to bytes. The encoder normalises on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from hnclip.core import InvalidImage, orientation

# Mean and standard deviation of each colour channel in the training data of OpenAI's CLIP.
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)

Resample = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]

LARGEST = 2**27  # pixels that an image may have when it is resized, before the crop: 0.4 GB as RGB


@dataclass(frozen=True)
class ImageTransform:
    """The image preprocessing of a model.

    An image is resized with its aspect ratio kept until its shortest side is `shortest`, and the square of side `size`
    in its centre is cropped (CLIP; DINOv2 with 256 and 224). With `squash` the whole image is resized to a square
    instead, without its aspect ratio (SigLIP, ViT); `shortest` is then the side of that square before the crop (DeiT).

    Args:
        shortest: None is the same as `size`.
        resample: Pillow's filter of that name.
        mean, std: of each colour channel, for pixels between 0 and 1.
    """

    size: int
    shortest: int | None = None
    squash: bool = False
    resample: Resample = "bicubic"
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD

    def __post_init__(self) -> None:
        colours = len(self.mean) == len(self.std) == 3 and all(map(math.isfinite, (*self.mean, *self.std)))
        if not 1 <= self.size <= (self.shortest or self.size) or self.resample not in get_args(Resample):
            raise ValueError(f"size must be positive, shortest at least size, resample one of Pillow's filters: {self}")
        if not colours or min(self.std) <= 0:
            raise ValueError(f"mean and std must hold 3 finite numbers each, and std be positive: {self}")
        if self.shortest == self.size:
            object.__setattr__(self, "shortest", None)  # equal transforms compare equal

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of an image after resizing, before the crop. InvalidImage if that is huge: very thin images
        become very long ones."""
        side = self.shortest or self.size
        if self.squash:
            return side, side
        short = min(width, height)
        columns, rows = int(side * width / short), int(side * height / short)  # rounded down, as transformers does
        if columns * rows > LARGEST:
            resized = f"{width} × {height} would be resized to {columns} × {rows}"
            raise InvalidImage("unusual image", f"the image is too thin: {resized}")
        return columns, rows


def preprocess_image(image: Image.Image, transform: ImageTransform) -> Tensor:
    """The square of an image that a model sees, as RGB bytes; InvalidImage if there is none.

    The values are those of transformers' `CLIPImageProcessorPil`, `SiglipImageProcessorPil`, `BitImageProcessorPil` and
    `ViTImageProcessorPil` before they rescale and normalise, to the bit. Images that transformers rejects, clips or
    shows otherwise (16 bits, EXIF orientation, some kinds of transparency) are listed in hnclip docs models.

    The image is not modified. If it is not decoded yet, Pillow's OSError for a damaged file passes through.

    Shape:
        returns [3, size, size] uint8
    """
    image = _flatten(image)
    resized = image.resize(transform.resized(*image.size), Image.Resampling[transform.resample.upper()])
    left, top = (resized.width - transform.size) // 2, (resized.height - transform.size) // 2
    square = resized.crop((left, top, left + transform.size, top + transform.size)).convert("RGB")
    return torch.from_numpy(np.array(np.asarray(square).transpose(2, 0, 1), order="C"))  # [3, size, size]


def to_rgb(image: Image.Image) -> Image.Image:
    """A copy of the image, upright, as 8-bit RGB on a white background."""
    return _flatten(image).convert("RGB")


def _flatten(image: Image.Image) -> Image.Image:
    """The image upright in 8 bits without transparency: RGB, or L, which resizes to the same values in less time."""
    if 0 in image.size:
        raise InvalidImage("unusual image", f"the image has no pixels: it is {image.width} × {image.height}")
    if orientation(image) > 1:  # exif_transpose copies images that are upright already
        image = ImageOps.exif_transpose(image)
    if image.mode in ("RGB", "L") and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16"):
        deep = np.asarray(image)
        if (key := image.info.get("transparency")) is not None:
            deep = np.where(deep == key, 65535, deep)
        return Image.fromarray((deep >> 8).astype(np.uint8))  # Pillow would clip instead of scaling
    if image.mode in ("I", "F"):
        values = np.asarray(image)
        if not (values.min() >= 0 and values.max() <= 255):  # also rejects NaN
            found = f"the image has mode {image.mode} and values from {values.min()} to {values.max()}"
            raise InvalidImage("unusual image", f"{found}; only 0 to 255 is supported: convert it to 8 bits first")
        return image.convert("L")
    if image.has_transparency_data:
        clear = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")  # La converts only to LA
        white = Image.new("RGB", clear.size, "white")
        white.paste(clear, mask=clear)
        return white
    return image.convert("RGB")
