"""Regions proposed without a network and by SAM: with a tiny untrained SAM against transformers' own steps."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hnclip.models.preprocessing import silence_transformers
from hnclip.prepare import sam
from hnclip.prepare.proposers import SAME, felzenszwalb, grid_cells, open_proposer, overlap, union
from hnclip.prepare.sam import Mask, Sam, open_sam, select_masks, weights_hash

SIDE = 64


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SAM of two narrow layers whose masks have clear borders, of which some are stable."""
    from transformers import SamConfig, SamModel

    vision = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": SIDE, "patch_size": 8, "window_size": 4, "num_pos_feats": 8, "mlp_dim": 64}
    config = SamConfig(
        vision_config={**vision, "global_attn_indexes": [1]},
        prompt_encoder_config={"hidden_size": 16, "image_size": SIDE, "patch_size": 8, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
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


def clouds(width: int = 100, height: int = 75) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def lenient(weights: Path, **settings: Any) -> Sam:
    """Thresholds that some masks of an untrained model pass, and some do not."""
    return Sam(open_sam(weights, "cpu"), **{"points": 9, "least_score": 0.05, "least_stability": 0.5, **settings})


def transformers_masks(maker: Sam, weights: Path, image: Image.Image) -> list[Mask]:
    """The pipeline "mask-generation" step by step, as far as it goes without torchvision."""
    from transformers import SamModel
    from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

    processor = SamImageProcessorPil(
        size={"longest_edge": SIDE}, pad_size={"height": SIDE, "width": SIDE}, mask_size={"longest_edge": 16}
    )
    crops, points, crop_images, labels = processor.generate_crop_boxes(image, SIDE, points_per_crop=maker.points)
    inputs = processor(images=crop_images, return_tensors="pt")
    with torch.no_grad():
        output = SamModel.from_pretrained(weights).eval()(
            pixel_values=inputs["pixel_values"], input_points=points.float(), input_labels=labels, multimask_output=True
        )
    sizes = inputs["original_sizes"]
    logits = processor.post_process_masks(output.pred_masks, sizes, inputs["reshaped_input_sizes"], binarize=False)
    found, scores, boxes = processor.filter_masks(
        logits[0], output.iou_scores[0], sizes[0].tolist(), crops[0], maker.least_score, maker.least_stability
    )
    return [
        Mask((left, top, right + 1, bottom + 1), sum(mask["counts"][1::2]), score)  # there right and bottom are inside
        for mask, score, (left, top, right, bottom) in zip(found, scores.tolist(), boxes.int().tolist())
    ]


@pytest.mark.parametrize("size", [(100, 75), (41, 90), (500, 20)])
def test_masks_are_those_of_transformers(weights: Path, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    maker, image = lenient(weights), clouds(*size)
    expected = transformers_masks(maker, weights, image)
    assert 5 < len(expected) < 3 * 81  # some were refused
    for points, masks in ((64, 16), (7, 2)):  # batches do not matter
        monkeypatch.setattr(sam, "POINTS", points)
        monkeypatch.setattr(sam, "MASKS", masks)
        found = maker.masks(image)
        assert [(mask.box, mask.area) for mask in found] == [(mask.box, mask.area) for mask in expected]
        assert [mask.score for mask in found] == pytest.approx([mask.score for mask in expected], abs=1e-5)
    with open_proposer("sam", weights=weights, device="cpu") as (_, settings):
        assert settings["sam"]["weights"] == weights_hash(weights)
    assert {*maker(image)} <= {mask.box for mask in expected}


def test_of_overlapping_boxes_the_best_are_kept() -> None:
    random = np.random.default_rng(0)
    masks = []
    for _ in range(200):
        left, top, width, height = random.integers(1, 20, 4).tolist()
        masks.append(Mask((left, top, left + width, top + height), 1, float(random.integers(0, 50)) / 50))
    for most in (0.0, 0.3, 0.7, 1.0):
        left, kept = sorted(masks, key=lambda mask: mask.score, reverse=True), []
        while left:
            kept.append(left[0])
            left = [mask for mask in left[1:] if overlap(kept[-1].box, mask.box) <= most]
        assert select_masks(masks, most) == kept


BOTH = union(felzenszwalb, grid_cells)
boxes = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9), st.integers(1, 9)).map(
    lambda box: (box[0], box[1], box[0] + box[2], box[1] + box[3])
)


@given(boxes, boxes)
def test_overlap_counts_pixels(first: tuple[int, int, int, int], second: tuple[int, int, int, int]) -> None:
    one, other = ({(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])} for box in (first, second))
    assert overlap(first, second) == pytest.approx(len(one & other) / len(one | other))


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (3, 2), (97, 31), (4000, 3)])
def test_every_box_can_be_cropped(size: tuple[int, int]) -> None:
    for image in (clouds(*size), clouds(*size).convert("L"), Image.new("RGB", size, (9, 90, 200))):
        found = BOTH(image)
        for box in found:
            left, top, right, bottom = box
            assert 0 <= left <= right - 2 <= size[0] - 2
            assert 0 <= top <= bottom - 2 <= size[1] - 2
        assert not [box for box in found for other in found if box != other and overlap(box, other) >= SAME]


KILLED = """
import multiprocessing, os, signal
from concurrent.futures import ThreadPoolExecutor
from PIL import Image
from hnclip.prepare.proposers import felzenszwalb, segment_workers

if __name__ == "__main__":
    image = Image.linear_gradient("L").convert("RGB").resize((700, 500))
    image.paste("red", (40, 60, 300, 400))
    with segment_workers(2) as segments, ThreadPoolExecutor(2) as pool:
        same = all(found == felzenszwalb(image) for found in pool.map(segments, [image] * 8))
        print(same, len(multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_worker_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)  # a file: spawned processes import it again
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "killed.py")]
    # Returns when every process that inherited standard output has ended.
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert (killed.returncode, killed.stdout) == (-9, "True 2\n")
