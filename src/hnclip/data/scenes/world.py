"""What a scene is: a backdrop and a few things with attributes, and how near-duplicate families are drawn.

Nothing here draws or writes: `draw` turns a scene into pixels, `phrase` into words.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

SIZES = ("small", "medium", "large")
PATTERNS = ("plain", "striped", "dotted", "checked")
COLUMNS = ROWS = 3


@dataclass(frozen=True)
class Style:
    """One domain: its own things, colours and backdrops."""

    name: str
    kinds: tuple[str, ...]
    colours: tuple[str, ...]
    backdrop: dict[str, tuple[str, ...]]


PARK = Style(
    name="park",
    kinds=("house", "tree", "tent", "car", "balloon", "umbrella", "flag", "flower", "mushroom", "sailboat"),
    colours=("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "white", "black"),
    backdrop={
        "ground": ("meadow", "beach", "desert", "snowfield"),
        "hour": ("morning", "midday", "sunset", "night"),
        "sky": ("clear", "one cloud", "three clouds"),
    },
)
SHELF = Style(
    name="shelf",
    kinds=("book", "cup", "bottle", "vase", "clock", "lamp", "candle", "box", "ball", "frame"),
    colours=("crimson", "amber", "gold", "olive", "teal", "navy", "violet", "rose", "ivory", "charcoal"),
    backdrop={
        "wall": ("cream", "mint", "lilac", "slate"),
        "wood": ("oak", "walnut", "painted white"),
        "edge": ("a fringed cloth", "a row of hooks", "nothing"),
    },
)
STYLES = {style.name: style for style in (PARK, SHELF)}


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


def details_apart(a: Scene, b: Scene) -> int:
    """How many details separate two scenes of the same family: changed things plus changed backdrop aspects."""
    return len(set(a.backdrop) - set(b.backdrop)) + len(set(a.things) - set(b.things))


def sample_scene(style: Style, rng: random.Random, things: tuple[int, int] = (4, 6)) -> Scene:
    """One scene at random, with between `things[0]` and `things[1]` objects."""
    count = rng.randint(*things)
    cells = rng.sample([(column, row) for row in range(ROWS) for column in range(COLUMNS)], count)
    kinds = rng.sample(style.kinds, count)
    return Scene(
        style=style.name,
        backdrop=tuple((name, rng.choice(options)) for name, options in style.backdrop.items()),
        things=tuple(
            Thing(kind, rng.choice(style.colours), rng.choice(PATTERNS), rng.choice(SIZES), *cell)
            for kind, cell in sorted(zip(kinds, cells), key=lambda pair: (pair[1][1], pair[1][0]))
        ),
    )


def change_one_detail(scene: Scene, rng: random.Random) -> Scene:
    """A scene that differs from this one in exactly one detail: one attribute, place or kind of one thing, or one
    aspect of the backdrop. Things carry most of it, as they do in real near-duplicate captions."""
    style = STYLES[scene.style]
    if rng.random() < 0.12:
        name, value = rng.choice(scene.backdrop)
        other = rng.choice([option for option in style.backdrop[name] if option != value])
        return replace(scene, backdrop=tuple((n, other if n == name else v) for n, v in scene.backdrop))
    index = rng.randrange(len(scene.things))
    thing = scene.things[index]
    detail = rng.choice(("colour", "colour", "pattern", "size", "kind", "cell"))
    if detail == "cell":
        taken = {thing.cell for thing in scene.things}
        free = [(c, r) for r in range(ROWS) for c in range(COLUMNS) if (c, r) not in taken]
        column, row = rng.choice(free)
        change: dict[str, Any] = {"column": column, "row": row}
    else:
        options: tuple[str, ...] = {
            "colour": style.colours,
            "pattern": PATTERNS,
            "size": SIZES,
            "kind": tuple(kind for kind in style.kinds if all(kind != t.kind for t in scene.things)),
        }[detail]
        value = rng.choice([option for option in options if option != getattr(thing, detail)])
        change = {detail: value}
    things = [*scene.things[:index], replace(thing, **change), *scene.things[index + 1 :]]
    return replace(scene, things=tuple(sorted(things, key=lambda t: (t.row, t.column))))


def sample_family(style: Style, rng: random.Random, members: int = 4) -> list[Scene]:
    """A base scene and variants one detail away from it, all different; so any two members are one or two details
    apart."""
    family = [sample_scene(style, rng)]
    while len(family) < members:
        variant = change_one_detail(family[0], rng)
        if variant not in family:
            family.append(variant)
    return family
