"""Evaluation of a model on records: all captions count, batches and order do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hnclip.core import Record
from hnclip.data.scenes import scene_records
from hnclip.evaluate.retrieval import encode_gallery, evaluate, group_numbers, prepare_gallery
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load


@pytest.fixture(scope="module")
def model(model_directory: Path) -> DualEncoder:
    return load(model_directory)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Twelve pictures; every third has a second caption, its short one."""
    found = scene_records("park", "validation", families=3)
    return [
        replace(record, captions=(*record.captions, str(record.short))) if index % 3 == 0 else record
        for index, record in enumerate(found)
    ]


def test_every_caption_is_encoded_and_belongs_to_its_picture(model: DualEncoder, records: list[Record]) -> None:
    gallery = prepare_gallery(records, model)
    assert gallery.owner.tolist() == [0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11]
    image, text = encode_gallery(model, gallery, batch=5)
    assert image.shape == (12, 32)
    assert text.shape == (16, 32)
    for row in (0, 1, 7, 15):  # one at a time, in their own places although they were sorted by length
        alone = replace(gallery, captions=[gallery.captions[row]], owner=torch.tensor([0]))
        _, single = encode_gallery(model, alone)
        torch.testing.assert_close(text[row], single[0], atol=1e-6, rtol=0)


def test_the_batch_size_does_not_matter_and_the_mode_is_restored(model: DualEncoder, records: list[Record]) -> None:
    gallery = prepare_gallery(records, model)
    model.train()  # dropout is on; evaluation must switch it off and back on
    first, second = (evaluate(model, gallery, batch=batch) for batch in (3, 100))
    assert model.training
    torch.testing.assert_close(first.image, second.image, atol=1e-6, rtol=0)
    torch.testing.assert_close(first.text, second.text, atol=1e-6, rtol=0)
    model.eval()
    assert not evaluate(model, gallery).image.requires_grad
    assert not model.training


def test_the_ranks_are_those_of_the_encoded_vectors(model: DualEncoder, records: list[Record]) -> None:
    gallery = prepare_gallery(records, model)
    found = evaluate(model, gallery)
    assert found.ranks.text_to_image.shape == (16,)
    assert found.ranks.image_to_text.shape == (12,)
    scores = found.text @ found.image.T
    for row, owner in enumerate(gallery.owner):
        beaten_by = (scores[row] >= scores[row, owner] - 1e-6).sum()
        assert found.ranks.text_to_image[row] == beaten_by


def test_families_are_resampled_together(records: list[Record]) -> None:
    assert group_numbers(records).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    alone = [replace(record, group=None) for record in records]
    assert group_numbers(alone).tolist() == list(range(12))


def test_truncation_is_counted_and_nothing_is_an_error(model: DualEncoder, records: list[Record]) -> None:
    long = replace(records[0], captions=("a red house " * 200,))
    assert prepare_gallery([long, *records[1:]], model).truncated == 1
    assert prepare_gallery(records, model).truncated == 0
    with pytest.raises(ValueError, match="records is empty"):
        prepare_gallery([], model)
    with pytest.raises(ValueError, match="empty"):
        prepare_gallery([replace(records[0], captions=(" ",))], model)


def test_progress_walks_every_batch(model: DualEncoder, records: list[Record]) -> None:
    gallery = prepare_gallery(records, model)
    walked: list[int] = []

    def walk(steps: range):
        for step in steps:
            walked.append(step)
            yield step

    encode_gallery(model, gallery, batch=5, progress=walk)
    assert walked == [0, 5, 10, 0, 5, 10, 15]
