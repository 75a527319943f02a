"""Records into batches: views, padding, captions of an epoch, ids of duplicates, what records lack, parts."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from PIL import Image

from hnclip.core import Record, Region, TextBatch
from hnclip.data.batching import PairData, join_texts, prepare
from hnclip.data.image_sources import CellImage, CropImage
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.parts import PARTS, Part
from hnclip.data.scenes import scene_records
from hnclip.data.texts import TextTransform
from hnclip.models.preprocessing import train_tokenizer

CAPTIONS = ("a dog", "a dog runs over the wide green field", "two", "a dog", "the cat sleeps")
SMALL = ImageTransform(8)
TEXT_VIEWS = ("caption", "short", "sentence", "filtered")


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
    batch = data.with_margin_text(torch.arange(20.0).view(10, 2)).batch(range(5))
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
