"""Matching against a literal twin of LISM: one crop and one sentence at a time, in loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hnclip.data.batching import pad_texts
from hnclip.data.images import preprocess_image
from hnclip.data.scenes import scene_records
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.prepare.matching import Candidates, Matched, crop_candidates, match_sentences, readable_sentences
from hnclip.prepare.proposal import Proposal


@pytest.fixture(scope="module")
def model(model_directory: Path) -> DualEncoder:
    return load(model_directory)  # in training mode, with dropout


def speckled(picture: Image.Image, seed: int) -> Image.Image:
    """Without two places that look the same: of equal crops it is chance which one is the most similar."""
    noise = np.random.default_rng(seed).integers(0, 256, (*picture.size[::-1], 3), dtype=np.uint8)
    return Image.blend(picture.convert("RGB"), Image.fromarray(noise), 0.3)


def proposals(picture: Image.Image, cells: int) -> list[Proposal]:
    columns, rows = picture.width // cells, picture.height // cells
    return [
        Proposal((x * columns, y * rows, (x + 1) * columns, (y + 1) * rows), f"cell {x} {y}")
        for y in range(cells)
        for x in range(cells)
    ]


def twin(
    model: DualEncoder, picture: Image.Image, boxes: list[Proposal], sentences: list[str]
) -> list[tuple[tuple[int, ...], str, float, str]]:
    """GOAL's steps: candidates = [full image] + crops; logits_per_image; each sentence → argmax candidate; entries of
    the full image are deleted."""
    candidates = [picture, *(picture.crop(proposal.box) for proposal in boxes)]
    model.eval()
    entries = []
    with torch.no_grad():
        scale = model.backbone.logit_scale.exp().item()
        for sentence in sentences:
            (ids,) = model.text_transform([sentence]).ids
            text = model.encode_texts(pad_texts([ids], model.text_transform.pad)).vectors[0].double()
            logits = []
            for candidate in candidates:
                pixels = preprocess_image(candidate, model.image_transform)[None]
                image = model.encode_images(pixels).vectors[0].double()
                logits.append(scale * float((image / image.norm()) @ (text / text.norm())))
            best = max(range(len(logits)), key=logits.__getitem__)
            if best > 0:
                entries.append((boxes[best - 1].box, sentence, logits[best], boxes[best - 1].source))
    model.train()
    return sorted(entries, key=lambda entry: -entry[2])


def as_entries(matched: Matched) -> list[tuple[tuple[int, ...], str, float, str]]:
    return [
        (region.box, region.sentence, region.score, source) for region, source in zip(matched.regions, matched.sources)
    ]


@pytest.mark.parametrize("batch", [1, 3, 128])
def test_matches_are_those_of_the_literal_twin(model: DualEncoder, batch: int) -> None:
    long = "a small red tree and " * 100  # cut at the model's context, no error
    expected, candidates, sentences = [], [], []
    for number, record in enumerate(scene_records("park", "train", families=2, members=4)[:5]):
        picture = speckled(record.image.load(), number)
        said = [region.sentence for region in record.regions] + ([long] if number == 1 else [])
        boxes = proposals(picture, cells=number + 1) if number else []
        candidates.append(crop_candidates(picture, boxes, model.image_transform))
        sentences.append([] if number == 3 else said)
        expected.append(twin(model, picture, boxes, sentences[-1]))
    found = [as_entries(matched) for matched in match_sentences(model, candidates, sentences, batch=batch)]
    assert model.training
    assert [len(own) for own in found] == [len(own) for own in expected]
    assert found[0] == found[3] == []
    assert 0 < sum(map(len, expected)) < sum(map(len, sentences))  # some sentences went to a whole picture
    for own, twins in zip(found, expected):
        assert [(box, sentence, source) for box, sentence, _, source in own] == [
            (box, sentence, source) for box, sentence, _, source in twins
        ]
        for (_, _, score, _), (_, _, exact, _) in zip(own, twins):
            assert score == pytest.approx(exact, abs=1e-4)
    shared = [[box for box, *_ in own] for own in found]
    assert any(len(set(boxes)) < len(boxes) for boxes in shared)  # sentences may share a crop


def test_of_equal_candidates_the_whole_picture_wins(model: DualEncoder) -> None:
    picture = Image.new("RGB", (64, 64), "green")
    candidates = crop_candidates(picture, [Proposal((0, 0, 64, 64), "all")], model.image_transform)
    assert torch.equal(candidates.pixels[0], candidates.pixels[1])
    assert match_sentences(model, [candidates], [["a small tree", "a car"]]) == [Matched((), ())]


def test_without_any_sentence_nothing_matches(model: DualEncoder) -> None:
    candidates = crop_candidates(Image.new("RGB", (64, 64)), [], model.image_transform)
    assert match_sentences(model, [candidates], [[]]) == [Matched((), ())]
    assert match_sentences(model, [], []) == []


def test_crops_show_all_that_is_in_their_box(model: DualEncoder) -> None:
    picture = scene_records("park", "train", families=1, members=4)[0].image.load().convert("RGB")
    boxes = [Proposal((10, 20, 60, 90), "a"), Proposal((0, 0, 192, 40), "b")]
    found = crop_candidates(picture, boxes, model.image_transform)
    assert found.proposals == tuple(boxes)
    for pixels, part in zip(found.pixels, [picture, picture.crop((10, 20, 60, 90)), picture.crop((0, 0, 192, 40))]):
        assert torch.equal(pixels, preprocess_image(part, model.image_transform))


def test_boxes_too_thin_for_the_model_are_left_out(model: DualEncoder) -> None:
    wide = Image.new("RGB", (80_000, 64))  # a row of it would be 80,000 · 48 pixels wide
    boxes = [Proposal((0, 0, 80_000, 1), "thin"), Proposal((0, 0, 64, 64), "square")]
    found: Candidates = crop_candidates(wide, boxes, model.image_transform)
    assert found.proposals == (boxes[1],)
    assert len(found.pixels) == 2


def test_sentences_without_a_word_are_left_out(model: DualEncoder) -> None:
    given = ["a tree", " ", "a car", "", "\n", "a tree"]
    assert readable_sentences(given, model.text_transform) == ["a tree", "a car"]
    assert readable_sentences(["b", "a", "b"], model.text_transform) == ["b", "a"]
    assert readable_sentences([], model.text_transform) == []
