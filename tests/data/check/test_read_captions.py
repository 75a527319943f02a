from __future__ import annotations

from pathlib import Path

import pytest
from small_records import record

from hnclip.data.check import captions as code
from hnclip.data.check.captions import read_captions
from hnclip.data.image_sources import FileImage
from hnclip.data.texts import TextTransform, clean_caption
from hnclip.models.preprocessing import train_tokenizer

NOWHERE = FileImage(Path("nowhere.png"))


@pytest.fixture(scope="module")
def transform():
    return TextTransform(train_tokenizer(["a red dog runs"] * 3, 600), context=10, clean=clean_caption)


def read(*captions, text_transform=None):
    return read_captions([record(str(index), NOWHERE, *found) for index, found in enumerate(captions)], text_transform)


def kinds(problems):
    return [(problem.kind, problem.where) for problem in problems]


def test_sound_captions_have_no_problems():
    found, problems = read(["A dog.", "Two  dogs\nrun"], ["Café — naïve, 東京"])
    assert problems == []
    assert [(caption.record, caption.words, caption.tokens) for caption in found] == [
        (0, 2, None),
        (0, 3, None),
        (1, 4, None),
    ]


def test_what_no_model_can_read():
    found, problems = read([], ["  \n"], ["a dog \ud83d"], ["good"], ["caf\udce9"])
    assert [caption.text for caption in found] == ["good"]
    assert kinds(problems) == [("empty caption", "1"), ("bad text", "2"), ("bad text", "4"), ("no caption", "0")]
    assert "U+D83D" in problems[1].detail
    assert "byte 0xe9" in problems[2].detail


def test_one_of_several_captions_is_named_by_its_number():
    found, problems = read(["a dog", "", "a cat"])
    assert [caption.text for caption in found] == ["a dog", "a cat"]
    assert [problem.detail for problem in problems] == ["caption 2: there is nothing in ''"]


@pytest.mark.parametrize("text", ["a caf\ufffd in Paris", "the dogâ€™s bone", "naÃ¯ve art"])
def test_letters_that_nobody_wrote(text):
    found, problems = read([f"{'word ' * 20}{text}"])
    assert len(found) == 1
    assert kinds(problems) == [("garbled caption", "0")]
    assert text[text.index(next(letter for letter in text if not letter.isascii()))] in problems[0].detail


def test_tokens_are_those_of_the_transform_before_it_cuts(transform):
    texts = ["a red dog", "a red dog runs", "zebra crossing the street"]
    found, problems = read(*([text] for text in texts), text_transform=transform)
    lengths = [len(transform.tokenizer(text)["input_ids"]) for text in texts]
    assert [caption.tokens for caption in found] == lengths
    assert max(lengths) > transform.context
    assert kinds(problems) == [("cut caption", str(index)) for index, length in enumerate(lengths) if length > 10]
    assert problems[0].detail == f"{lengths[2]} tokens, of which the model reads 10"


def test_a_caption_that_just_fits_is_not_cut(transform):
    text = "x" * 7 + " a"
    length = len(transform.tokenizer(text)["input_ids"])
    for context, cut in ((length, 0), (length - 1, 1)):
        _, problems = read([text], text_transform=TextTransform(transform.tokenizer, context))
        assert len(problems) == cut
        assert TextTransform(transform.tokenizer, context)([text]).truncated == cut


def test_captions_without_a_word_for_the_tokenizer_are_found_among_others(transform, monkeypatch):
    monkeypatch.setattr(code, "CHUNK", 3)
    texts = ["a dog", "a cat", "<|endoftext|>", "a bird", "&nbsp;", "a fish", "a cow"]
    found, problems = read(*([text] for text in texts), text_transform=transform)
    assert [caption.text for caption in found] == ["a dog", "a cat", "a bird", "a fish", "a cow"]
    assert kinds(problems) == [("empty caption", "2"), ("empty caption", "4")]
    assert "finds no word in '&nbsp;'" in problems[1].detail
