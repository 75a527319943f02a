"""Encoding and evaluation by all processes: each takes every W-th picture and caption, and everybody gets all vectors.

Every process encodes equally many, the last ones if need be once more: with FSDP an encoder call is a matter of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hnclip.data.image_cache import CachedPixels
from hnclip.data.texts import Tokens
from hnclip.encode.loop import encode_captions, encode_pixels
from hnclip.evaluate.retrieval import EvaluationResult, Gallery, rank_gallery
from hnclip.models.dual_encoder import DualEncoder
from hnclip.train.distributed import gather_rows, rank, world_size
from hnclip.util.console import Iterate


def evaluate_together(model: DualEncoder, gallery: Gallery, *, batch: int) -> EvaluationResult:
    """`hnclip.evaluate.retrieval.evaluate`, the encoding shared by all processes; the same result in each of them."""
    image = _shared(encode_pixels, model, _EveryNth(gallery.pixels), len(gallery.pixels), batch=batch)
    text = encode_captions_together(model, gallery.captions, batch=batch)
    return rank_gallery(image, text, gallery)


def encode_captions_together(
    model: DualEncoder, captions: Sequence[Tokens], *, batch: int, progress: Iterate = iter
) -> Tensor:
    """`encode_captions`, shared by all processes: vectors [T, D] in fp32 on the CPU."""
    own = [captions[row] for row in _own_rows(len(captions))]
    return _shared(encode_captions, model, own, len(captions), batch=batch, progress=progress)


def _own_rows(count: int) -> list[int]:
    """Every W-th row, beginning with the rank's; as many in every process."""
    each = -(-count // world_size())
    return [(turn * world_size() + rank()) % count for turn in range(each)]


def _shared(encode: Callable[..., Tensor], model: DualEncoder, own: Any, count: int, **options: Any) -> Tensor:
    vectors = gather_rows(encode(model, own, **options).cpu())  # [W, N, D]
    return vectors.transpose(0, 1).flatten(0, 1)[:count].contiguous()  # row n of process w is picture n·W + w


class _EveryNth:
    """This process's pictures among all of them, read when they are asked for."""

    def __init__(self, pixels: CachedPixels) -> None:
        self._pixels, self._rows = pixels, torch.tensor(_own_rows(len(pixels)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice) -> Tensor:
        return self._pixels[self._rows[rows]]
