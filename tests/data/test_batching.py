"""Records into batches: views, padding, captions of an epoch, ids of duplicates; and parts: boxes into patches,
sentences and chunks into tokens, against pixels, decoded tokens and the released formulas."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from hnclip.core import Record, Region, TextBatch
from hnclip.data.batching import PairData, join_texts, prepare
from hnclip.data.image_sources import CellImage, CropImage
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.parts import PARTS, Part, PartContext, chunk_windows, patches_of
from hnclip.data.scenes import scene_records
from hnclip.data.texts import TextTransform
from hnclip.models.preprocessing import train_tokenizer
from small_families import bert_tokenizer, gemma_tokenizer, sentencepiece_tokenizer

CAPTIONS = ("a dog", "a dog runs over the wide green field", "two", "a dog", "the cat sleeps")
SMALL = ImageTransform(8)
TEXT_VIEWS = ("caption", "short", "sentence", "filtered")


def grey(level: int) -> CellImage:
    Image.new("L", (20, 12), level).save(file := io.BytesIO(), "png")
    return CellImage(f"grey {level}", 0, "1", lambda row: file.getvalue())


@pytest.fixture(scope="module")
def text_transform() -> TextTransform:
    texts = [record.captions[0] for record in scene_records("park", "train", families=1, members=4)]
    return TextTransform(train_tokenizer([*CAPTIONS, *texts], 600), 77)


@pytest.fixture
def records() -> list[Record]:
    return [
        Record(f"r{i}", grey(level), (caption, f"another {i}"), "train", short=f"s {i}")
        for i, (caption, level) in enumerate(zip(CAPTIONS, (10, 20, 30, 40, 20)))
    ]


@pytest.fixture
def data(records, text_transform) -> PairData:
    return prepare(records, text_transform, SMALL, text_views=("caption", "short"))


def rows_of(texts: TextBatch) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(texts.ids, texts.lengths)]


def test_batches_hold_the_declared_views_and_equal_contents_share_an_id(data, records, text_transform):
    batch = data.batch([3, 1])
    expected = torch.stack([preprocess_image(records[i].image.load(), SMALL) for i in (3, 1)])
    assert torch.equal(batch.images["full"], expected)
    for view, texts in {"caption": [CAPTIONS[3], CAPTIONS[1]], "short": ["s 3", "s 1"]}.items():
        assert rows_of(batch.texts[view]) == [row.tolist() for row in text_transform(texts)]
    images, captions = data.ids.T.tolist()
    assert [images.index(name) for name in images] == [0, 1, 2, 3, 1]
    assert [captions.index(name) for name in captions] == [0, 1, 2, 0, 4]
    assert all(len(set(column.tolist())) == 5 for column in data.all_different().ids.T)


@pytest.mark.parametrize("size", [1, 3])
def test_slices_cover_a_batch_once_and_in_order_and_every_tensor_moves_to_a_device(data, size):
    batch = replace(data, margin_text=torch.arange(20.0).view(10, 2)).batch(range(5))
    chunks, moved = [batch[start : start + size] for start in range(0, 5, size)], batch.to(torch.device("meta"))
    joined = join_texts([chunk.texts["caption"] for chunk in chunks], data.pad)
    assert torch.equal(joined.ids, batch.texts["caption"].ids)
    for tensor in (lambda b: b.ids, lambda b: b.images["full"], lambda b: b.margin_text, lambda b: b.text_ids["short"]):
        assert torch.equal(torch.cat([tensor(chunk) for chunk in chunks]), tensor(batch))
        assert tensor(moved).is_meta
    for view, texts in batch.texts.items():
        assert [row for chunk in chunks for row in rows_of(chunk.texts[view])] == rows_of(texts)
        assert all(tensor.is_meta for tensor in (moved.texts[view].ids, moved.texts[view].lengths))


def test_captions_of_an_epoch_come_with_their_tokens_ids_and_vectors(data, records, text_transform):
    vectors = torch.arange(10.0)[:, None]
    used: list[set[int]] = [set() for _ in records]
    for epoch in range(2):
        drawn = replace(data, margin_text=vectors).draw(3, epoch)
        batch = drawn.batch([4, 0, 2, 1])
        for place, record in enumerate([4, 0, 2, 1]):
            row = int(batch.margin_text[place, 0])
            assert row // 2 == record
            text = records[record].captions[row % 2]
            assert rows_of(batch.texts["caption"])[place] == text_transform([text])[0].tolist()
            assert rows_of(batch.texts["short"])[place] == data.texts["short"][row].tolist()
            assert batch.ids[place].tolist() == [data.image_ids[record], data.caption_ids[row]]
            used[record].add(row)
        lengths = [len(drawn.texts["caption"][row]) for row in drawn.chosen.tolist()]
        assert drawn.by_length(range(5)) == sorted(range(5), key=lengths.__getitem__)
    assert [len(rows) for rows in used] == [2, 2, 2, 0, 2]


@pytest.fixture(scope="module")
def scenes() -> list[Record]:
    """One whose best region has no sentence, one without regions, one whose best region is outside the image and whose
    filtered caption is empty, and one with two captions."""
    first, second, third, fourth = scene_records("park", "train", families=1, members=4)
    blank = replace(first.regions[0], sentence=" \n ")
    outside = Region((5000, 5000, 5010, 5010), "somewhere else")
    return [
        replace(first, regions=(blank, *first.regions[1:]), filtered=("without colours",), short="a red house"),
        replace(second, regions=(), filtered=("plain",), short="a red house"),
        replace(third, regions=(outside, *third.regions), filtered=("",)),
        replace(fourth, captions=(*fourth.captions, "another one. And more."), short=None, filtered=("a", "b")),
    ]


def test_views_without_a_region_outside_the_image_or_without_a_word_are_absent(scenes, text_transform):
    data = prepare(scenes, text_transform, SMALL, image_views=("full", "crop"), text_views=TEXT_VIEWS)
    assert {view: present.tolist() for view, present in data.present.items()} == {
        "crop": [True, False, False, True],
        "sentence": [False, False, True, True],
        "filtered": [True, True, False, True, True],
    }
    batch = data.batch([3, 1, 0])
    assert (batch.present["crop"].tolist(), batch[1:2].present["crop"].tolist()) == ([True, False, True], [False])
    assert torch.equal(batch.images["crop"][1], batch.images["full"][1])
    for place, row in ((0, 3), (2, 0)):
        expected = preprocess_image(CropImage(scenes[row].image, scenes[row].regions[0].box).load(), SMALL)
        assert torch.equal(batch.images["crop"][place], expected)


def test_texts_ids_and_parts_belong_to_the_caption_or_to_the_record(scenes, text_transform, monkeypatch):
    numbers = torch.arange(5)[:, None, None].expand(5, 1, 2).clone()  # of captions
    monkeypatch.setitem(PARTS, "dot", Part("full", lambda context: torch.eye(4, dtype=torch.bool)[:, None]))
    monkeypatch.setitem(PARTS, "count", Part("caption", lambda context: numbers))
    data = prepare(scenes, text_transform, SMALL, text_views=TEXT_VIEWS, parts=("dot", "count"), grid=2)
    drawn = {int(epoch.chosen[3]): epoch for epoch in (data.draw(seed=0, epoch=epoch) for epoch in range(2))}
    assert sorted(drawn) == [3, 4]
    for row, short in ((3, scenes[3].captions[0].split(". ")[0]), (4, "another one")):
        expected = [scenes[3].captions[row - 3], short, scenes[3].regions[0].sentence, "ab"[row - 3]]
        batch = drawn[row].batch([2, 3])
        found = {name: rows_of(texts)[1] for name, texts in batch.texts.items()}
        assert found == {name: text_transform([text])[0].tolist() for name, text in zip(TEXT_VIEWS, expected)}
        assert batch.parts["full"][:, 0].nonzero()[:, 1].tolist() == [2, 3]
        assert batch.parts["caption"][:, 0, 0].tolist() == [2, row]
    ids = data.batch([0, 1, 2]).text_ids
    assert ids["short"][0] == ids["short"][1] != ids["short"][2]
    assert len(set(ids["filtered"].tolist())) == 3


SHAPES = {"wide": (300, 120), "tall": (90, 310), "square": (130, 130), "large": (901, 640)}
PATCHES = (14, 16, 32)


def record(*regions, captions=("a dog",), filtered=()):
    return Record("a", CellImage("blank", 0, "", bytes), captions, None, regions=regions, filtered=filtered)


def region(box=(0, 0, 9, 9), sentence="a"):
    return Region(tuple(box), sentence)


def parts_of(name, records=(), *, texts=(), owner=None, tokenizer=None, context=77, clean=str, **image):
    """Parts of records, and the text transform."""
    transform = None if tokenizer is None else TextTransform(tokenizer, context, clean)
    grid, size = image.pop("grid", 16), image.pop("size", 224)
    sizes = np.array([image.pop("shape", (300, 120))] * len(records))
    owner = range(len(records)) if owner is None else owner
    return PARTS[name].find(PartContext(records, sizes, texts, owner, transform, ImageTransform(size, **image), grid))


# Boxes


def boxed(shape, box):
    """A black image with a white box."""
    pixels = np.zeros((shape[1], shape[0], 3), np.uint8)
    pixels[max(0, box[1]) : max(0, box[3]), max(0, box[0]) : max(0, box[2])] = 255
    return Image.fromarray(pixels)


def lit(image, transform, patch):
    """[grid, grid]: the patches with a pixel of the model's image that is brighter than half."""
    grid = transform.size // patch
    bright = preprocess_image(image, transform)[0, : grid * patch, : grid * patch] > 127  # [side, side]
    return bright.unflatten(0, (grid, patch)).unflatten(2, (grid, patch)).any(3).any(1)


