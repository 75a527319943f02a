"""Where a table's pictures are looked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hnclip.config import ReadConfig
from hnclip.core import ImageSource, Problem
from hnclip.data.readers.locate import Pictures, plain_name
from hnclip.data.readers.segments import FindMap, map_finder


@dataclass(frozen=True)
class Places:
    """Where the pictures that a table names are looked for: by path or base name in the place the user named, by path
    beside the table; if the user named none, by path or base name beside the table.

    `prefix` is the directory of the table below that of the whole source: the same name in two directories is not the
    same picture.
    """

    images: Pictures | None
    beside: Pictures | None
    prefix: str = ""

    def find(self, name: str) -> ImageSource:
        searched = self.images or self.beside
        if searched is None:
            raise ValueError(f"{name!r} is somewhere else: name the pictures' directory with --read.images")
        if self.images and self.beside and not self.images.exact(name):
            return self.beside.exact(name) or self.images.find(name)
        return searched.find(name)

    def has(self, name: str) -> bool:
        searched = self.images or self.beside
        return searched is not None and searched.has(name)

    def maps(self, picture: ImageSource) -> FindMap:
        """How edge maps of this picture's row are found: in any of the places, by path or base name."""
        return map_finder([place for place in (self.images, self.beside) if place is not None], picture)

    def id(self, name: str) -> str:
        """The picture's path as the table writes it, relative to the places where they can be."""
        path = plain_name(name)
        if not os.path.isabs(path):
            return path if self.images or not self.prefix else os.path.normpath(f"{self.prefix}/{path}")
        for place in (self.images, self.beside):
            root = os.path.abspath(place.root) + os.sep if place else ""
            if root and path.startswith(root):
                return path[len(root) :]
        return path


def named_pictures(read: ReadConfig, problems: list[Problem]) -> Pictures | None:
    """The place of pictures that the user named."""
    if read.images is None:
        return None
    pictures = Pictures(Path(read.images).expanduser())
    problems += pictures.problems
    return pictures
