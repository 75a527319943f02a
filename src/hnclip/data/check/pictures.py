"""Every picture read and decoded once: what is wrong with it, its size, and what it is compared by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

from hnclip.core import ImageSource, InvalidImage, Problem, orientation
from hnclip.data.check.fingerprint import THUMBNAIL, fingerprint
from hnclip.data.decoding import cpu_count, decoding_threads, in_order
from hnclip.data.images import ImageTransform, checked_size, preprocess_image
from hnclip.util.console import Iterate

AHEAD = 128  # pictures that threads may be ahead of the progress that is shown; no pixels are kept


@dataclass(frozen=True)
class Picture:
    """A sound picture without its pixels. `width` and `height` are as one sees it, after any rotation; pictures of
    equal `content` are the same, those of similar `fingerprint` look alike (None: too plain to tell)."""

    content: bytes
    fingerprint: bytes | None
    width: int
    height: int
    format: str
    mode: str
    rotated: bool

    @property
    def shortest(self) -> int:
        return min(self.width, self.height)


def look_at(
    sources: Sequence[ImageSource], transform: ImageTransform | None, *, workers: int | None, progress: Iterate
) -> list[Picture | Problem]:
    """Decode all of these, as many at a time as there are workers; no pixels are kept.

    Args:
        transform: of a model, whose geometry may refuse what is sound otherwise.
        workers: threads, as many as cpu_count when left out.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    with decoding_threads(workers or cpu_count()) as pool:
        steps = progress(range(len(sources)))
        return [found for _, found in zip(steps, in_order(pool, partial(_look, transform=transform), sources, AHEAD))]


def _look(source: ImageSource, transform: ImageTransform | None) -> Picture | Problem:
    try:
        content = source.read()
        image = source.decode(content)
    except InvalidImage as error:
        return Problem(error.kind, source.key, str(error))
    try:
        thumbnail = preprocess_image(image, THUMBNAIL).numpy()
        if transform is not None:
            checked_size(*image.size, transform)
    except ValueError as error:
        return Problem("unusual image", source.key, f"{source.key}: {error}")
    turned = orientation(image)
    width, height = image.size if turned < 5 else image.size[::-1]
    return Picture(
        content=sha256(content).digest(),
        fingerprint=fingerprint(thumbnail),
        width=width,
        height=height,
        format=image.format or "no format",
        mode=image.mode,
        rotated=turned > 1,
    )
