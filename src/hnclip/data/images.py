"""Pictures into model input: a model's geometry once, as bytes; numbers become floats on the device, in the encoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from hnclip.core import orientation

# Mean and deviation of the pictures that OpenAI's CLIP was trained on, by colour.
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)

Resample = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]

LARGEST = 2**27  # pixels that a picture may have when it is resized, before the crop: 0.4 GB as RGB
STRIP = 2**20  # pixels that are unpacked at a time: few enough to stay in the processor's cache


@dataclass(frozen=True)
class ImageTransform:
    """How a model wants its pictures: geometry for here, colour statistics for the encoder.

    A picture is resized, its shape kept, until its shortest side is `shortest`, and the square of side `size` in its
    centre is what the model sees (CLIP, and DINOv2 with 256 and 224). With `squash` the whole picture becomes a square
    instead, its shape not kept (SigLIP, ViT); `shortest` is then the side of that square before the crop (DeiT).

    Args:
        size: side of the square that the model sees.
        shortest: shortest side before the crop; None, and the same as `size`, for no margin around the crop.
        squash: give up the picture's shape rather than its edges.
        resample: Pillow's filter of that name.
        mean, std: of each colour, for pixels between 0 and 1.
    """

    size: int
    shortest: int | None = None
    squash: bool = False
    resample: Resample = "bicubic"
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1 pixel, got {self.size}")
        if self.shortest is not None and self.shortest < self.size:
            raise ValueError(
                f"shortest must be at least size, or the crop would reach over the picture's edge; got shortest "
                f"{self.shortest} and size {self.size}"
            )
        if self.resample not in get_args(Resample):
            raise ValueError(f"resample must be one of {', '.join(get_args(Resample))}, got {self.resample!r}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3 or not all(math.isfinite(value) for value in values):
                raise ValueError(f"{name} must hold 3 finite numbers, one for each colour, got {values}")
        if min(self.std) <= 0:
            raise ValueError(f"std must be greater than 0 for each colour, got {self.std}")
        if self.shortest == self.size:
            object.__setattr__(self, "shortest", None)  # the same transform compares equal, however it was spelt

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that a picture of `width`×`height` is resized to, before the crop."""
        side = self.shortest or self.size
        if self.squash:
            return side, side
        short = min(width, height)
        return int(side * width / short), int(side * height / short)  # the longer side is cut, not rounded


def preprocess_image(image: Image.Image, transform: ImageTransform) -> Tensor:
    """The square of a picture that a model sees, as bytes in RGB.

    The numbers are those of transformers' `CLIPImageProcessorPil`, `SiglipImageProcessorPil`, `BitImageProcessorPil`
    and `ViTImageProcessorPil` before they rescale and normalise, to one grey level. They are exactly those wherever
    Pillow does the resizing. Pictures that shrink to two thirds or less with the bilinear or bicubic filter, where the
    time goes, are resized by torch's kernel for bytes: there about 3 values in 1000 differ by one level. Of noise
    and of pictures like photographs hardly any value differs by two, of checkerboards and plaids up to 4 in 100 000.

    Modes of Pillow:
        RGB, L: as they are, grey in three equal colours.
        1, P, CMYK, YCbCr, HSV, RGBX and the like: through Pillow's conversion to RGB.
        RGBA, LA, PA, a palette or one colour with transparency: laid on white. So are the premultiplied RGBa and La
            and palettes with an alpha of their own, which transformers refuses or shows without their transparency.
        I;16 and its relatives: scaled from 16 bits to 8. Pillow alone, and transformers, turn all above 255 white.
        I, F: these have no agreed range; values must lie in 0…255 and are cut to whole levels, others are refused.
        EXIF or XMP rotation: applied, before anything else. transformers ignores it. Damaged EXIF counts as none.

    Args:
        image: left as it is; a file that is not read yet is read now, and Pillow's OSError for a damaged or truncated
            one passes through.

    Shape:
        returns [3, size, size] uint8
    """
    if 0 in image.size:
        raise ValueError(f"picture has no pixels: it is {image.width} wide and {image.height} high")
    image = _upright(image)
    columns, rows = checked_shape(*image.size, transform)
    left, top = (columns - transform.size) // 2, (rows - transform.size) // 2
    crop = (left, top, left + transform.size, top + transform.size)
    if transform.resample in ("bilinear", "bicubic") and _torch_agrees(image.size, (columns, rows)):
        return _resize_with_torch(image, (columns, rows), crop, transform.resample)
    return _resize_with_pillow(image, (columns, rows), crop, transform.resample)


