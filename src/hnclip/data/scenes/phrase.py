"""Scenes into words: a dense caption of 80–150 words, a short one, and one sentence per thing.

Every dense caption describes every detail of its scene, in wording that a seed varies. Each domain has a wording of its
own; the pre-training stream has a plain one (`plain.json`) for both.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hnclip.data.scenes.world import TABLES, Scene, Thing, read_table

# Templates and words by which scenes are described: `words` is the range from which the length of a caption is drawn;
# sentences are added until it is reached; `places` are phrases for a cell, "column row"; `relations` are about two
# things; `closings` are true of every scene; `patterns` and `sizes` have adjectives first.
Wording = dict[str, Any]
WORDINGS: dict[str, Wording] = {name: table["wording"] for name, table in TABLES.items()}
PLAIN: Wording = read_table("plain")


@dataclass(frozen=True)
class Caption:
    """`text` is the dense caption; `short` fits 77 tokens; `sentences[i]` is the one about thing i."""

    text: str
    short: str
    sentences: tuple[str, ...]


def describe(scene: Scene, wording: Wording, rng: random.Random) -> Caption:
    """Put a scene into words. The same scene and generator state give the same words."""
    opening, sentences = _opening_and_things(scene, wording, rng)
    order = list(range(len(sentences)))
    if rng.random() < 0.5:
        rng.shuffle(order)  # people start where they look, not always at the top left
    parts = [opening, *(sentences[i] for i in order)]
    relations = _relations(scene, wording, rng)
    closings = rng.sample(wording["closings"], len(wording["closings"]))
    # One relation at least; then as many more sentences as the scene's own length leaves room for.
    parts.append(relations.pop())
    target = rng.randint(*wording["words"])
    while len(" ".join(parts).split()) < target and (relations or closings):
        more_relations = relations and (rng.random() < 0.7 or not closings)
        parts.append(relations.pop() if more_relations else closings.pop())
    return Caption(text=" ".join(parts), short=_short(scene, wording, rng), sentences=sentences)


def describe_things(scene: Scene, wording: Wording, rng: random.Random) -> str:
    """The backdrop and the sentence of every thing, and nothing else."""
    opening, sentences = _opening_and_things(scene, wording, rng)
    return " ".join((opening, *sentences))


def _article(phrase: str) -> str:
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _opening_and_things(scene: Scene, wording: Wording, rng: random.Random) -> tuple[str, tuple[str, ...]]:
    opening = _capital(rng.choice(wording["openings"][scene.style]).format(**_backdrop(scene, wording, rng)))
    return opening, tuple(_thing_sentence(thing, wording, rng) for thing in scene.things)


def _backdrop(scene: Scene, wording: Wording, rng: random.Random) -> dict[str, str]:
    return {name: rng.choice(wording["backdrop"][name][value]) for name, value in scene.backdrop}


def _look(thing: Thing, wording: Wording, rng: random.Random) -> str:
    """Size, colour, pattern and kind as a noun phrase without its article."""
    size, pattern = rng.choice(wording["sizes"][thing.size]), rng.choice(wording["patterns"][thing.pattern])
    if pattern.startswith("with "):
        return f"{size} {thing.colour} {thing.kind} {pattern}"
    if rng.random() < 0.5:
        return f"{size} {pattern} {thing.colour} {thing.kind}"
    return f"{size} {thing.colour} {pattern} {thing.kind}"


def _place(thing: Thing, wording: Wording, rng: random.Random) -> str:
    return rng.choice(wording["places"][f"{thing.column} {thing.row}"])


def _thing_sentence(thing: Thing, wording: Wording, rng: random.Random) -> str:
    look, place = _look(thing, wording, rng), _place(thing, wording, rng)
    template = rng.choice(wording["thing_sentences"])
    size, pattern = rng.choice(wording["sizes"][thing.size]), wording["patterns"][thing.pattern][0]
    named = {"kind": thing.kind, "colour": thing.colour, "size": size, "pattern": pattern, "place": place}
    return _capital(template.format(look=_article(look), bare=_article(thing.kind), **named))


def _relations(scene: Scene, wording: Wording, rng: random.Random) -> list[str]:
    """Up to four true statements about pairs of things in the same row or column, in random order."""
    found = [
        ("left" if a.row == b.row else "above", a, b)
        for a in scene.things
        for b in scene.things
        if (a.row == b.row and a.column < b.column) or (a.column == b.column and a.row < b.row)
    ]
    if not found:  # three things in a diagonal: the first is higher than the last
        found.append(("higher", scene.things[0], scene.things[-1]))
    return [
        rng.choice(wording["relations"][name]).format(a=f"{a.colour} {a.kind}", b=f"{b.colour} {b.kind}")
        for name, a, b in rng.sample(found, min(4, len(found)))
    ]


def _short(scene: Scene, wording: Wording, rng: random.Random) -> str:
    """One sentence: up to three things, some of them with their place or all their attributes, and the backdrop."""
    phrases = []
    for thing in rng.sample(scene.things, min(len(scene.things), rng.randint(2, 3))):
        phrase = _look(thing, wording, rng) if rng.random() < 0.5 else f"{thing.colour} {thing.kind}"
        place = f" {_place(thing, wording, rng)}" if rng.random() < 0.4 else ""
        phrases.append(_article(phrase) + place)
    listing = " and ".join(filter(None, (", ".join(phrases[:-1]), phrases[-1])))
    return _capital(rng.choice(wording["shorts"]).format(listing=listing, **_backdrop(scene, wording, rng)))
