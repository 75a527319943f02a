"""Terms over the pairs that have a view, and the terms of GOAL, StructXLIP and Long-CLIP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hnclip.losses.hard_negative import at_least_float32, check_queries, check_scale, exclude, product
from hnclip.losses.tokens import check_masked


def present_in_all(*masks: Tensor | None) -> Tensor | None:
    """[N] bool, True for pairs that have all of these views; None, as in each mask, if every pair has them."""
    given = [mask for mask in masks if mask is not None]
    return torch.stack(given).all(0) if given else None


def mean_of_present(values: Tensor, present: Tensor | None) -> Tensor:
    """The mean of `values` [N] over the pairs that are present [N] bool (None: all); 0 if there are none."""
    if present is None:
        return values.mean()
    return values.where(present, 0).sum() / present.sum().clamp(min=1)


def loss_of_present(
    loss: Callable[..., Tensor],
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    present: Tensor | None,
    ids: Tensor | None = None,
) -> Tensor:
    """A contrastive loss among the pairs that are present; the others are neither queries nor negatives.

    The number of present pairs determines shapes: an accelerator synchronises with the host unless `present` is None.

    Args:
        loss: with the signature of `GLOBAL_LOSSES`.
        image, text, scale, ids: of all N pairs, as in `hard_negative_loss`.
        present: which of them count; None: all.

    Shape:
        image, text [N, D]; present [N] bool; returns a scalar: 0, with zero gradients, if fewer than 2 are present.
    """
    if present is None:
        return loss(image, text, scale, ids=ids)
    kept = present.nonzero().flatten()  # [V]
    if len(kept) < 2:
        return 0 * (image.sum() + text.sum() + scale)
    return loss(image[kept], text[kept], scale, ids=None if ids is None else ids[kept])


def cosine_gap(left: Tensor, right: Tensor) -> Tensor:
    """1 − a·b of every row, in at least float32. StructXLIP's L_RS is its mean; GOAL's L_patch and L_text that of its
    square.

    Shape:
        left, right [N, D], of length 1; returns [N].
    """
    dtype = at_least_float32(left, right)
    return 1 - (left.to(dtype) * right.to(dtype)).sum(-1)


def chunk_loss(
    chunks: Tensor,
    crops: Tensor,
    chunk_mask: Tensor,
    crop_mask: Tensor,
    scale: float | Tensor,
    ids: Tensor | None = None,
) -> Tensor:
    """Chunks of a caption retrieve crops of their image: −[LSE over the crops of the own image − LSE over all crops].

    Mean over the chunks of a caption, then over the pairs that have a chunk and a crop; 0 if there are none.
    Computed in at least float32, also under autocast.

    Args:
        chunks, crops: embeddings of all N pairs, normalised by the caller.
        chunk_mask, crop_mask: True where there is one; other places are not read.
        scale, ids: as in `hard_negative_loss`.

    Shape:
        chunks [N, S, D]; crops [N, K, D]; chunk_mask [N, S] bool; crop_mask [N, K] bool; returns a scalar.
        Memory: N·S·N·K numbers, a few times.

    Relations:
        With one chunk and one crop per pair this is the text-to-image direction of InfoNCE.

    Reference:
        StructXLIP's L_LSC.
    """
    check_masked("chunks", chunks, chunk_mask)
    check_masked("crops", crops, crop_mask)
    count, dtype = len(chunks), at_least_float32(chunks, crops)

    similarity = product(chunks.to(dtype).flatten(0, 1), crops.to(dtype).flatten(0, 1))  # [N·S, N·K]
    logits = similarity.view(*chunks.shape[:2], *crops.shape[:2]) * check_scale(scale, similarity)  # [N, S, N, K]
    pair = torch.arange(count, device=chunks.device)
    positive = exclude(logits[pair, :, pair], ~crop_mask[:, None]).logsumexp(-1)  # [N, S]
    absent, duplicates = ~crop_mask[None], check_queries(count, ids=ids).duplicates()  # [1, N, K], [N, N] or None
    if duplicates is not None:
        absent = absent | duplicates[:, :, None]  # [N, N, K]
    total = exclude(logits, absent[:, None]).flatten(2).logsumexp(-1)  # [N, S]

    losses = (total - positive).where(chunk_mask, 0).sum(1) / chunk_mask.sum(1).clamp(min=1)  # [N]
    return mean_of_present(losses, chunk_mask.any(1) & crop_mask.any(1))


def principal_part(vectors: Tensor, count: int = 32) -> Tensor:
    """Vectors projected onto their mean and their first `count` principal directions; not normalised again.

    X' = (X − μ)·V·Vᵀ + μ, where μ is the mean of the rows and V the first right singular vectors of X − μ. Gradients
    pass through μ and V. Computed in at least float32, also under autocast.

    Shape:
        vectors [N, D]; returns [N, D].

    Relations:
        Centred vectors have at most min(N − 1, D) directions: if that is at most `count`, the vectors are returned
        unchanged.

    Reference:
        Primary component matching of Long-CLIP, Zhang et al. 2024.
    """
    if min(len(vectors) - 1, vectors.shape[1]) <= count:
        return vectors
    wide = vectors.to(at_least_float32(vectors))
    mean = wide.mean(0)  # [D]
    with torch.autocast(wide.device.type, enabled=False):
        kept = torch.linalg.svd(wide - mean, full_matrices=False).Vh[:count]  # [k, D]
        return (wide - mean) @ kept.T @ kept + mean
