"""The model in the package, and the benchmark under it: the properties that `scenes` was made for."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

import pytest
import torch

from hnclip.data.batches import pad_texts
from hnclip.data.scenes import scene_records
from hnclip.evaluate.companions import caption_similarity
from hnclip.evaluate.retrieval import Evaluation, Gallery, evaluate, prepare_gallery
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load


@pytest.fixture(scope="module")
def model() -> DualEncoder:
    return load("bundled").eval()


@pytest.fixture(scope="module", params=["park", "shelf"])
def zero_shot(request: pytest.FixtureRequest, model: DualEncoder) -> tuple[Gallery, Evaluation]:
    """The validation split: the test split is for results."""
    gallery = prepare_gallery(scene_records(request.param, "validation"), model)
    return gallery, evaluate(model, gallery)


def test_it_is_small_and_opens_without_us(model: DualEncoder) -> None:
    from transformers import CLIPModel, CLIPProcessor

    with as_file(files("hnclip.models") / "bundled") as directory:
        assert sum(file.stat().st_size for file in Path(directory).iterdir()) <= 8e6
        clip = CLIPModel.from_pretrained(directory).eval()
        processor = CLIPProcessor.from_pretrained(directory)
    record = scene_records("park", "validation", families=1)[0]
    inputs = processor(text=[record.captions[0]], images=[record.image.load()], return_tensors="pt")
    with torch.no_grad():
        output = clip(**inputs)
    gallery = prepare_gallery([record], model)
    ours = model.encode_images(gallery.pixels).vectors
    words = model.encode_texts(pad_texts(gallery.captions, model.tokenizer.pad_token_id)).vectors
    torch.testing.assert_close(output.text_embeds, words, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.image_embeds, ours, atol=5e-3, rtol=0)  # resizing rounds to a grey level
    assert model.context == 248


def test_it_finds_most_families_and_has_much_to_learn(
    model: DualEncoder, zero_shot: tuple[Gallery, Evaluation]
) -> None:
    metrics = zero_shot[1].metrics
    for direction in (metrics.text_to_image, metrics.image_to_text):
        assert direction.recall[10] > 60
        assert 10 < direction.recall[1] < 65
    assert model.scale.item() == pytest.approx(100, abs=0.01)


def test_captions_are_near_duplicates(zero_shot: tuple[Gallery, Evaluation]) -> None:
    gallery, found = zero_shot
    alike = caption_similarity(found.text, gallery.owner)
    assert alike.hardest >= 0.9
    assert alike.pairwise < alike.hardest
    assert gallery.truncated == 0
