"""Segment Anything's masks as regions: masks are predicted at a grid of points, and the good ones are kept.

Reference:
    Kirillov et al., Segment anything, 2023; GOAL's LISM. The masks are those of transformers' pipeline
    "mask-generation" on the whole image, which needs torchvision only for its last step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from mmap import ACCESS_READ, mmap
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from hnclip.core import Box
from hnclip.models.load import open_backbone
from hnclip.prepare.proposers import is_region, overlap, scale_box
from hnclip.util.device import find_device
from hnclip.util.files import read_json

LARGE, FIT = (4000, 3000), (2048, 1536)  # an image wider or higher than the first is shrunk to fit the second (GOAL)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of SAM's training images, by colour, between 0 and 1
OFFSET = 1.0  # logits by which the threshold is moved up and down to measure a mask's stability
POINTS = 64  # prompted at a time
MASKS = 16  # enlarged at a time: 0.2 GB for the largest image
_LOCK = Lock()  # one image at a time: SAM keeps its device busy


class Mask(NamedTuple):
    """A mask's tight box, area in pixels, and the intersection over union with the true mask that SAM predicts."""

    box: Box
    area: int
    score: float


@dataclass(frozen=True)
class Sam:
    """The tight boxes of the masks of transformers' `SamModel`, best first: masks with a good score that change little
    if the threshold moves, of overlapping boxes the better one, and of those with a suitable share of the image."""

    model: Any
    points: int = 32
    least_score: float = 0.88
    least_stability: float = 0.95
    most_overlap: float = 0.7

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "model"}

    def __call__(self, image: Image.Image) -> list[Box]:
        small = image.convert("RGB")  # a copy
        if image.width > LARGE[0] or image.height > LARGE[1]:
            small.thumbnail(FIT, Image.Resampling.LANCZOS, reducing_gap=None)
        with _LOCK:
            masks = select_masks(self.masks(small), self.most_overlap)
        return [scale_box(mask.box, small.size, image.size) for mask in masks if is_region(mask.area, small.size)]

    @torch.inference_mode()
    def masks(self, image: Image.Image) -> list[Mask]:
        """All stable masks with a good score, also those that are nearly the same."""
        pixels, (height, width) = model_input(image, self.model.config.vision_config.image_size)
        device = self.model.device
        embeddings = self.model.get_image_embeddings(pixels.to(device))  # [1, C, h, w]
        grid = (torch.arange(self.points, device=device) + 0.5) / self.points
        across, down = torch.meshgrid(grid * width, grid * height, indexing="xy")
        points = torch.stack([across, down], dim=-1).view(-1, 2)  # [points², 2], x and y in pixels of the input
        found: list[Mask] = []
        for some in points.split(POINTS):
            output = self.model(image_embeddings=embeddings, input_points=some[None, :, None])
            scores = output.iou_scores.flatten()  # [3·POINTS]
            good = scores > self.least_score
            if not good.any():  # torch cannot enlarge zero masks
                continue
            logits = output.pred_masks[0].flatten(0, 1)[good]  # [K, h, w]
            for part, part_scores in zip(logits.split(MASKS), scores[good].split(MASKS)):
                large = _enlarge(part, pixels.shape[-1], (height, width), (image.height, image.width))
                found += self._stable(large, part_scores)
        return found

    def _stable(self, logits: Tensor, scores: Tensor) -> Iterator[Mask]:
        """The stable ones of logits [K, H, W]."""
        inner = (logits > OFFSET).sum((1, 2))  # [K]
        outer = (logits > -OFFSET).sum((1, 2))
        stable = inner / outer > self.least_stability  # False if both are 0
        masks = logits[stable] > 0  # [K', H, W]
        rows, columns = masks.any(2).cpu().numpy(), masks.any(1).cpu().numpy()  # [K', H], [K', W]
        for row, column, size, score in zip(rows, columns, masks.sum((1, 2)).tolist(), scores[stable].tolist()):
            top, bottom = np.flatnonzero(row)[[0, -1]].tolist()
            left, right = np.flatnonzero(column)[[0, -1]].tolist()
            yield Mask((left, top, right + 1, bottom + 1), size, score)


def model_input(image: Image.Image, side: int) -> tuple[Tensor, tuple[int, int]]:
    """SAM's input and the height and width of the image in it: resized so that the longest side is `side`, normalised,
    and padded with zeros at the right or bottom. Shape: [1, 3, side, side]."""
    ratio = side / max(image.size)
    width, height = (max(1, int(length * ratio + 0.5)) for length in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    colours = torch.from_numpy(np.array(resized)).permute(2, 0, 1) / 255  # [3, height, width]
    normal = (colours - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return F.pad(normal, (0, side - width, 0, side - height))[None], (height, width)


def _enlarge(logits: Tensor, side: int, inner: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Logits [K, h, w] of SAM's square input in pixels of the image, which is its upper left part: [K, H, W]."""
    square = F.interpolate(logits[None], (side, side), mode="bilinear", align_corners=False)
    return F.interpolate(square[..., : inner[0], : inner[1]], size, mode="bilinear", align_corners=False)[0]


def select_masks(masks: Sequence[Mask], most_overlap: float) -> list[Mask]:
    """From the best score down, each mask whose box overlaps no kept one by more than `most_overlap`."""
    kept: list[Mask] = []
    for mask in sorted(masks, key=lambda mask: -mask.score):
        if all(overlap(mask.box, other.box) <= most_overlap for other in kept):
            kept.append(mask)
    return kept


def open_sam(weights: Path, device: str) -> Any:
    """transformers' `SamModel` from a directory that it was saved to."""
    from transformers import SamModel

    config = weights / "config.json"
    if not config.is_file() or read_json(config).get("model_type") != "sam":
        raise ValueError(f"{weights} is not a directory of SAM: it needs a config.json with model_type 'sam'")
    return open_backbone(weights, SamModel).eval().to(find_device(device))


def weights_hash(weights: Path) -> str:
    """A hash of the weights that does not depend on where they are stored."""
    digest = sha256((weights / "config.json").read_bytes())
    for file in sorted(weights.glob("*.safetensors")) or sorted(weights.glob("*.bin")):
        with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:
            digest.update(content)
    return digest.hexdigest()[:16]
