"""Boxes into patches, sentences and chunks into tokens: against pixels, decoded tokens and the released formulas."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hnclip.data.views.boxes import model_box
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from hnclip.core import ImageSource, Record, Region
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.parts import PARTS, PartContext, chunk_windows, find_sentence, patches_of
from hnclip.data.scenes import scene_records
from hnclip.data.texts import TextTransform, clean_caption
from hnclip.models.preprocessing import train_tokenizer
from small_families import bert_tokenizer, gemma_tokenizer, sentencepiece_tokenizer

SHAPES = {"wide": (300, 120), "tall": (90, 310), "square": (130, 130), "large": (901, 640)}
PATCHES = (14, 16, 32)


@dataclass(frozen=True)
class Blank(ImageSource):
    """A picture of this width and height, of which nobody looks at the pixels."""

    width: int
    height: int

    @property
    def key(self) -> str:
        return "blank"

    def stamp(self) -> str:
        return ""

    def read(self) -> bytes:
        return b""

    def decode(self, content: bytes) -> Image.Image:
        return Image.new("RGB", (self.width, self.height))


def boxed(shape, box):
    """A black picture with a white box."""
    pixels = np.zeros((shape[1], shape[0], 3), np.uint8)
    pixels[max(0, box[1]) : max(0, box[3]), max(0, box[0]) : max(0, box[2])] = 255
    return Image.fromarray(pixels)


def lit(picture, transform, patch):
    """[grid, grid]: the patches in which a pixel of the model's picture is brighter than half."""
    grid = transform.size // patch
    seen = preprocess_image(picture, transform)[0, : grid * patch, : grid * patch] > 127  # [side, side]
    return seen.unflatten(0, (grid, patch)).unflatten(2, (grid, patch)).any(3).any(1)


def mapped(box, shape, transform, patch, shrink=0.0):
    """[grid, grid]: the patches of a box, or of a box that is `shrink` pixels of the model's picture smaller."""
    grid = transform.size // patch
    found = torch.zeros(grid, grid, dtype=torch.bool)
    placed = model_box(box, shape, transform)
    if placed is not None:
        left, top, right, bottom = placed
        smaller = left + shrink, top + shrink, right - shrink, bottom - shrink
        if smaller[0] < smaller[2] and smaller[1] < smaller[3]:
            columns, rows = (
                patches_of(placed, patch, grid)
                if not shrink
                else (
                    range(math.floor(smaller[0] / patch), math.ceil(smaller[2] / patch)),
                    range(math.floor(smaller[1] / patch), math.ceil(smaller[3] / patch)),
                )
            )
            for y in rows:
                for x in columns:
                    found[y, x] = True
    return found


def material(records=(), texts=(), owner=(), tokenizer=None, context=77, clean=str, size=224, grid=16, **transform):
    text = None if tokenizer is None else TextTransform(tokenizer, context, clean)
    return PartContext(records, texts, owner, text, ImageTransform(size, **transform), grid)


def record(*regions, shape=(300, 120), captions=("a dog",), filtered=()):
    return Record("a", Blank(*shape), captions, None, regions=regions, filtered=filtered)


# Boxes -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from(PATCHES),
    st.sampled_from([{}, {"squash": True}, {"shortest": 256}]),
    st.lists(st.floats(-0.1, 1.1), min_size=4, max_size=4),
)
@example("wide", 16, {}, [0.0, 0.0, 1.0, 1.0])
@example("wide", 14, {}, [0.0, 0.0, 0.2, 1.0])  # cropped away
@example("tall", 32, {}, [0.0, 0.0, 1.0, 0.35])
@example("tall", 14, {"squash": True}, [0.0, 0.9, 1.0, 1.0])
def test_patches_of_a_box_are_those_that_show_it(name, patch, options, corners):
    shape, transform = SHAPES[name], ImageTransform(224, **options)
    xs, ys = sorted(corners[0::2]), sorted(corners[1::2])
    box = tuple(round(share * side) for share, side in zip((xs[0], ys[0], xs[1], ys[1]), shape * 2))
    assume(box[2] - box[0] > 3 * shape[0] / 224)  # thinner than a pixel, the filter would hide it
    assume(box[3] - box[1] > 3 * shape[1] / 224)
    shown, expected = lit(boxed(shape, box), transform, patch), mapped(box, shape, transform, patch)
    assert not (shown & ~expected).any()
    # Nor is there a patch too many, but for those that hold a border of less than a pixel or two.
    assert not (mapped(box, shape, transform, patch, shrink=1.5) & ~shown).any()


