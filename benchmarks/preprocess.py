"""Time to preprocess one image for CLIP: hnclip's `preprocess_image` and transformers' `CLIPImageProcessorPil`.

Both take the same decoded image and return the same bytes, [3, 224, 224]: the processor's rescaling and normalising,
which hnclip does on the model's device, are off. Both resize with Pillow. The two take turns in one process with one
thread; times are processor time, which other programs disturb least, as median and quartiles over the turns. The images
are smooth colours with grain, as RGB.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.measure import Report, machine, threads, time_ways

log = logging.getLogger("hnclip.bench")

SIZES = ((500, 375), (640, 480), (480, 640), (1500, 1000), (4000, 3000), (300, 225), (1080, 2340))
COLUMNS = {
    "picture": "picture",
    "transformers_ms": "transformers ms",
    "hnclip_ms": "hnclip ms",
    "times_as_fast": "times as fast",
    "largest_difference": "grey levels apart",
}


@dataclass(frozen=True)
class Options:
    """Time of one picture."""

    sizes: tuple[tuple[int, int], ...] = SIZES
    """Width and height of the pictures, one pair behind the other."""
    seconds: float = 2.0
    """Time for each size, but at least 7 turns."""


def photograph(width: int, height: int) -> Image.Image:
    """Smooth colours with grain: nothing in it is constant or repeats."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    grain = random.integers(-12, 13, (height, width, 3), dtype=np.int16)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))


def measure(size: tuple[int, int], seconds: float) -> dict[str, Any]:
    """One row of the table."""
    from transformers import CLIPImageProcessorPil

    picture, transform = photograph(*size), ImageTransform(224)
    processor = CLIPImageProcessorPil(do_rescale=False, do_normalize=False)

    def theirs() -> Tensor:
        return processor(picture, return_tensors="pt")["pixel_values"][0]

    def ours() -> Tensor:
        return preprocess_image(picture, transform)

    timings = time_ways({"transformers": theirs, "hnclip": ours}, turns=7, seconds=seconds, clock=time.process_time)
    return {
        "picture": f"{size[0]}x{size[1]}",
        **{f"{name}_ms": timing.milliseconds for name, timing in timings.items()},
        "times_as_fast": timings["transformers"].ratios(timings["hnclip"]),
        "largest_difference": int((theirs().int() - ours().int()).abs().max()),
        **timings,
    }


def run(options: Options) -> Report:
    with threads(1):
        rows = []
        for size in options.sizes:
            log.info(f"{size[0]} × {size[1]}")
            rows.append(measure(size, options.seconds))
        return Report("preprocess", COLUMNS, rows, machine())
