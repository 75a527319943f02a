"""The model in the package, and the benchmark under it: the properties that `scenes` was made for."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

import pytest
import torch

from hnclip.data.batches import pad_texts, prepare
from hnclip.data.scenes import scene_records
from hnclip.evaluate.companions import caption_similarity
from hnclip.evaluate.retrieval import Evaluation, Gallery, evaluate, prepare_gallery
from hnclip.losses import clip_loss
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
        assert sum(file.stat().st_size for file in Path(directory).iterdir()) <= 12e6
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


def test_it_is_a_strong_start(model: DualEncoder, zero_shot: tuple[Gallery, Evaluation]) -> None:
    """Families are found, members are not always told apart: R@10 near its ceiling, R@1 with headroom."""
    metrics = zero_shot[1].metrics
    for direction in (metrics.text_to_image, metrics.image_to_text):
        assert direction.recall[10] > 90
        assert 30 < direction.recall[1] < 90
    assert 80 <= model.scale.item() <= 100.001


def test_captions_are_near_duplicates(zero_shot: tuple[Gallery, Evaluation]) -> None:
    gallery, found = zero_shot
    alike = caption_similarity(found.text, gallery.owner)
    assert alike.hardest >= 0.9
    assert alike.pairwise < alike.hardest
    assert gallery.truncated == 0


@torch.no_grad()
@pytest.mark.parametrize("style", ["park", "shelf"])
def test_easy_negatives_are_solved_at_micro_batch_sixteen(style: str, model: DualEncoder) -> None:
    """Batches of one member per family, as almost every batch of sixteen is: InfoNCE has little left to say."""
    records = scene_records(style, "train", families=160, members=4)[::4]
    data = prepare(records, model.text_transform, model.image_transform)
    losses = []
    for start in range(0, 160, 16):
        found = model(data.batch(range(start, start + 16)))
        losses.append(clip_loss(found.images["full"].vectors, found.texts["caption"].vectors, found.scale))
    assert torch.stack(losses).median() < 0.05
