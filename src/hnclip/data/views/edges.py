"""Edge maps of pictures: Canny, zero crossings of the Laplacian of Gaussian, and the HED network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from hnclip.data.needs import needs
from hnclip.data.views.fingerprint import fingerprint

EDGE_METHODS = ("canny", "log", "hed")


class EdgeMethod(Protocol):
    """A way to find edges. It must give the same map for the same picture and `version`."""

    @property
    def name(self) -> str:
        """What it is called on the command line and in manifests."""

    @property
    def version(self) -> str:
        """The tool, its version and its settings: all that the map depends on beside the picture."""

    def __call__(self, image: Image.Image) -> Image.Image:
        """The map of an upright RGB picture: mode L and of the same size, white edges on black."""


@dataclass(frozen=True)
class Canny:
    """Canny's edges by OpenCV, with a Sobel filter of 3 × 3 and without smoothing; black or white, nothing between.

    It looks at all three colours, each pixel's strongest gradient counting, so that it sees where colours of the same
    brightness meet.

    Args:
        low: gradients below it are no edge.
        high: gradients above it are one; those between, where they continue one.

    Reference:
        StructXLIP names Canny as its extractor; its thresholds are not published.
    """

    low: float = 100.0
    high: float = 200.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < math.inf:
            raise ValueError(f"Canny's thresholds must be 0 ≤ low ≤ high and finite, got {self.low} and {self.high}")
        _as_floats(self, "low", "high")

    @property
    def name(self) -> str:
        return "canny"

    @property
    def version(self) -> str:
        return f"opencv {_cv2().__version__} low={self.low} high={self.high}"

    def __call__(self, image: Image.Image) -> Image.Image:
        return Image.fromarray(_cv2().Canny(np.asarray(image.convert("RGB")), self.low, self.high))


@dataclass(frozen=True)
class LaplacianOfGaussian:
    """Zero crossings of the Laplacian of the smoothed grey picture, where they are steep; black or white.

    Of two neighbours in a row or column with different signs the one nearer to zero is an edge, if they differ by
    more than `contrast` / (σ³·√(2π)). That is the slope with which the response to a straight step of so many
    grey levels passes through zero, so that one contrast means the same at every σ.

    Args:
        sigma: of the Gaussian, in pixels.
        contrast: of the weakest step that is an edge, in grey levels.

    Reference:
        Marr and Hildreth, Theory of edge detection, 1980.
    """

    sigma: float = 2.0
    contrast: float = 16.0

    def __post_init__(self) -> None:
        if not 0.5 <= self.sigma < math.inf:  # below it the sampled filter is no Gaussian's any more
            raise ValueError(f"sigma must be a finite number of at least 0.5 pixels, got {self.sigma}")
        if not 0 < self.contrast < math.inf:
            raise ValueError(f"contrast must be a finite number of grey levels greater than 0, got {self.contrast}")
        _as_floats(self, "sigma", "contrast")

    @property
    def name(self) -> str:
        return "log"

    @property
    def version(self) -> str:
        scipy = needs("scipy", "the Laplacian of Gaussian needs", "views")
        return f"scipy {scipy.__version__} sigma={self.sigma} contrast={self.contrast}"

    def __call__(self, image: Image.Image) -> Image.Image:
        ndimage = needs("scipy.ndimage", "the Laplacian of Gaussian needs", "views")
        grey = np.asarray(image.convert("L"), dtype=np.float32)  # [H, W]
        response = ndimage.gaussian_laplace(grey, self.sigma, mode="nearest")  # [H, W]
        least = self.contrast / (self.sigma**3 * math.sqrt(2 * math.pi))
        edges = np.zeros(response.shape, dtype=bool)
        for values, marks in ((response, edges), (response.T, edges.T)):
            first, second = values[:-1], values[1:]
            crossing = ((first < 0) != (second < 0)) & (np.abs(first - second) > least)
            nearer = np.abs(first) <= np.abs(second)
            marks[:-1] |= crossing & nearer
            marks[1:] |= crossing & ~nearer
        return Image.fromarray(edges.astype(np.uint8) * 255)


@dataclass(frozen=True)
class Hed:
    """Holistically-nested edge detection: the network's probability of an edge at each pixel, as grey levels.

    Args:
        weights: a file of pytorch-hed's layout; see `read_hed`.
        device: where the network runs, as `find_device` names them.

    Relations:
        Unlike the other maps it is not only black and white. Pictures larger than the network's room (`find_edges`)
        are looked at smaller.

    Reference:
        Xie and Tu, Holistically-nested edge detection, 2015.
    """

    weights: Path
    device: str = "auto"

    @property
    def name(self) -> str:
        return "hed"

    @property
    def version(self) -> str:
        import torch

        return f"torch {torch.__version__} weights={self._mark()}"

    def _mark(self) -> str:
        if not self.weights.is_file():
            raise ValueError(f"there are no weights of HED at {self.weights}: name a file with --weights")
        return fingerprint(self.weights)

    def __call__(self, image: Image.Image) -> Image.Image:
        from hnclip.data.views.hed import find_edges, opened_hed

        return find_edges(opened_hed(self.weights, self._mark(), self.device), image.convert("RGB"))


def edge_method(name: str, *, weights: Path | None = None, device: str = "auto") -> EdgeMethod:
    """The method of a name: `canny`, `log` or `hed`, the first two also with settings after a colon.

    `canny:50,150` sets the two thresholds, `log:1.4` σ and `log:1.4,20` also the contrast. A method whose packages or
    weights are not there is refused now, not at its first picture.
    """
    kind, colon, rest = name.partition(":")
    if kind not in EDGE_METHODS:
        raise ValueError(f"no edge method is called {kind!r}: use {', '.join(EDGE_METHODS)}")
    if weights is not None and kind != "hed":
        raise ValueError(f"{kind} takes no weights: leave them out, or use hed")
    method: EdgeMethod
    if kind == "hed":
        if colon:
            raise ValueError(f"hed has no settings, got {name!r}")
        if weights is None:
            raise ValueError("hed needs weights: name a file of them with --weights, or use canny")
        from hnclip.data.views.hed import opened_hed

        method = Hed(Path(weights).expanduser(), device)
        opened_hed(method.weights, method._mark(), device)
    elif kind == "canny":
        method = Canny(*_settings(name, rest, (2,), "two thresholds, as canny:50,150")) if colon else Canny()
    else:
        expected = "sigma and, if wanted, the contrast, as log:1.4 or log:1.4,20"
        method = LaplacianOfGaussian(*_settings(name, rest, (1, 2), expected)) if colon else LaplacianOfGaussian()
    _ = method.version  # complains about packages that are not there
    return method


def _settings(name: str, text: str, counts: Sequence[int], expected: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in counts:
        raise ValueError(f"{name!r} is not understood: after the colon come {expected}")
    return values


def _as_floats(method: object, *names: str) -> None:
    """Whole numbers as floats: methods that compare equal must also call their version the same."""
    for name in names:
        object.__setattr__(method, name, float(getattr(method, name)))


def _cv2() -> Any:
    return needs("cv2", "Canny needs", "views")
