"""Parts of a grid as regions: what is there when nothing else is found."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from PIL import Image

from hnclip.prepare.proposal import Proposal
from hnclip.prepare.proposers.boxes import area, fitting_share, usable


@dataclass(frozen=True)
class Grid:
    """The cells of grids laid over the picture, row by row.

    Args:
        grids: columns and rows of each grid. Where pixels cannot be shared out evenly, cells differ by one.
    """

    grids: tuple[tuple[int, int], ...] = ((2, 2), (3, 3))

    def __post_init__(self) -> None:
        if not self.grids or min(count for grid in self.grids for count in grid) < 1:
            raise ValueError(f"grids must hold columns and rows of at least 1, got {self.grids}")

    @property
    def name(self) -> str:
        return "grid"

    @property
    def version(self) -> str:
        return "grid " + " ".join(f"{columns}x{rows}" for columns, rows in self.grids)

    def __call__(self, image: Image.Image) -> list[Proposal]:
        found = []
        for columns, rows in self.grids:
            across = [image.width * column // columns for column in range(columns + 1)]
            down = [image.height * row // rows for row in range(rows + 1)]
            for top, bottom in pairwise(down):
                found += [(left, top, right, bottom) for left, right in pairwise(across)]
        return [
            Proposal(box, self.name)
            for box in found
            if fitting_share(area(box), image.size) and usable(box, image.size)
        ]