@settings(max_examples=60)
@given(st.data())
def test_patches_are_exact_where_pixels_are_only_repeated(data):
    patch, factor = data.draw(st.sampled_from(PATCHES)), data.draw(st.sampled_from([1, 2]))
    transform = ImageTransform(224, resample="nearest")
    long = data.draw(st.integers(224 // factor, 300))
    shape = data.draw(st.permutations([224 // factor, long]))
    left, right = sorted(data.draw(st.lists(st.integers(0, shape[0]), min_size=2, max_size=2, unique=True)))
    top, bottom = sorted(data.draw(st.lists(st.integers(0, shape[1]), min_size=2, max_size=2, unique=True)))
    box = (left, top, right, bottom)
    assert torch.equal(mapped(box, shape, transform, patch), lit(boxed(shape, box), transform, patch))


def test_a_box_that_ends_on_the_edge_of_a_patch_does_not_touch_the_next():
    transform = ImageTransform(224)
    for side in (7, 21, 49, 70, 131, 224 * 3):  # of a picture; sevenths and thirds are no finite floats
        whole = mapped((0, 0, side, side), (side, side), transform, 16)
        assert whole.all()
        if side % 7 == 0:
            part = mapped((side // 7, 0, 3 * side // 7, side), (side, side), transform, 32)
            assert part.any(0).tolist() == [False, True, True, False, False, False, False]


def test_a_border_that_no_patch_covers_is_nowhere():
    """384 pixels hold 27 patches of 14, and 6 pixels more."""
    transform = ImageTransform(384, squash=True)
    assert not mapped((380, 0, 384, 384), (384, 384), transform, 14).any()
    assert mapped((370, 0, 384, 384), (384, 384), transform, 14).any(0).nonzero().flatten().tolist() == [26]


def test_regions_are_masks_and_those_cropped_away_are_empty():
    shape = (300, 100)  # the model sees columns 100 to 200
    records = [
        record(Region((100, 0, 150, 100), "a"), Region((0, 0, 300, 100), "b"), shape=shape),
        record(Region((0, 0, 99, 100), "a"), shape=shape),
        record(Region((0, 0, 126, 25), "a"), shape=shape),
        record(shape=shape),
        record(Region((120, 50, 120, 60), "a"), shape=shape),
    ]
    found = PARTS["region"].find(material(records, size=96, grid=4))
    assert (found.shape, found.dtype, PARTS["region"].view) == ((5, 1, 16), torch.bool, "full")
    expected = torch.zeros(5, 4, 4, dtype=torch.bool)
    expected[0, :, :2] = True
    expected[2, :1, :2] = True
    assert torch.equal(found.view(5, 4, 4), expected)


def test_a_region_on_a_border_that_no_patch_covers_is_empty():
    given_ = material([record(Region((380, 0, 384, 384), "a"), shape=(384, 384))], size=384, grid=27)
    assert not PARTS["region"].find(given_).any()


def test_a_region_without_area_is_empty():
    records = [record(Region(box, "a")) for box in ((20, 5, 20, 60), (20, 60, 90, 60))]
    assert not PARTS["region"].find(material(records)).any()


def test_scenes_know_their_shape_without_being_drawn(monkeypatch):
    image = scene_records("park", "train", families=1, members=4)[0].image
    assert image.shape() == ImageSource.shape(image)
    monkeypatch.setattr("hnclip.data.scenes.draw_scene", lambda scene: pytest.fail("drawn"))
    image.shape()


def test_a_model_without_a_grid_is_an_error():
    with pytest.raises(ValueError, match="no grid"):
        PARTS["region"].find(material([record()], grid=None))


def twin_official(box, size, patch):
    """The released mapping: corners times size/width and size/height of the box, rounded, clamped; floor and ceil."""
    ranges = []
    for start, stop in ((box[0], box[2]), (box[1], box[3])):
        first, last = (round(place * size / (stop - start)) for place in (start, stop))
        first, last = max(0, min(first, size - 1)), max(0, min(last, size))
        ranges.append(range(first // patch, (last + patch - 1) // patch))
    return [row * (size // patch) + column for row in ranges[1] for column in ranges[0]]


@pytest.mark.parametrize("grid", [16, 14, 7])
@given(boxes=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 99), st.integers(1, 99))))
def test_official_regions_follow_the_released_formula(grid, boxes):
    boxes = [(left, top, left + width, top + height) for left, top, width, height in boxes]
    found = PARTS["region_official"].find(material([record(Region(box, "a")) for box in boxes], grid=grid))
    for row, box in zip(found[:, 0], boxes):
        numbers = twin_official(box, 224, 16)
        assert row.nonzero().flatten().tolist() == sorted(number for number in numbers if number < grid**2)


def test_official_and_corrected_regions_differ():
    """A box in the middle of a square image of a model with patches of 14 pixels."""
    given_ = material([record(Region((112, 112, 168, 168), "a"), shape=(224, 224))], grid=16)
    corrected = PARTS["region"].find(given_)[0, 0].view(16, 16)
    assert corrected.any(0).nonzero().flatten().tolist() == [8, 9, 10, 11]
    # 112 · 224 / 56 lies beyond the image: the last patch of a grid of 14 × 14.
    assert PARTS["region_official"].find(given_)[0, 0].nonzero().flatten().tolist() == [195]


# Sentences -------------------------------------------------------------------------------------------------------

TEXT = "A red dog stands on the grass. The small cat lies under a tree, near the bench. A blue house and a green tree."
SENTENCES = [
    "A red dog stands on the grass",
    "The small cat lies under a tree, near the bench.",
    "A blue house and a green tree",
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        "clip": train_tokenizer([TEXT.lower()] * 3, 600),
        "bert": bert_tokenizer(),
        "siglip": sentencepiece_tokenizer(tmp_path_factory.mktemp("siglip")),
        "siglip2": gemma_tokenizer(),
    }


KINDS = ["clip", "bert", "siglip", "siglip2"]


def words(text):
    return re.findall(r"[a-z]+", text.lower())


def letters(tokenizer, ids):
    """What tokens spell, without spaces and marks; vocabularies here know small letters alone."""
    return "".join(words(tokenizer.decode(list(ids), skip_special_tokens=False).replace("<unk>", "")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(3))
def test_a_sentence_span_spells_the_sentence(kind, number, tokenizers):
    tokenizer = tokenizers[kind]
    text, sentence = TEXT.lower(), SENTENCES[number].lower()
    given_ = material([record(Region((0, 0, 9, 9), sentence))], [text], [0], tokenizer, 248)
    ((start, stop),) = PARTS["sentence_span"].find(given_)[0].tolist()
    ids = given_.text_transform([text]).ids[0]
    assert letters(tokenizer, ids[start:stop]) == "".join(words(sentence))
    assert set(ids[start:stop]).isdisjoint(
        {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id} - {None}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_context_cuts_is_cut_from_the_span_too(kind, tokenizers):
    tokenizer, text = tokenizers[kind], TEXT.lower()
    whole = TextTransform(tokenizer, 248)
    before, after = whole.edges
    start, stop = (
        PARTS["sentence_span"]
        .find(material([record(Region((0, 0, 9, 9), SENTENCES[1].lower()))], [text], [0], tokenizer, 248))[0, 0]
        .tolist()
    )
    for context in range(before + after + 1, stop + 4):
        found = (
            PARTS["sentence_span"]
            .find(material([record(Region((0, 0, 9, 9), SENTENCES[1].lower()))], [text], [0], tokenizer, context))[0, 0]
            .tolist()
        )
        room = context - after
        assert found == ([start, min(stop, room)] if start < room else [0, 0])


def test_sentences_are_found_behind_the_cleaning_of_captions(tokenizers):
    tokenizer = tokenizers["clip"]
    text = "A  dog &amp; a cat.\n The   house &amp;amp; the tree. A bench."
    records = [record(Region((0, 0, 9, 9), "The house  &amp; the\ntree"))]
    given_ = material(records, [text], [0], tokenizer, 77, clean_caption)
    ((start, stop),) = PARTS["sentence_span"].find(given_)[0].tolist()
    assert letters(tokenizer, given_.text_transform([text]).ids[0][start:stop]) == "thehousethetree"


def test_rows_are_captions_and_records_own_the_sentences(tokenizers):
    tokenizer = tokenizers["clip"]
    records = [
        record(Region((0, 0, 9, 9), "a dog"), captions=("a cat. a dog.", "a house")),
        record(captions=("a dog",)),
        record(Region((0, 0, 9, 9), "a house"), Region((0, 0, 9, 9), "a dog"), captions=("a dog. a house.",)),
    ]
    texts = [caption for one in records for caption in one.captions]
    found = PARTS["sentence_span"].find(material(records, texts, [0, 0, 1, 2], tokenizer))
    assert PARTS["sentence_span"].view == "caption"
    assert found.tolist() == [[[4, 6]], [[0, 0]], [[0, 0]], [[4, 6]]]


@pytest.mark.parametrize("kind", ["clip", "bert", "siglip2"])
def test_a_mark_that_touches_a_sentence_is_not_part_of_it(kind, tokenizers):
    given_ = material([record(Region((0, 0, 9, 9), "the cat"))], ["a dog.the cat.a tree"], [0], tokenizers[kind])
    ((start, stop),) = PARTS["sentence_span"].find(given_)[0].tolist()
    before = given_.text_transform.edges[0]
    assert start - before == len(tokenizers[kind]("a dog.", add_special_tokens=False)["input_ids"])
    assert stop - start == len(tokenizers[kind]("the cat", add_special_tokens=False)["input_ids"])


def test_a_sentence_is_not_found_in_the_middle_of_a_word():
    assert find_sentence("a doghouse. a dog.", "a dog") == 12
    assert find_sentence("the sea dog. a dog", "a dog") == 13
    assert find_sentence("a dogma", "a dog") is None
    assert find_sentence("a dog", "") is None
    assert find_sentence('he says "a dog."', '"a dog."') == 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("context", [248, 24, 12])
def test_official_spans_follow_the_released_formula(kind, number, context, tokenizers):
    tokenizer, text, sentence = tokenizers[kind], TEXT.lower(), SENTENCES[number].lower()
    given_ = material([record(Region((0, 0, 9, 9), sentence))], [text], [0], tokenizer, context)
    ((start, stop),) = PARTS["sentence_span_official"].find(given_)[0].tolist()
    special = len(tokenizer("")["input_ids"])
    count = len(tokenizer(text[: text.index(sentence)])["input_ids"])
    length = len(tokenizer(sentence)["input_ids"]) - special
    if count >= context:
        expected = (max(1, context - 1 - length), context - 1)
    else:
        expected = (count, min(count + length, context - 1))
    assert (start, stop) == (expected if expected[0] < expected[1] else (1, min(1 + length, context)))


def test_official_spans_are_one_token_late(tokenizers):
    """The first word is missing, and the stop behind the sentence is there instead."""
    for number, sentence in enumerate(SENTENCES):
        given_ = material([record(Region((0, 0, 9, 9), sentence))], [TEXT], [0], tokenizers["clip"], 248)
        corrected, late = (PARTS[name].find(given_)[0, 0] for name in ("sentence_span", "sentence_span_official"))
        assert torch.equal(late, corrected + 1), number


def test_official_spans_are_never_left_out(tokenizers):
    records = [record(Region((0, 0, 9, 9), "a blue house")), record()]
    found = PARTS["sentence_span_official"].find(
        material(records, ["a dog on the grass", "a cat"], [0, 1], tokenizers["clip"])
    )
    assert found.tolist() == [[[1, 4]], [[0, 0]]]  # not in the caption: the first tokens; no region: nothing to find


def test_scenes_have_all_their_sentences():
    records = scene_records("park", "train", families=4, members=4) + scene_records(
        "shelf", "train", families=4, members=4
    )
    texts = [one.captions[0] for one in records]
    tokenizer = train_tokenizer(texts, 700)
    given_ = material(records, texts, range(len(records)), tokenizer, 248)
    spans = PARTS["sentence_span"].find(given_)[:, 0]
    assert (spans[:, 0] < spans[:, 1]).all()
    for one, ids, (start, stop) in zip(records, given_.text_transform(texts).ids, spans.tolist()):
        assert letters(tokenizer, ids[start:stop]) == "".join(words(one.regions[0].sentence))


# Chunks ----------------------------------------------------------------------------------------------------------


def twin_windows(text):
    """Words of every window, by the rules as they are written down."""
    found = []
    for clause in re.split(r"[.,;!?]+", text):
        split = re.findall(r"\b\w+\b", clause)
        n = len(split)
        width = 2 if n <= 4 else 3 if n <= 10 else 4 if n <= 20 else 5 if n <= 40 else 6
        found += [split[i : i + width] for i in range(n - width + 1)]
    return found[:64]


@given(st.text(st.sampled_from("ab -'.,;! \n"), max_size=300))
@example(" ".join(["a"] * 4 + [","] + ["b"] * 5 + [","] + ["a"] * 10 + ["."] + ["b"] * 11))
@example(" ".join(["a"] * 20 + [";"] + ["b"] * 21))
@example(" ".join(["a"] * 40))
@example(" ".join(["a"] * 41))
@example(" ".join(["a"] * 90))
def test_windows_slide_through_clauses(text):
    spans = list(chunk_windows(text))
    assert [re.findall(r"\b\w+\b", text[start:stop]) for start, stop in spans] == twin_windows(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [248, 30, 9])
def test_chunks_spell_their_windows_and_cut_ones_are_dropped(kind, context, tokenizers):
    tokenizer, texts = tokenizers[kind], [TEXT.lower(), "a bench", None]
    given_ = material([record()] * 3, texts, [0, 1, 2], tokenizer, context)
    found = PARTS["chunk_spans"].find(given_)
    assert PARTS["chunk_spans"].view == "filtered"
    assert not found[2].any()
    for row, text in enumerate(texts[:2]):
        whole, ids = tokenizer(text)["input_ids"], given_.text_transform([text]).ids[0]
        spans = [span for span in found[row].tolist() if span[0] < span[1]]
        spelled = [letters(tokenizer, ids[start:stop]) for start, stop in spans]
        windows = ["".join(window) for window in twin_windows(text)]
        assert spelled == windows[: len(spans)]  # cut ones are the last
        if len(whole) <= context:
            assert len(spans) == len(windows)
        else:
            assert len(spans) < len(windows)
            assert all(stop <= context - given_.text_transform.edges[1] for _, stop in spans)
    assert found.shape[1] == max(1, int((found[..., 0] < found[..., 1]).sum(1).max()))


def test_a_word_removed_before_it_misaligns_a_chunk(tokenizers):
    tokenizer = tokenizers["clip"]
    captions = ("a red dog stands near the bench", "the cat")
    records = [
        record(captions=captions, filtered=("a dog stands near the bench", "the cat")),
        record(captions=("a tree",)),
    ]
    texts = [*captions, "a tree"]
    filtered = ["a dog stands near the bench", "the cat", None]
    right = PARTS["chunk_spans"].find(material(records, filtered, [0, 0, 1], tokenizer))
    wrong = PARTS["chunk_spans_official"].find(material(records, texts, [0, 0, 1], tokenizer))
    assert PARTS["chunk_spans_official"].view == "caption"
    assert torch.equal(right, wrong)
    transform = TextTransform(tokenizer, 77)
    start, stop = wrong[0, 0].tolist()
    assert letters(tokenizer, transform([captions[0]]).ids[0][start:stop]) == "areddog"
    assert letters(tokenizer, transform([filtered[0]]).ids[0][start:stop]) == "adogstands"
