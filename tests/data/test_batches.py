from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from PIL import Image

from hnclip.core import Batch, ImageSource, Record, TextBatch
from hnclip.data.batching import pad_texts, prepare
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.texts import TextTransform
from hnclip.models.preprocessing import train_tokenizer

CAPTIONS = ("a dog", "a dog runs over the wide green field", "two", "a dog", "the cat sleeps")
SMALL = ImageTransform(8)


@dataclass(frozen=True)
class Grey(ImageSource):
    """A picture of one grey, named by it."""

    level: int

    @property
    def key(self):
        return str(self.level)

    def stamp(self):
        return "always the same"

    def read(self):
        return bytes([self.level])

    def decode(self, content):
        return Image.new("L", (20, 12), content[0])


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CAPTIONS, 600)


@pytest.fixture
def records():
    return [
        Record(id=f"r{i}", image=Grey(level), captions=(caption, f"another {i}"), split="train", short=f"s {i}")
        for i, (caption, level) in enumerate(zip(CAPTIONS, (10, 20, 30, 40, 20)))
    ]


@pytest.fixture
def data(records, tokenizer):
    return prepare(records, TextTransform(tokenizer, 77), SMALL, text_views=("caption", "short"))


def rows_of(texts):
    return [row[:length].tolist() for row, length in zip(texts.ids, texts.lengths)]


def test_views_hold_the_prepared_pictures_and_tokens(data, records, tokenizer):
    batch = data.batch([3, 1])
    assert len(batch) == 2
    assert len(data) == len(records)
    expected = torch.stack([preprocess_image(records[i].image.load(), SMALL) for i in (3, 1)])
    assert torch.equal(batch.images["full"], expected)
    for view, texts in {"caption": [CAPTIONS[3], CAPTIONS[1]], "short": ["s 3", "s 1"]}.items():
        assert rows_of(batch.texts[view]) == [list(row) for row in TextTransform(tokenizer, 77)(texts).ids]
    assert torch.equal(batch.ids, data.ids[[3, 1]])


def test_only_the_asked_views_are_prepared(records, tokenizer):
    batch = prepare(records, TextTransform(tokenizer, 77), SMALL).batch([0])
    assert list(batch.images) == ["full"]
    assert list(batch.texts) == ["caption"]


def test_padding_reaches_the_longest_text_and_no_further():
    texts = pad_texts([(5, 6), (5, 7, 8, 6), (6,)], pad=9)
    assert texts.ids.tolist() == [[5, 6, 9, 9], [5, 7, 8, 6], [6, 9, 9, 9]]
    assert texts.lengths.tolist() == [2, 4, 1]


