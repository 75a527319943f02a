"""SAM's masks as regions: a grid of points is asked for masks, and the good ones are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from hnclip.core import Box
from hnclip.data.parts import scale_box
from hnclip.data.views.fingerprint import fingerprint
from hnclip.data.views.shrink import shrunk
from hnclip.models.load import open_backbone
from hnclip.prepare.proposal import Proposal
from hnclip.prepare.proposers.boxes import fitting_share, overlap, usable
from hnclip.util.device import find_device
from hnclip.util.files import read_json

# Pictures wider or higher than this are shrunk to fit the second, as GOAL does.
LARGE, FIT = (4000, 3000), (2048, 1536)

# Red, green and blue, between 0 and 1, of the pictures that SAM was trained on.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

STEADY = 1.0  # logits by which the cut is moved up and down to see whether a mask stays
POINTS = 64  # that are asked at a time
MASKS = 16  # that are enlarged at a time: 0.2 GB at the largest picture


@dataclass(frozen=True)
class Mask:
    """A mask's tight box, area in pixels, and the overlap with the true one that SAM predicts."""

    box: Box
    area: int
    score: float


@dataclass(frozen=True)
class Sam:
    """The tight boxes of the masks that SAM finds at a grid of points, best first.

    Kept are masks that SAM believes in and that hardly change when the cut through their logits moves; of boxes that
    overlap much the one with the better score; and of those the ones whose mask is a fitting share of the picture.

    Args:
        weights: directory of a SAM that transformers saved (model type "sam").
        points: of each side of the grid.
        least_score: least predicted overlap with the true mask.
        least_steadiness: least overlap of the masks one logit above and one below the cut.
        most_overlap: of the boxes of two masks that are both kept.
        device: where the network runs, as `find_device` names them.

    Relations:
        The masks are those of transformers' pipeline "mask-generation" on the whole picture, which needs torchvision
        for its last step alone.

    Reference:
        Kirillov et al., Segment anything, 2023; GOAL's LISM.
    """

    weights: Path
    points: int = 32
    least_score: float = 0.88
    least_steadiness: float = 0.95
    most_overlap: float = 0.7
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.points < 1:
            raise ValueError(f"points must be at least 1, got {self.points}")
        if not (0 <= self.least_steadiness < 1 and 0 <= self.most_overlap <= 1):
            raise ValueError(
                f"least_steadiness must be in [0, 1) and most_overlap in [0, 1], got {self.least_steadiness} and "
                f"{self.most_overlap}"
            )

    @property
    def name(self) -> str:
        return "sam"

    @property
    def version(self) -> str:
        import transformers

        return (
            f"transformers {transformers.__version__} torch {torch.__version__} weights={_mark(self.weights)} "
            f"points={self.points} score={self.least_score} steadiness={self.least_steadiness} "
            f"overlap={self.most_overlap}"
        )

    def __call__(self, image: Image.Image) -> list[Proposal]:
        model = opened_sam(self.weights, self.device)
        picture = image.convert("RGB")
        if image.width > LARGE[0] or image.height > LARGE[1]:
            picture = shrunk(picture, FIT, Image.Resampling.LANCZOS)
        with torch.inference_mode():
            masks = list(self._masks(model, picture))
        boxes = [
            scale_box(mask.box, picture.size, image.size)
            for mask in best_boxes(masks, self.most_overlap)
            if fitting_share(mask.area, picture.size)
        ]
        return [Proposal(box, self.name) for box in boxes if usable(box, image.size)]

    def _masks(self, model: Any, picture: Image.Image) -> Iterator[Mask]:
        """All that SAM believes in, also those that are nearly the same."""
        pixels, (height, width) = model_input(picture, model.config.vision_config.image_size)
        device = model.device
        embeddings = model.get_image_embeddings(pixels.to(device))  # [1, C, h, w]
        grid = (torch.arange(self.points, device=device) + 0.5) / self.points
        across, down = torch.meshgrid(grid * width, grid * height, indexing="xy")
        points = torch.stack([across, down], dim=-1).view(-1, 2)  # [points², 2], x and y in pixels of the input
        for some in points.split(POINTS):
            answer = model(image_embeddings=embeddings, input_points=some[None, :, None])
            scores = answer.iou_scores.flatten()  # [3·POINTS]
            believed = scores > self.least_score
            if not believed.any():  # torch enlarges no masks of none
                continue
            logits = answer.pred_masks[0].flatten(0, 1)[believed]  # [K, h, w]
            for part, certain in zip(logits.split(MASKS), scores[believed].split(MASKS)):
                large = _enlarged(part, pixels.shape[-1], (height, width), (picture.height, picture.width))
                yield from self._steady(large, certain)

    def _steady(self, logits: Tensor, scores: Tensor) -> Iterator[Mask]:
        """Those of [K, H, W] that stay when the cut moves."""
        sure = (logits > STEADY).sum((1, 2))  # [K]
        possible = (logits > -STEADY).sum((1, 2))
        steady = sure / possible > self.least_steadiness  # where both are 0 it is not
        masks = logits[steady] > 0  # [K', H, W]
        rows, columns = masks.any(2).cpu().numpy(), masks.any(1).cpu().numpy()  # [K', H], [K', W]
        areas = masks.sum((1, 2)).tolist()
        for row, column, area, score in zip(rows, columns, areas, scores[steady].tolist()):
            top, bottom = np.flatnonzero(row)[[0, -1]].tolist()
            left, right = np.flatnonzero(column)[[0, -1]].tolist()
            yield Mask((left, top, right + 1, bottom + 1), area, score)


