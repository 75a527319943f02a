"""Terms over the pairs that have a view, where not every pair has it, and the terms of GOAL, StructXLIP and Long-CLIP.

With several processes each term is a mean over the R queries of a process, which training weights with W·R/N. A term
over the V pairs that are present is scaled so that this weighted mean equals the value of one process with all N pairs,
however the present pairs are distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hnclip.losses.hard_negative import at_least_float32, check_queries, check_scale, exclude, product
from hnclip.losses.tokens import check_masked


def present_in_all(*masks: Tensor | None) -> Tensor | None:
    """[N] bool, True for pairs that have all of these views; None, as in each mask, if every pair has them."""
    given = [mask for mask in masks if mask is not None]
    return torch.stack(given).all(0) if given else None


def mean_of_present(values: Tensor, present: Tensor | None, offset: int = 0) -> Tensor:
    """The mean of `values` over the pairs that are present, of which the queries contribute theirs.

    Args:
        values: of the R queries offset … offset+R−1; rows that are absent are not read.
        present: which of all N pairs count; None: all.

    Shape:
        values [R]; present [N] bool; returns a scalar: (N/R) · (Σ over own present rows) / V, and 0 if V is 0.
    """
    if present is None:
        return values.mean()
    own = present[offset : offset + len(values)]  # [R]
    return values.where(own, 0).sum() * (len(present) / len(values)) / present.sum().clamp(min=1)


def loss_of_present(
    loss: Callable[..., Tensor], image: Tensor, text: Tensor, scale: Tensor, present: Tensor | None, **shard: Any
) -> Tensor:
    """A contrastive loss among the pairs that are present; the others are neither queries nor negatives.

    The number of present pairs determines shapes: an accelerator synchronises with the host unless `present` is None.

    Args:
        loss: with the signature of `GLOBAL_LOSSES`.
        image, text, scale: of all N pairs, as in `hard_negative_loss`.
        present: which of them count; None: all.
        shard: offset, rows and ids, as in `hard_negative_loss`.

    Shape:
        image, text [N, D]; present [N] bool; returns a scalar: (N/R) · (own present / V) · the loss of own present
        queries among the V present pairs. 0, with zero gradients, if no query is present or V < 2.
    """
    if present is None:
        return loss(image, text, scale, **shard)
    queries, on_host = check_queries(len(present), **shard), present.cpu()
    before, own = (int(on_host[part].sum()) for part in (slice(queries.offset), queries.own))
    kept = on_host.nonzero().flatten().to(image.device)  # [V]
    if own == 0 or len(kept) < 2:
        return 0 * (image.sum() + text.sum() + scale)
    ids = None if queries.ids is None else queries.ids[kept]
    value = loss(image[kept], text[kept], scale, offset=before, rows=own, ids=ids)
    return value * (own * queries.count / (len(kept) * queries.rows))


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
    **shard: Any,
) -> Tensor:
    """Chunks of a caption retrieve crops of their image: −[LSE over the crops of the own image − LSE over all crops].

    Mean over the chunks of a caption, then over the pairs that have a chunk and a crop; 0 if there are none.
    Computed in at least float32, also under autocast.

    Args:
        chunks, crops: embeddings of all N pairs, normalised by the caller.
        chunk_mask, crop_mask: True where there is one; other places are not read.
        scale: as in `hard_negative_loss`, and so are offset, rows and ids in `shard`.

    Shape:
        chunks [N, S, D]; crops [N, K, D]; chunk_mask [N, S] bool; crop_mask [N, K] bool; returns a scalar, scaled as
        in `mean_of_present`. Memory: R·S·N·K numbers, a few times.

    Relations:
        With one chunk and one crop per pair this is the text-to-image direction of InfoNCE.

    Reference:
        StructXLIP's L_LSC.
    """
    check_masked("chunks", chunks, chunk_mask)
    check_masked("crops", crops, crop_mask)
    queries = check_queries(len(chunks), **shard)
    own, offset, rows = queries.own, queries.offset, queries.rows
    dtype = at_least_float32(chunks, crops)

    similarity = product(chunks[own].to(dtype).flatten(0, 1), crops.to(dtype).flatten(0, 1))  # [R·S, N·K]
    logits = similarity.view(rows, chunks.shape[1], *crops.shape[:2]) * check_scale(scale, similarity)  # [R, S, N, K]
    query = torch.arange(rows, device=chunks.device)
    positive = exclude(logits[query, :, offset + query], ~crop_mask[own][:, None]).logsumexp(-1)  # [R, S]
    absent, duplicates = ~crop_mask[None], queries.duplicates()  # [1, N, K], [R, N] or None
    if duplicates is not None:
        absent = absent | duplicates[:, :, None]  # [R, N, K]
    total = exclude(logits, absent[:, None]).flatten(2).logsumexp(-1)  # [R, S]

    mask = chunk_mask[own]  # [R, S]
    losses = (total - positive).where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)  # [R]
    return mean_of_present(losses, chunk_mask.any(1) & crop_mask.any(1), offset)


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
