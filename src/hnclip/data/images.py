"""Pictures into model input: CLIP's geometry once, as bytes; numbers become floats on the device, in the encoder."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor


def preprocess_image(image: Image.Image, size: int) -> Tensor:
    """Shortest side to `size` (bicubic), centre crop, RGB.

    Rotation stored in the file is applied, transparency is laid on white.

    Shape:
        returns [3, size, size] uint8
    """
    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode.startswith("I;16"):  # Pillow would clip sixteen bits to eight, not scale them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert("RGB")
    width, height = image.size
    short = min(width, height)
    width, height = int(size * width / short), int(size * height / short)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()  # [3, size, size]
