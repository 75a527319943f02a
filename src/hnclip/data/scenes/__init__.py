"""`scenes`: a generated benchmark of dense, nearly identical captions that needs no download.

`world` says what a scene is, `draw` paints it, `phrase` describes it; this file deals them out into splits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path

from PIL import Image

from hnclip.data.records import ImageSource, Record, Region
from hnclip.data.scenes import draw
from hnclip.data.scenes.draw import SIDE, draw_scene, thing_box
from hnclip.data.scenes.phrase import describe
from hnclip.data.scenes.world import STYLES, Scene, sample_family

# Families per split. Four members each: 1,600 training pairs, 400 for validation, a test gallery of 1,000.
FAMILIES = {"train": 400, "validation": 100, "test": 250}
MEMBERS = 4
SMALL = {"train": 96, "validation": 50}  # families of the small ones: 384 training pairs, 200 for validation


@dataclass(frozen=True)
class SceneImage(ImageSource):
    """A picture that is drawn when somebody looks at it."""

    scene: Scene

    @property
    def key(self) -> str:
        return sha256(repr(self.scene).encode()).hexdigest()[:16]

    def stamp(self) -> str:
        return _drawing_code()

    def read(self) -> bytes:
        """What is drawn, and by which code: a change of either is another picture."""
        return f"{_drawing_code()} {self.scene!r}".encode()

    def decode(self, content: bytes) -> Image.Image:
        return draw_scene(self.scene)

    def shape(self) -> tuple[int, int]:
        return SIDE, SIDE


@cache
def _drawing_code() -> str:
    return sha256(Path(draw.__file__).read_bytes()).hexdigest()[:16]


def scene_records(
    style: str, split: str, *, families: int | None = None, members: int = MEMBERS, seed: int = 0
) -> list[Record]:
    """The records of one style ("park" or "shelf") and split, always the same for the same arguments.

    Every family has a random stream of its own, named by style, split, seed and number: splits share none, and a
    smaller `families` gives a prefix of a larger one.
    """
    if style not in STYLES:
        raise ValueError(f"style must be one of {', '.join(STYLES)}, not {style!r}")
    if split not in FAMILIES:
        raise ValueError(f"split must be one of {', '.join(FAMILIES)}, not {split!r}")
    families = FAMILIES[split] if families is None else families
    records = []
    for family in range(families):
        name = f"{style}/{split}/{seed}/{family}"
        rng = random.Random(name)
        for member, scene in enumerate(sample_family(STYLES[style], rng, members)):
            caption = describe(scene, rng)
            regions = zip(scene.things, caption.sentences)
            records.append(
                Record(
                    id=f"{name}/{member}",
                    image=SceneImage(scene),
                    captions=(caption.text,),
                    split=split,
                    short=caption.short,
                    regions=tuple(Region(thing_box(thing), sentence) for thing, sentence in regions),
                    group=name,
                )
            )
    return records


def with_doubles(records: Sequence[Record]) -> list[Record]:
    """The same records, but in every second family all members have the caption of the first: one text for pictures
    that differ, as copied captions are in collected data. What is said of their parts goes with the caption."""
    families: dict[str | None, tuple[int, Record]] = {}
    found = []
    for record in records:
        number, first = families.setdefault(record.group, (len(families), record))
        copied = number % 2 == 1 and first is not record
        found.append(replace(record, captions=first.captions, short=first.short, regions=()) if copied else record)
    return found