def test_a_slice_trims_padding_exactly():
    texts = pad_texts([(5, 6), (5, 7, 8, 6), (6,), (5, 4, 6)], pad=9)
    part = texts[2:]
    assert part.ids.tolist() == [[6, 9, 9], [5, 4, 6]]
    assert part.lengths.tolist() == [1, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_slices_cover_everything_once_and_in_order(data, size):
    batch = data.with_margin_text(torch.arange(20.0).view(10, 2)).batch(range(5))
    chunks = [batch[start : start + size] for start in range(0, 5, size)]
    assert [len(chunk) for chunk in chunks[:-1]] == [size] * (len(chunks) - 1)
    assert torch.equal(torch.cat([chunk.ids for chunk in chunks]), batch.ids)
    assert torch.equal(torch.cat([chunk.images["full"] for chunk in chunks]), batch.images["full"])
    assert torch.equal(torch.cat([chunk.margin_text for chunk in chunks]), batch.margin_text)
    for view, texts in batch.texts.items():
        assert [row for chunk in chunks for row in rows_of(chunk.texts[view])] == rows_of(texts)


def test_equal_pictures_and_equal_captions_share_a_number(data):
    pictures, captions = data.ids.T
    assert (pictures[:, None] == pictures).nonzero().tolist() == [
        [0, 0],
        [1, 1],
        [1, 4],
        [2, 2],
        [3, 3],
        [4, 1],
        [4, 4],
    ]
    assert (captions[:, None] == captions).nonzero().tolist() == [
        [0, 0],
        [0, 3],
        [1, 1],
        [2, 2],
        [3, 0],
        [3, 3],
        [4, 4],
    ]


def test_margin_text_follows_its_rows(data):
    vectors = torch.randn(10, 3)  # two captions a record
    batch = data.with_margin_text(vectors).batch([4, 0, 2])
    assert torch.equal(batch.margin_text, vectors[[8, 0, 4]])
    assert torch.equal(batch[1:].margin_text, vectors[[0, 4]])
    assert data.batch([0]).margin_text is None
    assert data.batch([0, 1])[:1].margin_text is None


def test_margin_text_needs_one_row_per_caption(data):
    with pytest.raises(ValueError, match="vectors has 4 rows for 10 captions"):
        data.with_margin_text(torch.zeros(4, 3))


def test_an_epoch_shows_one_caption_of_each_record_with_all_that_belongs_to_it(data, records, tokenizer):
    """Tokens, identity and frozen vector of a caption stay together, whichever is drawn; short texts never change."""
    vectors = torch.arange(10.0)[:, None]
    seen = [set() for _ in records]
    for epoch in range(2):
        batch = data.with_margin_text(vectors).draw(3, epoch).batch([4, 0, 2, 1])
        for place, record in enumerate([4, 0, 2, 1]):
            row = int(batch.margin_text[place, 0])
            assert row // 2 == record
            text = records[record].captions[row % 2]
            assert rows_of(batch.texts["caption"])[place] == list(TextTransform(tokenizer, 77)([text]).ids[0])
            assert batch.ids[place].tolist() == [data.image_ids[record], data.caption_ids[row]]
            assert rows_of(batch.texts["short"])[place] == list(data.texts["short"][row])
            seen[record].add(row)
    assert [len(rows) for rows in seen] == [2, 2, 2, 0, 2]
    assert torch.equal(data.draw(3, 5).chosen, data.draw(3, 5).chosen)
    assert torch.equal(data.draw(3, 5).ids[:, 0], data.ids[:, 0])


def test_truncated_captions_are_counted_per_view(records, tokenizer):
    data = prepare(records, TextTransform(tokenizer, 6), SMALL, text_views=("caption", "short"))
    captions = [caption for record in records for caption in record.captions]
    too_long = sum(len(row) > 6 for row in TextTransform(tokenizer, 77)(captions).ids)
    assert 0 < too_long < 10
    assert data.truncated == {"caption": too_long, "short": 0}
    assert max(len(row) for row in data.texts["caption"]) == 6


def test_moves_every_tensor_to_a_device(data):
    moved = data.with_margin_text(torch.zeros(10, 3)).batch([0, 1]).to(torch.device("meta"))
    tensors = [moved.images["full"], moved.ids, moved.margin_text]
    for texts in moved.texts.values():
        tensors += [texts.ids, texts.lengths]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert isinstance(moved, Batch)
    assert all(isinstance(texts, TextBatch) for texts in moved.texts.values())


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"image_views": ("full", "poem")}, "unknown image view 'poem'; known: full, crop, edge"),
        ({}, {"text_views": ("poem",)}, "unknown text view 'poem'; known: caption, short, sentence"),
        ({"captions": ()}, {}, "record r0 has no text for this view: a caption"),
        ({"captions": ()}, {"text_views": ("short",)}, "record r0 has no text for this view: a caption"),
        ({"captions": (" ",)}, {}, r"texts\[0\] is empty"),
    ],
)
def test_says_what_is_missing(records, tokenizer, change, options, message):
    with pytest.raises(ValueError, match=message):
        prepare([replace(records[0], **change)], TextTransform(tokenizer, 77), SMALL, **options)


def test_refuses_nothing_at_all(tokenizer):
    with pytest.raises(ValueError, match="records is empty"):
        prepare([], TextTransform(tokenizer, 77), SMALL)
