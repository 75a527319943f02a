"""Views beside picture and caption: crops, edges, sentences; what some records lack; parts that travel along."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hnclip.core import Record, Region
from hnclip.data import batches
from hnclip.data.batching import PairData, prepare
from hnclip.data.derived_images import CropImage
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.parts import Part, PartContext
from hnclip.data.scenes import scene_records
from hnclip.data.texts import TextTransform
from hnclip.models.preprocessing import train_tokenizer

TRANSFORM = ImageTransform(16)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """One without regions, one whose best region lies beside the picture, and one with two captions."""
    first, second, third, fourth = scene_records("park", "train", families=1, members=4)
    outside = Region((5000, 5000, 5010, 5010), "somewhere else")
    return [
        replace(first, filtered=("without colours",)),
        replace(second, regions=(), filtered=("plain",)),
        replace(third, regions=(outside, *third.regions), filtered=("bare",)),
        replace(fourth, captions=(*fourth.captions, "another one. And more."), short=None, filtered=("a", "b")),
    ]


@pytest.fixture(scope="module")
def text_transform(records: list[Record]) -> TextTransform:
    return TextTransform(train_tokenizer([text for r in records for text in r.captions], 600), 77)


def made(records: list[Record], text_transform: TextTransform, **options: object) -> PairData:
    return prepare(
        records,
        text_transform,
        TRANSFORM,
        image_views=("full", "crop"),
        text_views=("caption", "short", "sentence", "filtered"),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("cached", [True, False])
def test_what_records_lack_is_marked_and_filled(
    records: list[Record], text_transform: TextTransform, tmp_path: Path, cached: bool
) -> None:
    data = made(records, text_transform, cache=tmp_path if cached else None)
    assert data.present.keys() == {"crop", "sentence"}
    assert data.present["crop"].tolist() == [True, False, False, True]  # one has none, one's lies outside
    assert data.present["sentence"].tolist() == [True, False, True, True]
    batch = data.batch([3, 1, 0])
    assert batch.present["crop"].tolist() == [True, False, True]
    for place, row in enumerate((3, 0)):
        region = records[row].regions[0]
        expected = preprocess_image(CropImage(records[row].image, region.box).load(), TRANSFORM)
        assert torch.equal(batch.images["crop"][2 * place], expected)
        assert not torch.equal(batch.images["crop"][2 * place], batch.images["full"][2 * place])
    assert torch.equal(batch.images["crop"][1], batch.images["full"][1])


def test_texts_follow_the_caption_that_is_drawn(records: list[Record], text_transform: TextTransform) -> None:
    data = made(records, text_transform)
    drawn = [data.draw(seed=0, epoch=epoch) for epoch in range(8)]
    shown = {int(epoch.chosen[3]): epoch for epoch in drawn}
    assert len(shown) == 2

    def tokens(text: str) -> list[int]:
        return list(text_transform([text]).ids[0])

    for number, epoch in enumerate(shown[row] for row in sorted(shown)):
        texts = epoch.batch([3]).texts
        captions = records[3].captions
        found = {name: texts[name].ids[0, : texts[name].lengths[0]].tolist() for name in texts}
        assert found["caption"] == tokens(captions[number])
        assert found["filtered"] == tokens(records[3].filtered[number])
        assert found["sentence"] == tokens(records[3].regions[0].sentence)
        assert len(found["short"]) <= len(found["caption"])
    assert tokens("another one.")[:-2] == found["short"][: len(tokens("another one.")[:-2])]


def test_parts_travel_with_their_view(
    records: list[Record], text_transform: TextTransform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def patches(material: PartContext) -> torch.Tensor:
        assert material.grid == 2
        return torch.eye(4, dtype=torch.bool)[:, None]  # the patch with the record's number

    def spans(material: PartContext) -> torch.Tensor:
        assert [records[row].captions[0] for row in material.owner[:3]] == list(material.texts[:3])
        return torch.arange(5)[:, None, None].expand(5, 1, 2).clone()  # the caption's number

    parts = {"dot": Part("full", patches), "count": Part("caption", spans)}
    monkeypatch.setattr(batches, "PARTS", parts)
    data = made(records, text_transform, parts=("dot", "count"), grid=2)
    for epoch in range(4):
        batch = data.draw(seed=1, epoch=epoch).batch([2, 3])
        assert batch.parts["full"][:, 0].nonzero()[:, 1].tolist() == [2, 3]
        assert batch.parts["caption"][:, 0, 0].tolist() == data.draw(seed=1, epoch=epoch).chosen[[2, 3]].tolist()
        half = batch[1:2]
        assert half.parts["full"].shape == (1, 1, 4)
        assert half.present["crop"].tolist() == [True]
        assert half.to(torch.device("cpu")).parts.keys() == {"full", "caption"}


def test_texts_that_no_model_can_read_are_absent(records: list[Record], text_transform: TextTransform) -> None:
    blank = [
        replace(record, filtered=("",) * len(record.captions)) if row == 2 else record
        for row, record in enumerate(records)
    ]
    sentence = replace(blank[0], regions=(replace(blank[0].regions[0], sentence=" \n "), *blank[0].regions[1:]))
    data = made([sentence, *blank[1:]], text_transform)
    assert data.present["filtered"].tolist() == [True, True, False, True, True]
    assert data.present["sentence"].tolist() == [False, False, True, True]


def test_texts_of_a_view_must_fit_the_captions(records: list[Record], text_transform: TextTransform) -> None:
    wrong = [replace(record, filtered=("one", "two", "three")) for record in records]
    with pytest.raises(ValueError, match="3 texts of view 'filtered' for 1"):
        made(wrong, text_transform)


def test_equal_texts_of_a_view_share_an_id(records: list[Record], text_transform: TextTransform) -> None:
    """By record for sentences, by caption for short captions; `all_different` forgets them."""
    twice = [replace(record, short="a red house") for record in records[:2]]
    data = made([*twice, *records[2:]], text_transform)
    ids = data.batch([0, 1, 2]).text_ids
    assert set(ids) == {"short", "sentence", "filtered"}
    assert ids["short"][0] == ids["short"][1] != ids["short"][2]
    assert len(set(ids["filtered"].tolist())) == 3
    assert data.all_different().batch([0, 1]).text_ids == {}
    assert torch.equal(data.batch([1, 0])[1:].text_ids["short"], ids["short"][:1])
