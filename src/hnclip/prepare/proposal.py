"""Regions that somebody proposes for a picture, before any sentence is matched to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from PIL import Image

from hnclip.core import Box


@dataclass(frozen=True)
class Proposal:
    """A box, (left, top, right, bottom) in pixels of the picture, right and bottom exclusive, and who proposed it."""

    box: Box
    source: str


class Proposer(Protocol):
    """A way to find regions. It must give the same proposals for the same picture and `version`."""

    @property
    def name(self) -> str:
        """What it is called on the command line and in manifests."""

    @property
    def version(self) -> str:
        """The tool, its version and its settings: all that the proposals depend on beside the picture."""

    def __call__(self, image: Image.Image) -> list[Proposal]:
        """Boxes in the pixels of `image`, which is upright RGB. None, if there is nothing to see."""
