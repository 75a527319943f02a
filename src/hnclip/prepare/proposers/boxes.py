"""Boxes: which of them are regions, and how they overlap."""

from __future__ import annotations

from collections.abc import Iterable

from hnclip.core import Box
from hnclip.prepare.proposal import Proposal

SMALLEST_SIDE = 2  # pixels; a crop of one row or column shows nothing
SHARE = (0.01, 0.80)  # of the picture's area that a region may have, as in GOAL
SAME = 0.9  # intersection over union from which on two boxes are one


def fitting_share(area: float, size: tuple[int, int]) -> bool:
    """Whether a region of this area is neither a speck nor nearly the whole picture of this width and height.

    Reference:
        GOAL's rule for masks: 1 % to 80 %.
    """
    return SHARE[0] <= area / (size[0] * size[1]) <= SHARE[1]


def usable(box: Box, size: tuple[int, int]) -> bool:
    """Whether there is something to crop. The mask of a frame has a box around all of the picture, but the whole
    picture is a candidate anyway, and never a region."""
    left, top, right, bottom = box
    return min(right - left, bottom - top) >= SMALLEST_SIDE and box != (0, 0, *size)


def area(box: Box) -> int:
    left, top, right, bottom = box
    return max(0, right - left) * max(0, bottom - top)


def overlap(first: Box, second: Box) -> float:
    """Intersection over union, 0 to 1."""
    left, top = max(first[0], second[0]), max(first[1], second[1])
    right, bottom = min(first[2], second[2]), min(first[3], second[3])
    common = area((left, top, right, bottom))
    return common / (area(first) + area(second) - common) if common else 0.0


def distinct(proposals: Iterable[Proposal]) -> list[Proposal]:
    """Without those whose box is nearly that of an earlier one."""
    kept: list[Proposal] = []
    for proposal in proposals:
        if all(overlap(proposal.box, other.box) < SAME for other in kept):
            kept.append(proposal)
    return kept
