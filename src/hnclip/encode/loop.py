"""The encoder loop that evaluation, analysis, search and studies share: images and token ids into vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hnclip.data.batching import pad_texts
from hnclip.data.image_cache import CachedPixels
from hnclip.data.texts import Tokens
from hnclip.util.console import Iterate

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder


def encode_pixels(
    model: DualEncoder, pixels: CachedPixels | Tensor, *, batch: int = 128, progress: Iterate = iter
) -> Tensor:
    """Global vectors [I, D] of preprocessed images, in fp32 on the model's device."""
    with model.inference():
        parts = [
            model.encode_images(pixels[start : start + batch].to(model.device)).vectors.float()
            for start in progress(range(0, len(pixels), batch))
        ]
    return torch.cat(parts)


def encode_captions(
    model: DualEncoder, captions: Sequence[Tokens], *, batch: int = 128, progress: Iterate = iter
) -> Tensor:
    """Global vectors [T, D] of captions given as token ids, in fp32 on the model's device.

    They are encoded in order of length, so that short ones are not padded to long ones.
    """
    order = sorted(range(len(captions)), key=lambda row: len(captions[row]))
    parts = []
    with model.inference():
        for start in progress(range(0, len(order), batch)):
            rows = [captions[row] for row in order[start : start + batch]]
            padded = pad_texts(rows, model.text_transform.pad).to(model.device)
            parts.append(model.encode_texts(padded).vectors.float())
    encoded = torch.cat(parts)  # [T, D], shortest first
    text = torch.empty_like(encoded)
    text[torch.tensor(order, device=text.device)] = encoded
    return text
