from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from itertools import combinations, product

import numpy as np
import pytest

from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.scenes import FAMILIES, MEMBERS, scene_records
from hnclip.data.scenes.draw import SIDE, draw_scene, thing_box
from hnclip.data.scenes.phrase import _WORDINGS, WORDS, describe
from hnclip.data.scenes.world import PATTERNS, STYLES, Scene, Thing, details_apart, sample_scene

# What each detail may be called, written down apart from the wording it checks.
SIZE_WORDS = {
    "park": {"small": "small|little", "medium": "medium-sized|mid-sized", "large": "large|big"},
    "shelf": {"small": "tiny|petite", "medium": "average|moderate", "large": "huge|sizeable"},
}
PATTERN_WORDS = {
    "park": {
        "plain": "plain|no pattern|unpatterned",
        "striped": "striped|stripes",
        "dotted": "dotted|dots",
        "checked": "checked|checks",
    },
    "shelf": {
        "plain": "solid|unadorned",
        "striped": "banded|bands",
        "dotted": "speckled|speckles",
        "checked": "chequered",
    },
}
COLUMN_WORDS = {
    "park": {0: "left", 1: "centre|upper middle|lower middle|heart", 2: "right"},
    "shelf": {0: "left", 1: "midway|between the ends", 2: "right"},
}
ROW_WORDS = {
    "park": {0: "high up|top|upper", 1: "halfway|edge|middle ground|very centre|heart", 2: "foreground|bottom|lower"},
    "shelf": {0: "top", 1: "second|middle", 2: "lowest|bottom"},
}
BACKDROP_WORDS = {
    "ground": {"meadow": "meadow", "beach": "beach", "desert": "desert", "snowfield": "snow|snowfield"},
    "hour": {
        "morning": "morning",
        "midday": "midday|middle of the day",
        "sunset": "sunset|sun sets",
        "night": "night",
    },
    "sky": {
        "clear": "clear sky|without a cloud|cloudless",
        "one cloud": "one cloud|single cloud",
        "three clouds": "three clouds",
    },
    "wall": {"cream": "cream", "mint": "mint", "lilac": "lilac", "slate": "slate"},
    "wood": {"oak": "oak", "walnut": "walnut", "painted white": "painted white"},
    "edge": {"a fringed cloth": "fringed cloth", "a row of hooks": "hooks", "nothing": "nothing hangs|bare"},
}

# A difference counts as visible in pixels that change by more than this many grey levels in some channel.
VISIBLE = 24


@pytest.fixture(scope="module")
def splits():
    return {(style, split): scene_records(style, split) for style in STYLES for split in FAMILIES}


@pytest.fixture(scope="module")
def records(splits):
    return [record for split in splits.values() for record in split]


def named(words, text):
    """The options whose words appear in the text."""
    return [option for option, pattern in words.items() if re.search(rf"\b({pattern})\b", text)]


def pixels(scene, side=SIDE):
    image = draw_scene(scene)
    if side == SIDE:
        return np.asarray(image).astype(np.int16)  # [H, W, 3]
    return preprocess_image(image, ImageTransform(side)).permute(1, 2, 0).numpy().astype(np.int16)


def visibly_different(a, b):
    return np.abs(a - b).max(axis=2) > VISIBLE  # [H, W]


DIGEST = """
from hashlib import sha256
from hnclip.data.scenes import scene_records

content = sha256()
for style in ("park", "shelf"):
    for record in scene_records(style, "test", families=3):
        content.update(repr(record).encode() + record.image.key.encode() + record.image.load().tobytes())
print(content.hexdigest())
"""


def test_words_and_pixels_are_the_same_in_every_process():
    found = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_another_seed_gives_other_scenes():
    first, second = (scene_records("park", "test", families=3, seed=seed) for seed in (0, 1))
    assert {r.image.scene for r in first}.isdisjoint(r.image.scene for r in second)


@pytest.mark.parametrize("style", STYLES)
def test_fewer_families_are_a_prefix(splits, style):
    few = scene_records(style, "validation", families=7)
    assert few == splits[style, "validation"][: 7 * MEMBERS]


