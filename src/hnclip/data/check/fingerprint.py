"""Pictures that look nearly the same.

A picture's fingerprint is its 64 slowest waves: the cosine transform of its grey levels in 32 × 32, without the mean.
Near-duplicates differ in few signs. Compression, another size, other light or a small mark turn 0 to 4 of them, a crop
by 2 % about 4; two photographs differ in 32 on average. Signs alone would not tell drawings on one background apart, so
the strengths must correlate as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hnclip.data.check.linking import Linked, link
from hnclip.data.images import ImageTransform

SIDE = 32
THUMBNAIL = ImageTransform(SIDE, squash=True, resample="bilinear")
MOST_BITS = 15  # with more, pictures would be filed under signs so few that nearly all share them

_FAINT = 0.25  # grey levels; the sign of a weaker wave is noise
_PLAIN = 16  # strong waves that a picture needs; flat ones and gradients have fewer, and all look the same
_CORRELATION = 0.96  # of the strengths: above it are 98 of 100 crops of 2 %, below it other drawings on one background
_GREY = (0.299, 0.587, 0.114)
_STEPS = np.arange(SIDE)
_WAVES = np.cos(np.pi / SIDE * _STEPS[:, None] * (_STEPS + 0.5)) * 2**0.5 / SIDE  # [wave, pixel]
_SLOWEST = np.array(sorted(np.ndindex(SIDE, SIDE), key=lambda wave: (sum(wave), wave))[1:65])  # [64, 2]
_SPEED = _SLOWEST.sum(1)  # [64]
_ONES = np.array([number.bit_count() for number in range(2**16)], np.uint8)


def fingerprint(thumbnail: np.ndarray) -> bytes | None:
    """The waves of a picture in the size of `THUMBNAIL`, or None if it is too plain to be told from others.

    Shape:
        thumbnail [3, 32, 32] uint8; returns the bytes of [64] float16, in grey levels
    """
    grey = np.tensordot(_GREY, thumbnail, 1)  # [32, 32]
    waves = (_WAVES @ grey @ _WAVES.T)[tuple(_SLOWEST.T)]  # [64]
    if np.count_nonzero(np.abs(waves) > _FAINT) < _PLAIN:
        return None
    return waves.astype(np.float16).tobytes()


def similar_fingerprints(fingerprints: Sequence[bytes], bits: int) -> Linked:
    """Groups of fingerprints that are connected by pairs which correlate and differ in at most `bits` signs.

    Cut into `bits` + 1 parts, the signs of two such fingerprints have at least one part in common, so none is missed.
    """
    if not 0 <= bits <= MOST_BITS:
        raise ValueError(f"bits must be between 0 and {MOST_BITS}, got {bits}")
    waves = np.frombuffer(b"".join(fingerprints), np.float16).reshape(-1, 64)  # [N, 64]
    signs = np.packbits(waves > 0, axis=1).view(np.uint64)[:, 0]  # [N]
    keys = np.zeros(0, int)
    for start, end in pairwise(64 * part // (bits + 1) for part in range(bits + 2)):
        part = signs >> np.uint64(start) << np.uint64(64 - (end - start))
        keys = np.r_[keys, np.unique(part, return_inverse=True)[1] + len(keys)]  # other numbers than earlier parts have
    order = np.argsort(keys, kind="stable")
    pictures = order % max(1, len(waves))

    def alike(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        one, other = pictures[left], pictures[right]
        differing = (signs[one] ^ signs[other]).view(np.uint16).reshape(-1, 4)
        found = _ONES[differing].sum(1) <= bits  # [P]
        found[found] = _correlation(waves[one[found]], waves[other[found]]) >= _CORRELATION
        return found

    return link(len(waves), pictures, keys[order], alike)


def _correlation(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """[P] of pairs of waves [P, 64]; pictures have more of the slow waves, so quick ones weigh more."""
    one, other = one.astype(np.float32), other.astype(np.float32)
    lengths = np.sqrt((one**2 @ _SPEED) * (other**2 @ _SPEED))
    return (one * other) @ _SPEED / lengths
