"""Records into batches: views, padding, captions of an epoch, ids of duplicates, what records lack, parts."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from PIL import Image

from hnclip.core import Record, Region, TextBatch
from hnclip.data.batching import PairData, join_texts, pad_texts, prepare
from hnclip.data.image_sources import CellImage, CropImage
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.parts import PARTS, Part
from hnclip.data.scenes import scene_records
from hnclip.data.texts import TextTransform
from hnclip.models.preprocessing import train_tokenizer

CAPTIONS = ("a dog", "a dog runs over the wide green field", "two", "a dog", "the cat sleeps")
SMALL = ImageTransform(8)


def grey(level: int) -> CellImage:
    Image.new("L", (20, 12), level).save(file := io.BytesIO(), "png")
    return CellImage(f"grey {level}", "1", file.getvalue)


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


def test_batches_hold_the_declared_views(data, records, text_transform):
    batch = data.batch([3, 1])
    assert (len(batch), len(data)) == (2, 5)
    expected = torch.stack([preprocess_image(records[i].image.load(), SMALL) for i in (3, 1)])
    assert torch.equal(batch.images["full"], expected)
    for view, texts in {"caption": [CAPTIONS[3], CAPTIONS[1]], "short": ["s 3", "s 1"]}.items():
        assert rows_of(batch.texts[view]) == [row.tolist() for row in text_transform(texts)]
    plain = prepare(records, text_transform, SMALL).batch([0])
    assert (list(plain.images), list(plain.texts), plain.present, plain.text_ids) == (["full"], ["caption"], {}, {})


def test_padding_joining_and_slicing_texts():
    texts = pad_texts([(5, 6), (5, 7, 8, 6), (6,), (5, 4, 6)], pad=9)
    assert texts.ids.tolist() == [[5, 6, 9, 9], [5, 7, 8, 6], [6, 9, 9, 9], [5, 4, 6, 9]]
    assert (texts.lengths.tolist(), texts.ids.dtype) == ([2, 4, 1, 3], torch.int64)
    assert texts[2:].ids.tolist() == [[6, 9, 9], [5, 4, 6]]
    joined = join_texts([texts[:1], texts[1:2], texts[2:]], pad=9)
    for name in ("ids", "lengths", "positions"):
        assert torch.equal(getattr(joined, name), getattr(texts, name))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_slices_cover_a_batch_once_and_in_order(data, size):
    batch = data.with_margin_text(torch.arange(20.0).view(10, 2)).batch(range(5))
    chunks = [batch[start : start + size] for start in range(0, 5, size)]
    for tensor in (lambda b: b.ids, lambda b: b.images["full"], lambda b: b.margin_text, lambda b: b.text_ids["short"]):
        assert torch.equal(torch.cat([tensor(chunk) for chunk in chunks]), tensor(batch))
    for view, texts in batch.texts.items():
        assert [row for chunk in chunks for row in rows_of(chunk.texts[view])] == rows_of(texts)


def test_every_tensor_moves_to_a_device(data):
    moved = data.with_margin_text(torch.zeros(10, 3)).batch([0, 1]).to(torch.device("meta"))
    tensors = [moved.images["full"], moved.ids, moved.margin_text, moved.text_ids["short"]]
    tensors += [tensor for texts in moved.texts.values() for tensor in (texts.ids, texts.lengths, texts.positions)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_equal_images_and_captions_share_an_id(data):
    images, captions = data.ids.T.tolist()
    assert [images.index(name) for name in images] == [0, 1, 2, 3, 1]
    assert [captions.index(name) for name in captions] == [0, 1, 2, 0, 4]
    different = data.all_different()
    assert all(len(set(column.tolist())) == 5 for column in different.ids.T)
    assert different.batch([0, 1]).text_ids == {}


def test_captions_of_an_epoch_come_with_their_tokens_ids_and_vectors(data, records, text_transform):
    vectors = torch.arange(10.0)[:, None]
    used: list[set[int]] = [set() for _ in records]
    for epoch in range(2):
        drawn = data.with_margin_text(vectors).draw(3, epoch)
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
    assert data.batch([0]).margin_text is None


@pytest.mark.parametrize(
    ("change", "options", "keyword"),
    [
        (None, {}, "empty"),
        ({"captions": (" ",)}, {}, r"texts\[0\]"),
        ({"filtered": ("one", "two", "three")}, {"text_views": ("filtered",)}, "filtered"),
        ({"image": CropImage(grey(1), (50, 50, 60, 60))}, {}, "missing image"),
    ],
)
def test_invalid_records_are_errors(records, text_transform, change, options, keyword):
    with pytest.raises(ValueError, match=keyword):
        prepare([] if change is None else [replace(records[0], **change)], text_transform, SMALL, **options)


# Further views

TEXT_VIEWS = ("caption", "short", "sentence", "filtered")


@pytest.fixture(scope="module")
def scenes() -> list[Record]:
    """One without regions, one whose best region is outside the image, and one with two captions."""
    first, second, third, fourth = scene_records("park", "train", families=1, members=4)
    outside = Region((5000, 5000, 5010, 5010), "somewhere else")
    return [
        replace(first, filtered=("without colours",), short="a red house"),
        replace(second, regions=(), filtered=("plain",), short="a red house"),
        replace(third, regions=(outside, *third.regions), filtered=("bare",)),
        replace(fourth, captions=(*fourth.captions, "another one. And more."), short=None, filtered=("a", "b")),
    ]


@pytest.mark.parametrize("cached", [True, False])
def test_views_without_a_region_outside_the_image_or_without_a_word_are_absent(
    scenes, text_transform, tmp_path, cached
):
    blank = replace(scenes[0].regions[0], sentence=" \n ")
    scenes = [replace(scenes[0], regions=(blank, *scenes[0].regions[1:])), *scenes[1:]]
    scenes[2] = replace(scenes[2], filtered=("",))
    options = {"image_views": ("full", "crop"), "text_views": TEXT_VIEWS, "cache": tmp_path if cached else None}
    data = prepare(scenes, text_transform, SMALL, **options)
    assert {view: present.tolist() for view, present in data.present.items()} == {
        "crop": [True, False, False, True],
        "sentence": [False, False, True, True],
        "filtered": [True, True, False, True, True],
    }
    batch = data.batch([3, 1, 0])
    assert batch.present["crop"].tolist() == [True, False, True]
    assert torch.equal(batch.images["crop"][1], batch.images["full"][1])
    for place, row in ((0, 3), (2, 0)):
        expected = preprocess_image(CropImage(scenes[row].image, scenes[row].regions[0].box).load(), SMALL)
        assert torch.equal(batch.images["crop"][place], expected)
    assert batch[1:2].present["crop"].tolist() == [False]


def test_texts_and_ids_of_views_belong_to_the_caption_or_to_the_record(scenes, text_transform):
    data = prepare(scenes, text_transform, SMALL, text_views=TEXT_VIEWS)
    drawn = {int(epoch.chosen[3]): epoch for epoch in (data.draw(seed=0, epoch=epoch) for epoch in range(2))}
    assert sorted(drawn) == [3, 4]
    for row, short in ((3, scenes[3].captions[0].split(". ")[0]), (4, "another one")):
        expected = [scenes[3].captions[row - 3], short, scenes[3].regions[0].sentence, "ab"[row - 3]]
        found = {name: rows_of(texts)[0] for name, texts in drawn[row].batch([3]).texts.items()}
        assert found == {name: text_transform([text])[0].tolist() for name, text in zip(TEXT_VIEWS, expected)}
    ids = data.batch([0, 1, 2]).text_ids
    assert set(ids) == {"short", "sentence", "filtered"}
    assert ids["short"][0] == ids["short"][1] != ids["short"][2]
    assert len(set(ids["filtered"].tolist())) == 3


def test_parts_belong_to_their_view(scenes, text_transform, monkeypatch):
    def patches(context):
        assert (context.grid, context.sizes.tolist()) == (2, [list(scene.image.load().size) for scene in scenes])
        return torch.eye(4, dtype=torch.bool)[:, None]  # the patch with the record's number

    def spans(context):
        assert list(context.owner) == [0, 1, 2, 3, 3]
        assert context.texts[4] == scenes[3].captions[1]
        return torch.arange(5)[:, None, None].expand(5, 1, 2).clone()  # the caption's number

    monkeypatch.setitem(PARTS, "dot", Part("full", patches))
    monkeypatch.setitem(PARTS, "count", Part("caption", spans))
    data = prepare(scenes, text_transform, SMALL, parts=("dot", "count"), grid=2)
    for epoch in range(2):
        drawn = data.draw(seed=1, epoch=epoch)
        batch = drawn.batch([2, 3])
        assert batch.parts["full"][:, 0].nonzero()[:, 1].tolist() == [2, 3]
        assert batch.parts["caption"][:, 0, 0].tolist() == drawn.chosen[[2, 3]].tolist()
        assert batch[1:2].parts["full"].shape == (1, 1, 4)
