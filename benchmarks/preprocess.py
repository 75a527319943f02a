"""Time to make one picture ready for CLIP: hnclip's `preprocess_image` beside transformers' `CLIPImageProcessorPil`.

    python benchmarks/preprocess.py           # a table
    python benchmarks/preprocess.py --json    # the same for programs

Both get the same decoded picture and give the same thing, [3, 224, 224] in bytes: the processor's rescaling and
normalising, which hnclip leaves to the model's device, are off. The two take turns in one process with one thread;
times are processor time, which other programs disturb least, as median and quartiles over the turns. The pictures are
smooth colours with grain, as RGB. The last two sizes are ones that hnclip leaves to Pillow, a small and a tall one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hnclip.data.images import ImageTransform, preprocess_image

SIZES = [(500, 375), (640, 480), (480, 640), (1500, 1000), (4000, 3000), (300, 225), (1080, 2340)]


def photograph(width: int, height: int) -> Image.Image:
    """Smooth colours with grain: nothing in it is constant or repeats."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    grain = random.integers(-12, 13, (height, width, 3), dtype=np.int16)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))


def milliseconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return 1000 * (time.process_time() - start)


def measure(size: tuple[int, int], seconds: float) -> dict[str, Any]:
    """One row of the table: turns until both together took `seconds`, but at least 7."""
    from transformers import CLIPImageProcessorPil

    picture, transform = photograph(*size), ImageTransform(224)
    processor = CLIPImageProcessorPil(do_rescale=False, do_normalize=False)

    def theirs() -> torch.Tensor:
        return processor(picture, return_tensors="pt")["pixel_values"][0]

    def ours() -> torch.Tensor:
        return preprocess_image(picture, transform)

    difference = int((theirs().int() - ours().int()).abs().max())  # and both are warm
    turns: list[tuple[float, float]] = []
    while len(turns) < 7 or sum(map(sum, turns)) < 1000 * seconds:
        turns.append((milliseconds(theirs), milliseconds(ours)))
    columns = {
        "transformers_ms": [turn[0] for turn in turns],
        "hnclip_ms": [turn[1] for turn in turns],
        "ratio": [turn[0] / turn[1] for turn in turns],
    }
    return {
        "picture": f"{size[0]}x{size[1]}",
        "turns": len(turns),
        **{name: [round(value, 3) for value in statistics.quantiles(values)] for name, values in columns.items()},
        "largest_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON; three numbers are quartiles")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(size, options.seconds) for size in SIZES]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'picture':>10} {'transformers ms':>26} {'hnclip ms':>26} {'times as fast':>24} {'grey levels apart':>18}")
    for row in rows:
        cells = [f"{row[name][1]:8.2f} ({row[name][0]:.2f}–{row[name][2]:.2f})" for name in list(row)[2:5]]
        print(f"{row['picture']:>10} {cells[0]:>26} {cells[1]:>26} {cells[2]:>24} {row['largest_difference']:>18}")


if __name__ == "__main__":
    main()