def test_splits_have_the_promised_sizes(splits):
    for (_, split), members in splits.items():
        assert len(members) == MEMBERS * FAMILIES[split]
        assert {record.split for record in members} == {split}


def test_no_scene_or_family_appears_twice(records):
    assert len({record.id for record in records}) == len(records)
    assert len({record.image.scene for record in records}) == len(records)
    assert len({record.image.key for record in records}) == len(records)
    assert len({record.captions[0] for record in records}) == len(records)
    assert len({record.group for record in records}) == len(records) // MEMBERS


def test_members_are_one_or_two_details_apart(records):
    for start in range(0, len(records), MEMBERS):
        family = records[start : start + MEMBERS]
        assert len({record.group for record in family}) == 1
        base, *variants = (record.image.scene for record in family)
        assert [details_apart(base, variant) for variant in variants] == [1] * len(variants)
        for a, b in combinations(variants, 2):
            assert details_apart(a, b) == details_apart(b, a)
            assert details_apart(a, b) in (1, 2)


def test_scenes_keep_one_thing_per_cell_and_kind(records):
    for record in records:
        things = record.image.scene.things
        assert 4 <= len(things) <= 6
        assert len({thing.cell for thing in things}) == len({thing.kind for thing in things}) == len(things)


def test_captions_have_the_promised_length(records):
    lengths = [len(record.captions[0].split()) for record in records]
    assert min(lengths) >= WORDS[0] == 80
    assert max(lengths) <= WORDS[1] == 150


def test_short_captions_are_one_sentence_of_at_most_fifty_words(records):
    # Fifty words leave room for the 77 tokens of an unstretched model; test_tokenizer counts the tokens.
    for record in records:
        assert record.short.count(".") == 1
        assert 5 <= len(record.short.split()) <= 50 < len(record.captions[0].split())


def test_every_thing_is_told_in_full_in_its_own_sentence(records):
    for record in records:
        scene = record.image.scene
        style = STYLES[scene.style]
        assert len(record.regions) == len(scene.things)
        for thing, region in zip(scene.things, record.regions):
            said = region.sentence
            assert said in record.captions[0]
            assert named(dict(zip(style.kinds, style.kinds)), said.lower()) == [thing.kind], said
            assert named(dict(zip(style.colours, style.colours)), said) == [thing.colour], said
            assert named(SIZE_WORDS[style.name], said.lower()) == [thing.size], said
            assert named(PATTERN_WORDS[style.name], said) == [thing.pattern], said
            assert named(COLUMN_WORDS[style.name], said.lower()) == [thing.column], said
            assert named(ROW_WORDS[style.name], said.lower()) == [thing.row], said


def test_every_aspect_of_the_backdrop_is_told(records):
    for record in records:
        for aspect, value in record.image.scene.backdrop:
            assert named(BACKDROP_WORDS[aspect], record.captions[0].lower()) == [value], record.captions[0]


def test_articles_follow_the_sound_of_the_next_word(records):
    for record in records:
        for text in (record.captions[0], record.short):
            for article, word in re.findall(r"\b(an?) (\w+)", text, flags=re.IGNORECASE):
                assert (article.lower() == "an") == (word[0].lower() in "aeiou"), text


def test_the_styles_share_no_kind_colour_or_sentence():
    park, shelf = STYLES["park"], STYLES["shelf"]
    assert set(park.kinds).isdisjoint(shelf.kinds)
    assert set(park.colours).isdisjoint(shelf.colours)
    for part in ("openings", "thing_sentences", "closings", "shorts"):
        assert set(getattr(_WORDINGS["park"], part)).isdisjoint(getattr(_WORDINGS["shelf"], part))


