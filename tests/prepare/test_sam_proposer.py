"""SAM's regions on a tiny untrained SAM, against transformers' own steps, and a slow choice of boxes."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hnclip.data.parts import scale_box
from hnclip.prepare.proposers import proposer, sam
from hnclip.prepare.proposers.boxes import overlap
from hnclip.prepare.proposers.sam import Mask, Sam, best_boxes, model_input, opened_sam

SIDE = 64


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SAM of two narrow layers whose masks have clear borders, of which some are steady."""
    from transformers import SamConfig, SamModel

    from hnclip.models.preprocessing import silence_transformers

    config = SamConfig(
        vision_config={
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 8,
            "window_size": 4,
            "global_attn_indexes": [1],
            "num_pos_feats": 8,
            "mlp_dim": 64,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": SIDE, "patch_size": 8, "mask_input_channels": 4},
        mask_decoder_config={
            "hidden_size": 16,
            "mlp_dim": 32,
            "num_attention_heads": 2,
            "iou_head_hidden_dim": 16,
        },
    )
    torch.manual_seed(0)
    model = SamModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1 / math.sqrt(parameter[0].numel()))
            if "hypernetworks" in name and "proj_out" in name:
                parameter.mul_(100)
    directory = tmp_path_factory.mktemp("sam")
    with silence_transformers():
        model.save_pretrained(directory)
    return directory