def checked_shape(width: int, height: int, transform: ImageTransform) -> tuple[int, int]:
    """`transform.resized`, unless that is huge: a picture of one pixel's width grows as much in height."""
    columns, rows = transform.resized(width, height)
    if columns * rows > LARGEST:
        raise ValueError(
            f"picture is too thin: {width} × {height} would be resized to {columns} × {rows} pixels before the crop; "
            "cut it first"
        )
    return columns, rows


def flat_picture(image: Image.Image) -> Image.Image:
    """A copy as people see it: upright, RGB in 8 bits, on white."""
    return _flatten(_upright(image)).convert("RGB").copy()


def _upright(image: Image.Image) -> Image.Image:
    """The picture as its camera held it."""
    # exif_transpose would copy the picture also where there is nothing to do
    return ImageOps.exif_transpose(image) if orientation(image) > 1 else image


def _flatten(image: Image.Image) -> Image.Image:
    """The picture in 8 bits and without transparency: RGB, or L, which resizes to the same numbers in less time."""
    if image.mode in ("RGB", "L") and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16"):
        deep = np.asarray(image)
        if (key := image.info.get("transparency")) is not None:
            deep = np.where(deep == key, 65535, deep)
        return Image.fromarray((deep >> 8).astype(np.uint8))  # Pillow would clip, not scale
    if image.mode in ("I", "F"):
        values = np.asarray(image)
        if not (values.min() >= 0 and values.max() <= 255):  # also if there is a NaN
            raise ValueError(
                f"picture has mode {image.mode} and values from {values.min()} to {values.max()}; only 0 to 255 is "
                "understood: scale it to 8 bits first"
            )
        return image.convert("L")
    if image.has_transparency_data:
        clear = image.convert("LA") if image.mode == "La" else image  # Pillow knows no other way out of La
        clear = clear.convert("RGBA")
        white = Image.new("RGB", clear.size, "white")
        white.paste(clear, mask=clear)
        return white
    return image.convert("RGB")


def _torch_agrees(old: tuple[int, int], new: tuple[int, int]) -> bool:
    """Whether torch's bilinear and bicubic resizing from `old` to `new` width and height is Pillow's to a grey level.

    Both round to bytes between the two directions. torch's weights have 15 bits where Pillow's have 22, so now and
    then one rounds up what the other rounds down; when a picture shrinks, the second direction averages such
    differences away. Pillow 13 begins with the rows of tall pictures, torch always with the columns, and where bicubic
    overshoots black or white the order tells: those pictures stay with Pillow.
    """
    (width, height), (columns, rows) = old, new
    return 2 * width >= 3 * columns and 2 * height >= 3 * rows and height - rows <= 2 * (width - columns)


def _resize_with_pillow(
    image: Image.Image, shape: tuple[int, int], crop: tuple[int, int, int, int], resample: Resample
) -> Tensor:
    """Resize the whole picture, then crop: what transformers does."""
    resized = _flatten(image).resize(shape, Image.Resampling[resample.upper()])
    square = np.array(resized.crop(crop).convert("RGB"))  # [size, size, 3]
    return torch.from_numpy(square).permute(2, 0, 1).contiguous()  # [3, size, size]


def _resize_with_torch(
    image: Image.Image, shape: tuple[int, int], crop: tuple[int, int, int, int], resample: Resample
) -> Tensor:
    """The same through torch, and only of what the crop depends on.

    First the columns, a strip of the picture at a time, so that no second copy of it is ever in memory; then the rows.
    """
    (width, height), (columns, rows) = image.size, shape
    left, top, right, bottom = crop
    step = max(1, STRIP // width)
    ratio = height / rows
    reach = 2 * ratio  # of the bicubic filter; the bilinear one's is half of it
    first, last = max(0, math.floor(top * ratio - reach)), min(height, math.ceil(bottom * ratio + reach))
    narrow = torch.zeros(1, height, right - left, 3, dtype=torch.uint8, device="cpu")
    narrow = narrow.permute(0, 3, 1, 2)  # [1, 3, height, size], colours innermost as in `strip`
    for y in range(first, last, step):
        part = _flatten(image.crop((0, y, width, min(y + step, last))))
        strip = np.array(part if part.mode == "RGB" else part.convert("RGB"))  # [step, width, 3]; convert copies
        pixels = torch.from_numpy(strip)[None].permute(0, 3, 1, 2)  # [1, 3, step, width]
        resized = F.interpolate(pixels, (len(strip), columns), mode=resample, antialias=True)
        narrow[:, :, y : y + len(strip)] = resized[..., left:right]
    resized = F.interpolate(narrow, (rows, right - left), mode=resample, antialias=True)  # [1, 3, rows, size]
    return resized[0, :, top:bottom].contiguous()  # [3, size, size]