def test_regions_hold_all_pixels_of_their_thing(splits):
    for style in STYLES:
        for record in splits[style, "test"][: 40 * MEMBERS : MEMBERS]:
            scene = record.image.scene
            whole = pixels(scene)
            for thing, region in zip(scene.things, record.regions):
                left, top, right, bottom = region.box
                assert 0 <= left < right <= SIDE
                assert 0 <= top < bottom <= SIDE
                others = tuple(other for other in scene.things if other != thing)
                changed = (pixels(Scene(scene.style, scene.backdrop, others)) != whole).any(axis=2)  # [H, W]
                inside = changed[top:bottom, left:right].sum()
                assert inside == changed.sum()
                assert inside > 0.25 * (right - left) * (bottom - top)


def test_pictures_are_square_rgb(splits):
    for style in STYLES:
        picture = splits[style, "train"][0].image.load()
        assert (picture.mode, picture.size) == ("RGB", (SIDE, SIDE))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_members_of_a_family_look_different(splits, style, split):
    scenes = [record.image.scene for record in splits[style, split][: 80 * MEMBERS]]
    for start in range(0, len(scenes), MEMBERS):
        family = scenes[start : start + MEMBERS]
        for side, least in ((SIDE, 30), (96, 8)):
            drawn = [pixels(scene, side) for scene in family]
            for i, j in combinations(range(MEMBERS), 2):
                assert visibly_different(drawn[i], drawn[j]).sum() >= least, (side, family[i], family[j])


@pytest.mark.parametrize("style", STYLES)
def test_colour_and_pattern_show_on_the_smallest_things(style):
    domain = STYLES[style]
    backdrop = tuple((name, options[0]) for name, options in domain.backdrop.items())
    for kind in domain.kinds:
        looks = product(domain.colours, PATTERNS)
        drawn = {
            look: pixels(Scene(style, backdrop, (Thing(kind, *look, "small", 1, 1),)), side=96)[32:64, 32:64]
            for look in looks
        }
        for a, b in combinations(drawn, 2):
            if a[0] == b[0] or a[1] == b[1]:
                assert visibly_different(drawn[a], drawn[b]).sum() >= 8, (kind, a, b)


def plain_backdrops():
    """Every ground by day and by night, every sky, every wall; with a row where a thing stands before it."""
    for ground, hour in product(STYLES["park"].backdrop["ground"], ("midday", "night")):
        yield "park", (("ground", ground), ("hour", hour), ("sky", "clear")), 2
    for hour in STYLES["park"].backdrop["hour"]:
        yield "park", (("ground", "meadow"), ("hour", hour), ("sky", "clear")), 0
    for wall in STYLES["shelf"].backdrop["wall"]:
        yield "shelf", (("wall", wall), ("wood", "oak"), ("edge", "nothing")), 1


@pytest.mark.parametrize(("style", "backdrop", "row"), list(plain_backdrops()))
def test_every_thing_stands_out_from_every_backdrop(style, backdrop, row):
    empty = pixels(Scene(style, backdrop, ()))
    for kind, colour in product(STYLES[style].kinds, STYLES[style].colours):
        thing = Thing(kind, colour, "plain", "small", 1, row)
        left, top, right, bottom = thing_box(thing)
        seen = visibly_different(pixels(Scene(style, backdrop, (thing,))), empty)
        assert seen.sum() > 0.2 * (right - left) * (bottom - top), (kind, colour)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="style must be one of park, shelf, not 'city'"):
        scene_records("city", "train")
    with pytest.raises(ValueError, match="split must be one of train, validation, test, not 'dev'"):
        scene_records("park", "dev", families=1)


class Unlucky(random.Random):
    """Never chooses to compare two things, and always wants the longest caption."""

    def random(self):
        return 0.99

    def getrandbits(self, bits):  # keeps the other choices random
        return super().getrandbits(bits)

    def randint(self, low, high):
        return high


@pytest.mark.parametrize("style", STYLES)
def test_captions_get_long_enough_by_comparisons_when_nothing_else_is_left(style):
    for seed in range(300):
        scene = sample_scene(STYLES[style], random.Random(seed), things=(4, 4))
        assert len(describe(scene, Unlucky(seed)).text.split()) >= WORDS[0]