def model_input(picture: Image.Image, side: int) -> tuple[Tensor, tuple[int, int]]:
    """A picture as SAM sees it, and the height and width that it has there.

    Its longest side becomes `side`, its colours are normalised, and it lies in the upper left of a square of zeros.

    Shape:
        returns [1, 3, side, side] and two numbers
    """
    ratio = side / max(picture.size)
    width, height = (max(1, int(length * ratio + 0.5)) for length in picture.size)
    resized = picture.resize((width, height), Image.Resampling.BILINEAR)
    colours = torch.from_numpy(np.array(resized)).permute(2, 0, 1) / 255  # [3, height, width]
    normal = (colours - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return F.pad(normal, (0, side - width, 0, side - height))[None], (height, width)


def _enlarged(logits: Tensor, side: int, inner: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Logits [K, h, w] of SAM's square input, in the pixels of the picture that is its upper left part, [K, H, W]."""
    square = F.interpolate(logits[None], (side, side), mode="bilinear", align_corners=False)
    return F.interpolate(square[..., : inner[0], : inner[1]], size, mode="bilinear", align_corners=False)[0]


def best_boxes(masks: list[Mask], most_overlap: float) -> list[Mask]:
    """From the best score down, each mask whose box overlaps none that was taken by more than `most_overlap`."""
    taken: list[Mask] = []
    for mask in sorted(masks, key=lambda mask: -mask.score):
        if all(overlap(mask.box, other.box) <= most_overlap for other in taken):
            taken.append(mask)
    return taken


_OPENING = Lock()


def opened_sam(weights: Path, device: str) -> Any:
    """The model of a directory, opened once for all threads."""
    with _OPENING:
        return _opened(weights, _mark(weights), device)


@lru_cache(maxsize=1)
def _opened(weights: Path, mark: str, device: str) -> Any:
    from transformers import SamModel

    return open_backbone(weights, SamModel).eval().to(find_device(device))


def _mark(weights: Path) -> str:
    """Which weights these are, whatever they are called."""
    config = weights / "config.json"
    if not config.is_file():
        raise ValueError(f"{weights} is no directory of SAM's weights: it has no config.json")
    if (kind := read_json(config).get("model_type")) != "sam":
        raise ValueError(f"{config} says model_type {kind!r}, not 'sam': name a directory with weights of SAM")
    files = sorted(weights.glob("*.safetensors")) or sorted(weights.glob("*.bin"))
    return fingerprint(config, *files)