def mask(box, shape, transform, patch):
    """[grid, grid]: the patches of a box."""
    grid = transform.size // patch
    columns, rows = patches_of(box, shape, transform, patch, grid)
    found = torch.zeros(grid, grid, dtype=torch.bool)
    found[rows.start : rows.stop, columns.start : columns.stop] = True
    return found


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
    margins = [-(-3 * side // 224) for side in shape]  # two pixels of the model's image and more
    assume(box[2] - box[0] > margins[0])  # thinner than a pixel, the filter would hide it
    assume(box[3] - box[1] > margins[1])
    shown = lit(boxed(shape, box), transform, patch)
    assert not (shown & ~mask(box, shape, transform, patch)).any()
    # Nor is there a patch too many, except those with a border of less than two pixels.
    inner = (box[0] + margins[0], box[1] + margins[1], box[2] - margins[0], box[3] - margins[1])
    if inner[0] < inner[2] and inner[1] < inner[3]:
        assert not (mask(inner, shape, transform, patch) & ~shown).any()


def released_patches(box, size, patch):
    """GOAL: corners times size / width and size / height of the box, rounded, clamped; floor and ceil."""
    ranges = []
    for start, stop in ((box[0], box[2]), (box[1], box[3])):
        first, last = (round(place * size / (stop - start)) for place in (start, stop))
        first, last = max(0, min(first, size - 1)), max(0, min(last, size))
        ranges.append(range(first // patch, (last + patch - 1) // patch))
    return [row * (size // patch) + column for row in ranges[1] for column in ranges[0]]


@given(boxes=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 99), st.integers(1, 99))))
@example(boxes=[(112, 112, 56, 56)])  # of a square image; 112 · 224 / 56 is beyond it
def test_official_regions_follow_the_released_formula(boxes):
    boxes = [(left, top, left + width, top + height) for left, top, width, height in boxes]
    found = parts_of("region_official", [record(region(box)) for box in boxes], grid=14)
    for row, box in zip(found[:, 0], boxes):
        numbers = released_patches(box, 224, 16)
        assert row.nonzero().flatten().tolist() == sorted(number for number in numbers if number < 14**2)


# Sentences

TEXT = "a red dog stands on the grass. the small cat lies under a tree, near the bench. a blue house and a green tree."
SENTENCES = [part.strip() for part in re.split(r"(?<=\.) |\.$", TEXT) if part]
KINDS = ["clip", "bert", "siglip", "siglip2"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        "clip": train_tokenizer([TEXT] * 3, 600),
        "bert": bert_tokenizer(),
        "siglip": sentencepiece_tokenizer(tmp_path_factory.mktemp("siglip")),  # slow, without offsets of its own
        "siglip2": gemma_tokenizer(),
    }


def letters(text, ids=None):
    """The letters of a text, or of tokens of a tokenizer; the vocabularies know lower case only."""
    text = text if ids is None else text.decode(list(ids), skip_special_tokens=False).replace("<unk>", "")
    return "".join(re.findall(r"[a-z]+", text.lower()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sentence", SENTENCES)
def test_sentence_spans_spell_the_sentence_and_are_truncated_with_the_caption(kind, sentence, tokenizers):
    tokenizer = tokenizers[kind]
    options = {"records": [record(region(sentence=sentence))], "texts": [TEXT], "tokenizer": tokenizer}
    ((start, stop),) = parts_of("sentence_span", context=248, **options)[0].tolist()
    transform = TextTransform(tokenizer, 248)
    ids, (before, after) = transform([TEXT])[0], transform.edges
    assert letters(tokenizer, ids[start:stop]) == letters(sentence)
    assert start >= before
    assert stop <= len(ids) - after
    for context in range(before + after + 1, stop + 4):
        found = parts_of("sentence_span", context=context, **options)[0, 0].tolist()
        room = context - after
        assert found == ([start, min(stop, room)] if start < room else [0, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.parametrize("context", [248, 24, 12])
def test_official_spans_follow_the_released_formula(kind, sentence, context, tokenizers):
    tokenizer, records = tokenizers[kind], [record(region(sentence=sentence))]
    found = parts_of("sentence_span_official", records, texts=[TEXT], tokenizer=tokenizer, context=context)
    special = len(tokenizer("")["input_ids"])
    count = len(tokenizer(TEXT[: TEXT.index(sentence)])["input_ids"])
    length = len(tokenizer(sentence)["input_ids"]) - special
    expected = (count, min(count + length, context - 1))
    if count >= context:
        expected = (max(1, context - 1 - length), context - 1)
    if expected[0] >= expected[1]:
        expected = (1, min(1 + length, context))
    assert found[0].tolist() == [list(expected)]


# Chunks


def released_windows(text):
    """StructXLIP: the words of every window."""
    found = []
    for clause in re.split(r"[.,;!?]+", text):
        words = re.findall(r"\b\w+\b", clause)
        n = len(words)
        width = 2 if n <= 4 else 3 if n <= 10 else 4 if n <= 20 else 5 if n <= 40 else 6
        found += [words[i : i + width] for i in range(n - width + 1)]
    return found[:64]


@given(st.text(st.sampled_from("ab -'.,;! \n"), max_size=300))
@example(", ".join("a " * n for n in (4, 5, 10, 11, 20, 21)))
@example("; ".join("a " * n for n in (40, 41, 90)))
def test_windows_follow_the_released_formula(text):
    found = [re.findall(r"\b\w+\b", text[start:stop]) for start, stop in chunk_windows(text)]
    assert found == released_windows(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [248, 30, 9])
def test_chunks_spell_their_windows_and_truncated_ones_are_dropped(kind, context, tokenizers):
    tokenizer, texts = tokenizers[kind], [TEXT, "a bench", None]
    transform = TextTransform(tokenizer, context)
    found = parts_of("chunk_spans", [record()] * 3, texts=texts, tokenizer=tokenizer, context=context)
    assert not found[2].any()
    for row, text in enumerate(texts[:2]):
        ids = transform([text])[0]
        spans = [span for span in found[row].tolist() if span[0] < span[1]]
        windows = ["".join(window) for window in released_windows(text)]
        assert [letters(tokenizer, ids[start:stop]) for start, stop in spans] == windows[: len(spans)]
        assert (len(spans) == len(windows)) == (transform([text]).truncated == 0)
        assert all(stop <= context - transform.edges[1] for _, stop in spans)
