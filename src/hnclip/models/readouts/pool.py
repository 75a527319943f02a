"""Parts of a view as vectors in the joint space: hidden states pooled over each part, then projected."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.losses.hard_negative import at_least_float32
from hnclip.models.readout import Readout, Seen, require_parts


class PoolPatches(Readout):
    """The mean of a picture's hidden states over the patches of each part, projected, of length 1.

    Shape:
        parts of the view: [B, K, P] bool; returns [B, K, D] and [B, K], False where a part has no patch.

    Reference:
        GOAL's TSL-image: of CLIP, the mean is taken before the final norm.
    """

    def forward(self, seen: Seen) -> tuple[Tensor, Tensor]:
        parts = require_parts(seen)
        if parts.shape[2] != seen.hidden.shape[1]:
            raise ValueError(
                f"parts of pictures are given in {parts.shape[2]} patches, the tower has {seen.hidden.shape[1]}: "
                "prepare the data with this model's grid"
            )
        return _project(seen, _mean(seen.hidden, parts)), parts.any(2)


class PoolSpan(Readout):
    """The mean of a text's hidden states over the tokens of each span, projected, of length 1.

    Shape:
        parts of the view: [B, K, 2]; returns [B, K, D] and [B, K], False where a span holds no token.

    Reference:
        GOAL's TSL-text: of CLIP, the mean is taken before the final norm.
    """

    def forward(self, seen: Seen) -> tuple[Tensor, Tensor]:
        places = _places(seen)  # [B, K, T]
        return _project(seen, _mean(seen.hidden, places)), places.any(2)


class PoolChunks(Readout):
    """Hidden states of each span, mixed by softmax of their lengths, projected, of length 1.

    The weights carry no gradient.

    Args:
        double_norm: mix behind the tower's final norm, which the projection then applies once more; without it, mix
            before the norm.

    Shape:
        parts of the view: [B, K, 2]; returns [B, K, D] and [B, K], False where a span holds no token.

    Relations:
        Of a tower without a final norm of its own both are the same.

    Reference:
        StructXLIP's chunks; its released code has the norm twice.
    """

    def __init__(self, double_norm: bool) -> None:
        super().__init__()
        self.double_norm = double_norm

    def forward(self, seen: Seen) -> tuple[Tensor, Tensor]:
        hidden = seen.norm(seen.hidden) if self.double_norm else seen.hidden  # [B, T, W]
        places = _places(seen)  # [B, K, T]
        return _project(seen, _mix(hidden, places)), places.any(2)


def _places(seen: Seen) -> Tensor:
    """[B, K, T] bool: the tokens of each span. Pads belong to none, so that the batch's width does not matter."""
    spans = require_parts(seen)  # [B, K, 2]
    position = torch.arange(seen.hidden.shape[1], device=seen.hidden.device)  # [T]
    within = (position >= spans[..., :1]) & (position < spans[..., 1:])  # [B, K, T]
    return within & seen.inside[:, None]


def _mean(hidden: Tensor, places: Tensor) -> Tensor:
    """[B, T, W] over [B, K, T] bool: [B, K, W], zeros where a part is empty."""
    count = places.sum(2, keepdim=True).clamp(min=1)  # [B, K, 1]
    return _weighted(hidden, places) / count


def _mix(hidden: Tensor, places: Tensor) -> Tensor:
    """As `_mean`, weighted by softmax of lengths."""
    with torch.no_grad():
        lengths = hidden.to(at_least_float32(hidden)).norm(dim=-1)[:, None]  # [B, 1, T]
        lengths = lengths.masked_fill(~places, torch.finfo(lengths.dtype).min)  # [B, K, T]
        weights = lengths.softmax(-1) * places  # [B, K, T]; of an empty span softmax makes something of nothing
    return _weighted(hidden, weights)


def _weighted(hidden: Tensor, weights: Tensor) -> Tensor:
    """[B, K, T] times [B, T, W] in at least float32, also under autocast."""
    with torch.autocast(hidden.device.type, enabled=False):
        dtype = at_least_float32(hidden)
        return (weights.to(dtype) @ hidden.to(dtype)).to(hidden.dtype)  # [B, K, W]


def _project(seen: Seen, pooled: Tensor) -> Tensor:
    """[B, K, W] in the joint space, of length 1: [B, K, D]."""
    vectors = seen.project(pooled)  # [B, K, D]
    return F.normalize(vectors.to(at_least_float32(vectors)), dim=-1)
