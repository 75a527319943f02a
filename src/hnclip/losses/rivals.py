"""Rivals that take hardness from the image-text scores, or none: score margin, max of hinges, SigLIP."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from hnclip.losses.hard_negative import (
    check_finite,
    check_non_negative,
    check_pairs,
    exclude,
    negative_margins,
    negative_statistics,
    product,
    symmetric_cross_entropy,
)

DIRECTIONS = ("both", "image_to_text", "text_to_image")


def score_margin_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    *,
    strength: float = 9.0,
    directions: str = "both",
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """InfoNCE whose negatives are raised by strength · stopgrad(S_ij), added after the scaling by s.

    Args:
        strength: size of the penalty in logits, where L_HN's margin has size s·γ (about 50).
        directions: where the penalty acts: "both", "image_to_text" or "text_to_image". The other direction
            stays plain InfoNCE.
        image, text, scale, offset, rows, ids, check_values: as in `hard_negative_loss`.

    Shape:
        image, text [N, D]; scale scalar; ids [N] or [N, K]; returns a scalar.

    Relations:
        strength = 0 is InfoNCE. Hardness is the image-text score itself where L_HN asks the captions. The
        in-batch hardness of sentence-transformers acts in the query → document direction only.

    Reference:
        LLaVE, Lan et al. 2025, eq. 5.
    """
    check_non_negative("strength", strength)
    if directions not in DIRECTIONS:
        raise ValueError(f"directions must be one of {', '.join(DIRECTIONS)}, got {directions!r}")
    pairs = check_pairs(image, text, scale, offset=offset, rows=rows, ids=ids, check_values=check_values)
    negatives, same = pairs.negatives(), pairs.same()  # [R, N] each

    def logits(similarity: Tensor, direction: str) -> Tensor:
        scores = pairs.scale * similarity  # [R, N]
        if directions in ("both", direction):
            scores = scores + strength * similarity.detach() * negatives  # [R, N]
        return exclude(scores, same)

    similarity, transposed = pairs.similarities()  # [R, N] each
    return symmetric_cross_entropy(logits(similarity, "image_to_text"), logits(transposed, "text_to_image"), offset)


def max_hinge_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    *,
    margin: float = 0.2,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """max(0, margin + hardest negative − positive) on cosines, both directions summed, mean over the queries.

    Args:
        scale: checked but not used: a hinge has no temperature.
        margin: in units of cosine similarity.
        image, text, offset, rows, ids, check_values: as in `hard_negative_loss`.

    Shape:
        image, text [N, D]; scale scalar; ids [N] or [N, K]; returns a scalar.

    Relations:
        Equal similarities everywhere give 2·margin, the plateau on which this loss is known to get stuck.
        Only two negatives of each pair get a gradient, where L_HN concentrates it softly.

    Reference:
        VSE++, Faghri et al. 2018 (there summed over the batch).
    """
    check_non_negative("margin", margin)
    pairs = check_pairs(image, text, scale, offset=offset, rows=rows, ids=ids, check_values=check_values)
    negatives = pairs.negatives()  # [R, N]
    image_to_text, text_to_image = (
        (margin + exclude(similarity, ~negatives).amax(1) - similarity.diagonal(offset)).relu().mean()
        for similarity in pairs.similarities()
    )
    return image_to_text + text_to_image


def siglip_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    *,
    bias: float | Tensor | None = None,
    gamma: float = 0.0,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """−Σ_ij log σ(±(s·S_ij + bias)) / R, + for positives and − for negatives, negatives raised by s·γ·Ḡ_ij.

    The block is query images × all captions and nothing else: a sigmoid knows no direction, so each pair is
    counted exactly once over all shards.

    Args:
        bias: a number or a scalar tensor that keeps its gradient. None takes −s·mean(negative S) −
            log(negatives of a pair) from all N pairs, without gradient: the value at which a softmax-trained
            model starts level.
        gamma: strength of the caption-similarity boost of L_HN on the negatives.
        image, text, scale, offset, rows, ids, check_values: as in `hard_negative_loss`.

    Shape:
        image, text [N, D]; scale, bias scalar; ids [N] or [N, K]; returns a scalar.

    Relations:
        gamma = 0 is SigLIP.

    Reference:
        SigLIP, Zhai et al. 2023; the boost is that of HN-CLIP, eq. 2.
    """
    check_non_negative("gamma", gamma)
    pairs = check_pairs(image, text, scale, offset=offset, rows=rows, ids=ids, check_values=check_values)
    if bias is None:
        mean, count = negative_statistics(pairs.image, pairs.text, pairs.ids)
        bias = -pairs.scale.detach() * mean - count.clamp(min=1).log()
    elif isinstance(bias, Tensor):
        if bias.numel() != 1:
            raise ValueError(f"bias must be a number or a tensor of one element, got shape {tuple(bias.shape)}")
        if check_values:
            check_finite("bias", bias)
        bias = bias.reshape(()).to(pairs.image)
    elif not math.isfinite(bias):
        raise ValueError(f"bias must be finite, got {bias}")

    margins = negative_margins(pairs, gamma)  # [R, N] or None
    similarity = product(pairs.image[pairs.local], pairs.text)  # [R, N]
    boosted = similarity if margins is None else similarity + margins  # [R, N]
    logits = pairs.scale * boosted + bias  # [R, N]
    positive = -F.logsigmoid(logits.diagonal(offset)).sum()
    negative = -(F.logsigmoid(-logits) * pairs.negatives()).sum()
    return (positive + negative) / pairs.rows
