"""Scenes into words: a dense caption of 80–150 words, a short one, and one sentence per thing.

Every detail of a scene is said in every dense caption, in wording that a seed varies; the two styles share no
sentence pattern.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from hnclip.data.scenes.world import Scene, Thing

WORDS = (80, 150)


@dataclass(frozen=True)
class Caption:
    """`text` is the dense caption; `short` fits 77 tokens; `sentences[i]` is what the caption says of thing i."""

    text: str
    short: str
    sentences: tuple[str, ...]


def describe(scene: Scene, rng: random.Random) -> Caption:
    """Put a scene into words. The same scene and generator state give the same words."""
    wording = _WORDINGS[scene.style]
    sentences = tuple(_sentence(wording.thing_sentences, thing, wording, rng) for thing in scene.things)
    opening = rng.choice(wording.openings).format(**dict(scene.backdrop), **_backdrop_phrases(scene, rng))
    order = list(range(len(sentences)))
    if rng.random() < 0.5:
        rng.shuffle(order)  # people start where they look, not always at the top left
    parts = [opening, *(sentences[i] for i in order)]
    relations = _relations(scene, wording, rng)
    closings = rng.sample(wording.closings, len(wording.closings))
    # One relation at least; then as many more sentences as the scene's own length leaves room for.
    parts.append(relations.pop())
    target = rng.randint(92, 128)
    while _words(parts) < target:
        more_relations = relations and (rng.random() < 0.7 or not closings)
        parts.append(relations.pop() if more_relations else closings.pop())
        if not relations and not closings:
            break
    return Caption(text=" ".join(parts), short=describe_briefly(scene, rng), sentences=sentences)


@dataclass(frozen=True)
class _Wording:
    openings: tuple[str, ...]
    thing_sentences: tuple[str, ...]
    places: dict[tuple[int, int], tuple[str, ...]]
    relations: dict[str, tuple[str, ...]]
    closings: tuple[str, ...]
    shorts: tuple[str, ...]
    patterns: dict[str, tuple[str, ...]]
    sizes: dict[str, tuple[str, ...]]


def _words(parts: list[str]) -> int:
    return len(" ".join(parts).split())


def _article(phrase: str) -> str:
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _look(thing: Thing, wording: _Wording, rng: random.Random) -> str:
    """Size, colour, pattern and kind as a noun phrase without its article."""
    size, pattern = rng.choice(wording.sizes[thing.size]), rng.choice(wording.patterns[thing.pattern])
    if pattern.startswith("with "):
        return f"{size} {thing.colour} {thing.kind} {pattern}"
    if rng.random() < 0.5:
        return f"{size} {pattern} {thing.colour} {thing.kind}"
    return f"{size} {thing.colour} {pattern} {thing.kind}"


def _sentence(patterns: tuple[str, ...], thing: Thing, wording: _Wording, rng: random.Random) -> str:
    look, place = _look(thing, wording, rng), rng.choice(wording.places[thing.cell])
    text = rng.choice(patterns).format(
        look=_article(look),
        place=place,
        kind=thing.kind,
        colour=thing.colour,
        size=rng.choice(wording.sizes[thing.size]),
        pattern=wording.patterns[thing.pattern][0],  # the adjective
        bare=_article(thing.kind),
    )
    return _capital(text)


def _relations(scene: Scene, wording: _Wording, rng: random.Random) -> list[str]:
    """Up to four true statements about pairs of things in the same row or column, in random order."""
    found = []
    for a in scene.things:
        for b in scene.things:
            if a.row == b.row and a.column < b.column:
                found.append(("left", a, b))
            elif a.column == b.column and a.row < b.row:
                found.append(("above", a, b))
    if not found:  # no two share a line: compare heights instead, which is always possible
        a, b = scene.things[0], scene.things[-1]
        found.append(("higher", a, b))
    chosen = rng.sample(found, min(4, len(found)))
    return [
        rng.choice(wording.relations[name]).format(a=f"{a.colour} {a.kind}", b=f"{b.colour} {b.kind}")
        for name, a, b in chosen
    ]


def describe_briefly(scene: Scene, rng: random.Random) -> str:
    """One sentence: up to three things, some of them with their place or all their attributes, and the backdrop."""
    wording = _WORDINGS[scene.style]
    phrases = []
    for thing in rng.sample(scene.things, min(len(scene.things), rng.randint(2, 3))):
        phrase = _look(thing, wording, rng) if rng.random() < 0.5 else f"{thing.colour} {thing.kind}"
        place = f" {rng.choice(wording.places[thing.cell])}" if rng.random() < 0.4 else ""
        phrases.append(_article(phrase) + place)
    listing = " and ".join(filter(None, (", ".join(phrases[:-1]), phrases[-1])))
    words = {"listing": listing, **dict(scene.backdrop), **_backdrop_phrases(scene, rng)}
    return _capital(rng.choice(wording.shorts).format(**words))


def _backdrop_phrases(scene: Scene, rng: random.Random) -> dict[str, str]:
    if scene.style == "park":
        return {
            "over": rng.choice(_SKIES[scene.aspect("sky")]),
            "when": rng.choice(_HOURS[scene.aspect("hour")]),
            "on_ground": rng.choice(_GROUNDS[scene.aspect("ground")]),
        }
    return {"trim": rng.choice(_EDGES[scene.aspect("edge")])}


_SKIES = {
    "clear": ("a clear sky", "a sky without a cloud", "a cloudless sky"),
    "one cloud": ("a sky with one cloud", "a single cloud", "a sky that holds just one cloud"),
    "three clouds": ("a sky with three clouds", "three clouds", "a sky dotted by three clouds"),
}
_HOURS = {
    "morning": ("in the morning", "in pale morning light", "early in the morning"),
    "midday": ("at midday", "in bright midday light", "in the middle of the day"),
    "sunset": ("at sunset", "in the glow of sunset", "as the sun sets"),
    "night": ("at night", "in the dark of night", "under moonlight at night"),
}
_GROUNDS = {
    "meadow": ("on a green meadow", "in a grassy meadow"),
    "beach": ("on a sandy beach", "on a pale beach"),
    "desert": ("in a reddish desert", "in a dry desert"),
    "snowfield": ("on a field of snow", "on a snowfield"),
}
_EDGES = {
    "a fringed cloth": ("a red fringed cloth hangs along the top", "its top edge wears a red fringed cloth"),
    "a row of hooks": ("a row of dark hooks lines the top", "small hooks run along the top edge"),
    "nothing": ("nothing hangs along the top", "its top edge is bare"),
}

_PARK = _Wording(
    openings=(
        "This picture was painted {when}, {on_ground}, beneath {over}.",
        "An outdoor view {on_ground} {when}, with {over} above it all.",
        "We look at an open place {on_ground} {when}; overhead there is {over}.",
        "Seen {when}, the scene is set {on_ground} and topped by {over}.",
        "A wide view shows several things {on_ground} {when} below {over}.",
    ),
    thing_sentences=(
        "there is {look} {place}.",
        "{place} stands {look}.",
        "{look} can be seen {place}.",
        "{place} you can find {look}.",
        "{look} takes its place {place}.",
        "{place} one notices {bare}; it is {size}, {colour} and {pattern}.",
        "the {kind} {place} is {colour}, {size} and {pattern}.",
    ),
    places={
        (0, 0): ("high up on the left", "at the top left", "in the upper left corner"),
        (1, 0): ("high up in the centre", "at the top centre", "in the upper middle"),
        (2, 0): ("high up on the right", "at the top right", "in the upper right corner"),
        (0, 1): ("halfway up on the left", "at the left edge", "on the left in the middle ground"),
        (1, 1): ("in the very centre", "in the heart of the view", "in the centre of the middle ground"),
        (2, 1): ("halfway up on the right", "at the right edge", "on the right in the middle ground"),
        (0, 2): ("on the left in the foreground", "at the bottom left", "in the lower left corner"),
        (1, 2): ("in the centre of the foreground", "at the bottom centre", "in the lower middle"),
        (2, 2): ("on the right in the foreground", "at the bottom right", "in the lower right corner"),
    },
    relations={
        "left": (
            "The {a} is to the left of the {b}.",
            "To the right of the {a} comes the {b}.",
            "The {b} stands further right than the {a}.",
        ),
        "above": (
            "The {a} is above the {b}.",
            "Below the {a} is the {b}.",
            "The {b} sits lower in the picture, under the {a}.",
        ),
        "higher": ("The {a} is higher in the picture than the {b}.", "The {b} is lower down than the {a}."),
    },
    closings=(
        "No people are in sight.",
        "The colours are flat and the edges are crisp, as in a picture book.",
        "Thin paths run across the ground from side to side.",
        "Everything is drawn in a simple way, without shadows.",
        "The horizon is straight and lies in the upper half of the picture.",
        "The rest of the land is empty.",
    ),
    shorts=(
        "A picture of {listing} {on_ground} {when}.",
        "{on_ground} {when}: {listing}.",
        "Painting of {listing}, {when}.",
        "{listing} {on_ground}.",
        "{listing} under {over}.",
    ),
    patterns={
        "plain": ("plain", "with no pattern", "unpatterned"),
        "striped": ("striped", "with diagonal stripes"),
        "dotted": ("dotted", "with dots"),
        "checked": ("checked", "with checks"),
    },
    sizes={"small": ("small", "little"), "medium": ("medium-sized", "mid-sized"), "large": ("large", "big")},
)
_SHELF = _Wording(
    openings=(
        "The photo shows a cabinet of {wood} wood against {wall} wallpaper, and {trim}.",
        "Three shelves made of {wood} wood hold a small collection; the wall behind is {wall} and {trim}.",
        "Here is a {wall} wall with shelves in {wood} finish, where {trim}.",
        "Against {wall} wallpaper hangs a cabinet, its boards in {wood}; {trim}.",
        "Someone arranged a few objects on {wood} shelves over {wall} wallpaper, and {trim}.",
    ),
    thing_sentences=(
        "{place} rests {look}.",
        "the collection includes {look} {place}.",
        "{look} was put {place}.",
        "{place} the owner keeps {look}.",
        "look {place} for {look}.",
        "{bare} occupies the spot {place}: {colour}, {size}, {pattern}.",
        "what lies {place} is {look}.",
    ),
    places={
        (0, 0): ("at the left end of the top shelf", "far left on the top board"),
        (1, 0): ("midway along the top shelf", "between the ends of the top board"),
        (2, 0): ("at the right end of the top shelf", "far right on the top board"),
        (0, 1): ("at the left end of the second shelf", "far left on the middle board"),
        (1, 1): ("midway along the second shelf", "between the ends of the middle board"),
        (2, 1): ("at the right end of the second shelf", "far right on the middle board"),
        (0, 2): ("at the left end of the lowest shelf", "far left on the bottom board"),
        (1, 2): ("midway along the lowest shelf", "between the ends of the bottom board"),
        (2, 2): ("at the right end of the lowest shelf", "far right on the bottom board"),
    },
    relations={
        "left": (
            "On that board the {a} comes before the {b} from left to right.",
            "Moving right from the {a} one reaches the {b}.",
            "The {b} shares a shelf with the {a}, further to the right.",
        ),
        "above": (
            "Straight over the {b} one finds the {a}.",
            "The {b} is kept beneath the {a}.",
            "A shelf or more separates the {a} from the {b} under it.",
        ),
        "higher": ("The {a} has a higher board than the {b}.", "The {b} was given a lower board than the {a}."),
    },
    closings=(
        "All of it is outlined in dark ink.",
        "Fine vertical lines mark the wallpaper.",
        "The remaining room on the boards is free.",
        "Each object faces the viewer directly.",
        "The boards are level and equally far apart.",
        "No label or price tag is visible.",
    ),
    shorts=(
        "A shelf with {listing}.",
        "{listing} in a cabinet of {wood} wood.",
        "Photo of {listing} against a {wall} wall.",
        "Shelves holding {listing}.",
        "{listing}, on display.",
    ),
    patterns={
        "plain": ("solid", "with a solid finish", "unadorned"),
        "striped": ("banded", "with slanted bands"),
        "dotted": ("speckled", "with speckles"),
        "checked": ("chequered", "with a chequered finish"),
    },
    sizes={"small": ("tiny", "petite"), "medium": ("average", "moderate"), "large": ("huge", "sizeable")},
)
_WORDINGS = {"park": _PARK, "shelf": _SHELF}
