"""What a scene is: a backdrop and a few things with attributes, and how near-duplicate families are sampled.

Nothing here draws or writes: `draw` turns a scene into pixels, `phrase` into words. `park.json` and `shelf.json` hold
what there is to choose from, and how it is drawn and worded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

SIZES = ("small", "medium", "large")
PATTERNS = ("plain", "striped", "dotted", "checked")
COLUMNS = ROWS = 3
CELLS = [(column, row) for row in range(ROWS) for column in range(COLUMNS)]
THINGS = (3, 5)  # fewest and most things of a scene


def read_table(name: str) -> dict[str, Any]:
    """One of the JSON files of this package."""
    return json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))


TABLES = {name: read_table(name) for name in ("park", "shelf")}


class Style(NamedTuple):
    """What scenes of one kind of drawing are made of. `name` selects how they are drawn."""

    name: str
    kinds: list[str]
    colours: list[str]
    backdrop: dict[str, list[str]]


def _backdrop(name: str, chosen: str) -> dict[str, list[str]]:
    table = TABLES[name]
    return {aspect: list(table[chosen].get(aspect, values)) for aspect, values in table["backdrop"].items()}


# A domain is narrow: its own kinds, colours and backdrops.
DOMAINS = {
    name: Style(name, [*table["kinds"]], [*table["colours"]], _backdrop(name, "domain_backdrop"))
    for name, table in TABLES.items()
}
# The pre-training stream is broad: every kind but the unseen ones and every colour, in both kinds of drawing.
_KINDS = [kind for table in TABLES.values() for kind in table["kinds"] if kind not in table["unseen_kinds"]]
_COLOURS = [colour for table in TABLES.values() for colour in table["colours"]]
STREAM = {name: Style(name, _KINDS, _COLOURS, _backdrop(name, "stream_backdrop")) for name in TABLES}


@dataclass(frozen=True)
class Thing:
    """One object. `column` and `row` are its cell on the 3 × 3 layout, row 0 on top."""

    kind: str
    colour: str
    pattern: str
    size: str
    column: int
    row: int

    @property
    def cell(self) -> tuple[int, int]:
        return self.column, self.row


@dataclass(frozen=True)
class Scene:
    """A backdrop and things, no two of the same kind or in the same cell; equality is equality of content."""

    style: str
    backdrop: tuple[tuple[str, str], ...]
    things: tuple[Thing, ...]

    def aspect(self, name: str) -> str:
        return dict(self.backdrop)[name]


def sample_scene(style: Style, rng: random.Random, things: tuple[int, int] = THINGS) -> Scene:
    """One scene at random, with between `things[0]` and `things[1]` objects."""
    count = rng.randint(*things)
    cells = rng.sample(CELLS, count)
    kinds = rng.sample(style.kinds, count)
    return Scene(
        style=style.name,
        backdrop=tuple((name, rng.choice(options)) for name, options in style.backdrop.items()),
        things=_in_order(
            Thing(kind, rng.choice(style.colours), rng.choice(PATTERNS), rng.choice(SIZES), *cell)
            for kind, cell in zip(kinds, cells)
        ),
    )


def change_one_detail(scene: Scene, style: Style, rng: random.Random) -> Scene:
    """A scene that differs from this one in exactly one detail: one attribute, place or kind of one thing, or one
    aspect of the backdrop. Things carry most of it, as they do in real near-duplicate captions."""
    if rng.random() < 0.12:
        name, value = rng.choice(scene.backdrop)
        other = rng.choice([option for option in style.backdrop[name] if option != value])
        return replace(scene, backdrop=tuple((n, other if n == name else v) for n, v in scene.backdrop))
    index = rng.randrange(len(scene.things))
    thing = scene.things[index]
    detail = rng.choice(("colour", "colour", "pattern", "size", "kind", "cell"))
    used = (
        {getattr(other, detail) for other in scene.things} if detail in ("kind", "cell") else {getattr(thing, detail)}
    )
    options = {"colour": style.colours, "pattern": PATTERNS, "size": SIZES, "kind": style.kinds, "cell": CELLS}[detail]
    new: Any = rng.choice([option for option in options if option not in used])
    changed = replace(thing, **({"column": new[0], "row": new[1]} if detail == "cell" else {detail: new}))
    return replace(scene, things=_in_order([*scene.things[:index], changed, *scene.things[index + 1 :]]))


def sample_family(
    style: Style, rng: random.Random, members: int, things: tuple[int, int] = THINGS, details: int = 3
) -> list[Scene]:
    """A base scene and variants of it, each made by one to `details` changes, all different."""
    family = [sample_scene(style, rng, things)]
    while len(family) < members:
        variant = family[0]
        for _ in range(rng.randint(1, details)):
            variant = change_one_detail(variant, style, rng)
        if variant not in family:
            family.append(variant)
    return family


def _in_order(things: Iterable[Thing]) -> tuple[Thing, ...]:
    return tuple(sorted(things, key=lambda thing: (thing.row, thing.column)))
