"""`scenes`: a generated benchmark of dense, nearly identical captions that needs no download.

`world` defines scenes, `draw` paints them, `phrase` describes them; this file divides the domains into splits, and
makes the stream on which the bundled model was pre-trained.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from PIL import Image

from hnclip.core import ImageSource, Record, Region
from hnclip.data.scenes.draw import draw_scene, thing_box
from hnclip.data.scenes.phrase import PLAIN, WORDINGS, describe, describe_things
from hnclip.data.scenes.world import DOMAINS, STREAM, THINGS, Scene, sample_family

DRAWING = 2  # raised by hand when the same scene is drawn with other pixels
# Families and their members: 2,000 training pairs, 400 for validation, a test gallery of 1,000.
FAMILIES = {"train": 1000, "validation": 100, "test": 250}
MEMBERS = {"train": 2, "validation": 4, "test": 4}
STREAM_SHARE = 0.1  # share of the pre-training stream that is worded as the domain of its drawing
SMALL = {"train": 192, "validation": 50}  # families of the small variant: 384 training pairs, 200 for validation


@dataclass(frozen=True)
class SceneImage(ImageSource):
    """An image that is drawn when it is loaded."""

    scene: Scene

    @property
    def key(self) -> str:
        return sha256(repr(self.scene).encode()).hexdigest()[:16]

    def stamp(self) -> str:
        return f"drawing {DRAWING}"

    def read(self) -> bytes:
        """What is drawn, and by which code: a change of either is another image."""
        return f"{self.stamp()} {self.scene!r}".encode()

    def decode(self, content: bytes) -> Image.Image:
        return draw_scene(self.scene)


def scene_records(
    domain: str, split: str, *, families: int | None = None, members: int | None = None, seed: int = 0
) -> list[Record]:
    """The records of one domain ("park" or "shelf") and split, always the same for the same arguments.

    Every family has a random stream of its own, named by domain, split, seed and number: splits share none, and a
    smaller `families` gives a prefix of a larger one.
    """
    for what, name, known in (("domain", domain, DOMAINS), ("split", split, FAMILIES)):
        if name not in known:
            raise ValueError(f"{what} must be one of {', '.join(known)}, not {name!r}")
    records = []
    for family in range(FAMILIES[split] if families is None else families):
        name = f"{domain}/{split}/{seed}/{family}"
        rng = random.Random(name)
        for member, scene in enumerate(sample_family(DOMAINS[domain], rng, members or MEMBERS[split])):
            caption = describe(scene, WORDINGS[domain], rng)
            found = tuple(
                Region(thing_box(thing), sentence) for thing, sentence in zip(scene.things, caption.sentences)
            )
            id, image, captions = f"{name}/{member}", SceneImage(scene), (caption.text,)
            records.append(Record(id, image, captions, split, short=caption.short, regions=found, group=name))
    return records


def stream_records(
    name: str, pairs: int, *, members: int = 1, long: bool = True, things: tuple[int, int] = THINGS
) -> list[Record]:
    """A batch of the pre-training stream: scenes of both kinds of drawing, a function of `name`. Most are in the plain
    wording, a few in that of a domain.

    `members` scenes at a time are a family of near-duplicates, so that telling them apart takes every detail. Long
    captions are dense captions, others name just the backdrop and every thing.
    """
    records = []
    for family in range(pairs // members):
        rng = random.Random(f"stream/{name}/{family}")
        style = STREAM[rng.choice(sorted(STREAM))]
        wording = WORDINGS[style.name] if rng.random() < STREAM_SHARE else PLAIN
        for member, scene in enumerate(sample_family(style, rng, members, things)):
            text = describe(scene, wording, rng).text if long else describe_things(scene, wording, rng)
            records.append(Record(f"{name}/{family}/{member}", SceneImage(scene), (text,), split="stream"))
    return records


def with_doubles(records: Sequence[Record]) -> list[Record]:
    """The same records, but in every second family all members have the caption of the first: one text for images
    that differ, as in collected data. Short captions and regions belong to a caption, so they change with it."""
    families: dict[str | None, tuple[int, Record]] = {}
    found = []
    for record in records:
        number, first = families.setdefault(record.group, (len(families), record))
        copied = number % 2 == 1 and first is not record
        found.append(replace(record, captions=first.captions, short=first.short, regions=()) if copied else record)
    return found