def picture(width: int = 100, height: int = 75, seed: int = 0) -> Image.Image:
    """Soft clouds of colour."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def lenient(weights: Path, **settings: float) -> Sam:
    """Thresholds that some masks of an untrained model pass, and some do not."""
    return Sam(weights, **{"points": 9, "least_score": 0.05, "least_steadiness": 0.5, "device": "cpu", **settings})


class Discs:
    """In place of SAM: at each point a small, a middling and a large disc, believed in the more the further right the
    point is, and the large one always a little more than the middling one."""

    device = torch.device("cpu")
    config = SimpleNamespace(vision_config=SimpleNamespace(image_size=SIDE))
    radii = (1.5, 8.0, 90.0)

    def get_image_embeddings(self, pixels: Tensor) -> Tensor:
        assert pixels.shape == (1, 3, SIDE, SIDE)
        return pixels

    def __call__(self, image_embeddings: Tensor, input_points: Tensor) -> SimpleNamespace:
        points = input_points[0, :, 0]  # [P, 2]
        centres = torch.arange(SIDE) + 0.5
        away = torch.hypot(centres[None, None] - points[:, :1, None], centres[None, :, None] - points[:, 1:, None])
        logits = torch.stack([8 * (radius - away) for radius in self.radii], dim=1)  # [P, 3, SIDE, SIDE]
        scores = points[:, :1] / SIDE + torch.tensor([0.0, 0.001, 0.002])  # [P, 3]
        return SimpleNamespace(pred_masks=logits[None], iou_scores=scores[None])


@pytest.fixture
def discs(monkeypatch: pytest.MonkeyPatch) -> Sam:
    monkeypatch.setattr(sam, "opened_sam", lambda *_: Discs())
    return Sam(Path("discs"), points=4, least_score=0.2, least_steadiness=0.2)


def slow_choice(masks: list[Mask], most: float) -> list[Mask]:
    """Strike out, from the best down, all that overlap."""
    left = sorted(masks, key=lambda mask: mask.score, reverse=True)
    taken = []
    while left:
        best, *left = left
        taken.append(best)
        left = [mask for mask in left if overlap(best.box, mask.box) <= most]
    return taken


def with_transformers(maker: Sam, image: Image.Image) -> list[Mask]:
    """The pipeline "mask-generation" step by step, as far as it goes without torchvision."""
    from transformers import SamModel
    from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

    processor = SamImageProcessorPil(
        size={"longest_edge": SIDE}, pad_size={"height": SIDE, "width": SIDE}, mask_size={"longest_edge": 16}
    )
    model = SamModel.from_pretrained(maker.weights).eval()
    crops, points, crop_images, labels = processor.generate_crop_boxes(image, SIDE, points_per_crop=maker.points)
    inputs = processor(images=crop_images, return_tensors="pt")
    with torch.no_grad():
        answer = model(
            pixel_values=inputs["pixel_values"], input_points=points.float(), input_labels=labels, multimask_output=True
        )
    logits = processor.post_process_masks(
        answer.pred_masks, inputs["original_sizes"], inputs["reshaped_input_sizes"], binarize=False
    )
    found, scores, boxes = processor.filter_masks(
        logits[0],
        answer.iou_scores[0],
        inputs["original_sizes"][0].tolist(),
        crops[0],
        maker.least_score,
        maker.least_steadiness,
    )
    return [
        Mask((left, top, right + 1, bottom + 1), sum(mask["counts"][1::2]), score)  # there right and bottom are inside
        for mask, score, (left, top, right, bottom) in zip(found, scores.tolist(), boxes.int().tolist())
    ]


@pytest.mark.parametrize("size", [(100, 75), (64, 64), (33, 80), (500, 20)])
def test_the_model_sees_what_transformers_would_show_it(size: tuple[int, int]) -> None:
    from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

    processor = SamImageProcessorPil(size={"longest_edge": SIDE}, pad_size={"height": SIDE, "width": SIDE})
    expected = processor(images=picture(*size), return_tensors="pt")
    pixels, inner = model_input(picture(*size), SIDE)
    assert torch.allclose(pixels, expected["pixel_values"], atol=1e-5)
    assert inner == tuple(expected["reshaped_input_sizes"][0].tolist())


@pytest.mark.parametrize("size", [(100, 75), (64, 64), (41, 90)])
def test_masks_are_those_of_transformers(weights: Path, size: tuple[int, int]) -> None:
    maker, image = lenient(weights), picture(*size)
    expected = with_transformers(maker, image)
    with torch.inference_mode():
        found = list(maker._masks(opened_sam(weights, "cpu"), image))
    assert 5 < len(expected) < 3 * 81  # some were refused
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.box == other.box
        assert one.area == other.area
        assert one.score == pytest.approx(other.score, abs=1e-5)


def test_proposals_are_the_best_masks_of_a_fitting_share(discs: Sam) -> None:
    """Of a grid of 4 × 4 points in 128 × 96 pixels the first column is not believed in. The small discs have less than
    1 % of the picture, the large ones all of it; what is left are the middling ones, from right to left."""
    found = discs(picture(128, 96))
    assert [proposal.source for proposal in found] == ["sam"] * 12
    for proposal, (x, y) in zip(found, [(x, y) for x in (112, 80, 48) for y in (12, 36, 60, 84)]):
        expected = (max(0, x - 16), max(0, y - 16), min(128, x + 16), min(96, y + 16))
        assert max(abs(one - other) for one, other in zip(proposal.box, expected)) <= 1
    assert discs(picture(128, 96)) == found
    # neighbours in a column overlap by a seventh to a quarter of their union
    few = replace(discs, most_overlap=0.1)
    assert 3 <= len(few(picture(128, 96))) < 12
    assert set(few(picture(128, 96))) < set(found)


def test_proposals_are_the_best_of_all_masks(discs: Sam) -> None:
    image = picture(100, 130)
    for most in (0.05, 0.3, 0.7, 1.0):
        maker = replace(discs, points=7, most_overlap=most)
        with torch.inference_mode():
            taken = slow_choice(list(maker._masks(Discs(), image)), most)
        kept = [mask.box for mask in taken if 0.01 <= mask.area / (100 * 130) <= 0.8 and mask.box != (0, 0, 100, 130)]
        assert [proposal.box for proposal in maker(image)] == kept
        assert kept


def test_thresholds_refuse(weights: Path) -> None:
    def count(**settings: float) -> int:
        with torch.inference_mode():
            return len(list(lenient(weights, **settings)._masks(opened_sam(weights, "cpu"), picture())))

    assert (
        count(least_score=-99, least_steadiness=0) > count(least_steadiness=0) > count() > count(least_steadiness=0.7)
    )
    assert count(least_score=99) == 0
    assert lenient(weights, least_score=99)(picture()) == []


def test_batches_do_not_matter(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def masks() -> list[Mask]:
        with torch.inference_mode():
            return list(lenient(weights)._masks(opened_sam(weights, "cpu"), picture()))

    expected = masks()
    monkeypatch.setattr(sam, "POINTS", 7)
    monkeypatch.setattr(sam, "MASKS", 2)
    assert [(mask.box, mask.area) for mask in masks()] == [(mask.box, mask.area) for mask in expected]


def test_large_pictures_are_looked_at_smaller(discs: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (sam.LARGE, sam.FIT) == ((4000, 3000), (2048, 1536))
    monkeypatch.setattr(sam, "LARGE", (200, 150))
    monkeypatch.setattr(sam, "FIT", (100, 75))
    seen: list[tuple[int, int]] = []
    seeing = sam.model_input
    monkeypatch.setattr(sam, "model_input", lambda image, side: seen.append(image.size) or seeing(image, side))
    for size, small in [((201, 150), (100, 75)), ((90, 151), (45, 75)), ((200, 150), (200, 150))]:
        boxes = [proposal.box for proposal in discs(picture(*size))]
        assert seen.pop() == small
        reduced = [proposal.box for proposal in discs(picture(*small))]
        assert seen.pop() == small
        assert boxes == [scale_box(box, small, size) for box in reduced]
        assert max(box[2] for box in boxes) >= size[0] - 1


@pytest.mark.parametrize("size", [(1, 1), (1, 90), (90, 1), (2, 3), (300, 5), (37, 23)])
def test_every_box_can_be_cropped(weights: Path, size: tuple[int, int]) -> None:
    for image in (picture(*size), picture(*size).convert("L"), Image.new("RGB", size, (9, 90, 200))):
        for proposal in lenient(weights, least_score=-99, least_steadiness=0)(image):
            left, top, right, bottom = proposal.box
            assert all(type(value) is int for value in proposal.box)
            assert 0 <= left <= right - 2 <= size[0] - 2
            assert 0 <= top <= bottom - 2 <= size[1] - 2
            assert proposal.box != (0, 0, *size)


def test_of_boxes_that_overlap_the_best_is_taken() -> None:
    random = np.random.default_rng(0)
    masks = []
    for _ in range(200):
        left, top, width, height = random.integers(1, 20, 4).tolist()
        masks.append(Mask((left, top, left + width, top + height), 1, float(random.integers(0, 50)) / 50))
    for most in (0.0, 0.3, 0.7, 1.0):
        assert best_boxes(masks, most) == slow_choice(masks, most)
    assert len(best_boxes(masks, 1.0)) == 200
    half = [Mask((0, 0, 10, 10), 1, 0.5), Mask((0, 0, 10, 5), 1, 0.9)]
    assert best_boxes(half, 0.5) == half[::-1]  # as much as is allowed
    assert best_boxes(half, 0.49) == half[1:]


def test_names_and_versions(weights: Path, tmp_path: Path) -> None:
    import transformers

    maker = proposer("auto", weights=weights, device="cpu")
    assert maker == proposer("sam", weights=weights, device="cpu") == Sam(weights, device="cpu")
    assert maker.name == "sam"
    assert transformers.__version__ in maker.version
    others = [lenient(weights), Sam(weights, points=16), Sam(weights, most_overlap=0.5), Sam(weights, least_score=0.5)]
    assert len({each.version for each in (maker, *others)}) == 5
    copy = pickle.loads(pickle.dumps(others[0]))
    assert copy == others[0]
    assert copy(picture()) == others[0](picture())
    # not where the weights lie, but what they are
    shutil.copytree(weights, tmp_path / "copy")
    assert Sam(tmp_path / "copy").version == maker.version
    file = tmp_path / "copy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x3f")
    assert Sam(tmp_path / "copy").version != maker.version


def test_directories_that_are_no_sam(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no directory of SAM's weights"):
        proposer("sam", weights=tmp_path / "none")
    shutil.copytree(weights, tmp_path / "sam")
    file = tmp_path / "sam" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read"):
        proposer("sam", weights=tmp_path / "sam")
    file.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        proposer("sam", weights=tmp_path / "sam")
    config = tmp_path / "sam" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "sam2"}))
    with pytest.raises(ValueError, match="says model_type 'sam2', not 'sam'"):
        proposer("sam", weights=tmp_path / "sam")


def test_settings_that_mean_nothing(weights: Path) -> None:
    with pytest.raises(ValueError, match="points must be at least 1"):
        Sam(weights, points=0)
    for wrong in ({"least_steadiness": -0.1}, {"least_steadiness": 1.0}, {"most_overlap": 1.1}):
        with pytest.raises(ValueError, match=r"least_steadiness must be in \[0, 1\)"):
            Sam(weights, **wrong)
