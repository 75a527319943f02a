"""Chunks of a caption against crops of all pictures (StructXLIP's local term)."""

from __future__ import annotations

import torch
from torch import Tensor

from hnclip.losses.hard_negative import (
    at_least_float32,
    check_embeddings,
    check_ids,
    check_rows,
    check_scale,
    exclude,
    product,
    same_pairs,
)
from hnclip.losses.present import mean_of_present


def chunk_loss(
    chunks: Tensor,
    crops: Tensor,
    chunk_mask: Tensor,
    crop_mask: Tensor,
    scale: float | Tensor,
    *,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """−[LSE over the crops of the own picture − LSE over all crops], in one direction: chunks look for crops.

    A mean over the chunks of a caption, then over the pairs that have a chunk and a crop; 0 if there are none. Any
    crop of its picture may answer for a chunk. Computed in at least float32, also under autocast.

    Args:
        chunks, crops: vectors of all N pairs, used as given (the caller normalises).
        chunk_mask, crop_mask: True where there is one. What stands in the other places is never read.
        scale, offset, rows, ids, check_values: as in `hard_negative_loss`; pairs that are the same thing lend each
            other no negatives.

    Shape:
        chunks [N, S, D]; crops [N, K, D]; chunk_mask [N, S] bool; crop_mask [N, K] bool; returns a scalar, scaled as
        in `mean_of_present`.

    Memory: R·S·N·K numbers, a few times.

    Relations:
        With one chunk and one crop per pair this is the second direction of InfoNCE, captions to pictures.

    Reference:
        StructXLIP's L_LSC.
    """
    for name, tensor, mask in (("chunks", chunks, chunk_mask), ("crops", crops, crop_mask)):
        check_embeddings(name, tensor, 3)
        if mask.dtype != torch.bool or mask.shape != tensor.shape[:2]:
            raise ValueError(
                f"the mask of {name} must be bool of shape {tuple(tensor.shape[:2])}, got {mask.dtype} of "
                f"{tuple(mask.shape)}"
            )
    if len(chunks) != len(crops) or chunks.shape[2] != crops.shape[2]:
        raise ValueError(
            f"chunks and crops must agree in pairs and width, got shapes {tuple(chunks.shape)} and {tuple(crops.shape)}"
        )
    count = len(chunks)
    rows, ids = check_rows(count, offset, rows), check_ids(ids, count)
    dtype = at_least_float32(chunks, crops)
    scale = check_scale(scale, chunks.new_empty((), dtype=dtype), check_values)
    own = slice(offset, offset + rows)

    similarity = product(chunks[own].to(dtype).flatten(0, 1), crops.to(dtype).flatten(0, 1))  # [R·S, N·K]
    logits = scale * similarity.view(rows, chunks.shape[1], *crops.shape[:2])  # [R, S, N, K]
    query = torch.arange(rows, device=chunks.device)
    positive = logits[query, :, offset + query]  # [R, S, K]
    positive = exclude(positive, ~crop_mask[own][:, None]).logsumexp(-1)  # [R, S]
    absent = ~crop_mask[None]  # [1, N, K]
    if ids is not None:
        absent = absent | same_pairs(ids, offset, rows)[:, :, None]  # [R, N, K]
    every = exclude(logits, absent[:, None]).flatten(2).logsumexp(-1)  # [R, S]

    mask = chunk_mask[own]  # [R, S]
    losses = (every - positive).where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)  # [R]
    return mean_of_present(losses, chunk_mask.any(1) & crop_mask.any(1), offset, rows)
