"""Global losses other than L_HN: InfoNCE, its smoothed and fixed-margin variants, and published hard-negative losses.

All have the signature `loss(image, text, scale, *, offset=0, rows=None, ids=None, …)`; the shared arguments are those
of `hard_negative_loss`. `GLOBAL_LOSSES` maps configuration names to these functions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.losses.hard_negative import (
    Pairs,
    check_non_negative,
    check_pairs,
    exclude,
    negative_margins,
    negative_statistics,
    product,
    symmetric_cross_entropy,
)
from hnclip.losses.tiled import tiled_hard_negative_loss


def clip_loss(image: Tensor, text: Tensor, scale: float | Tensor, **shard: Any) -> Tensor:
    """Symmetric InfoNCE, the loss of CLIP: ½[CE(s·S) + CE(s·Sᵀ)].

    Relations:
        `hard_negative_loss` with gamma = margin = 0.

    Reference:
        Radford et al. 2021; HN-CLIP, eq. 1.
    """
    return tiled_hard_negative_loss(image, text, scale, 0.0, **shard)


def fixed_margin_loss(
    image: Tensor, text: Tensor, scale: float | Tensor, *, margin: float = 0.2, **shard: Any
) -> Tensor:
    """InfoNCE in which the positive must exceed every negative by the same margin: symCE(s·(S − margin·I)).

    Args:
        margin: cosine margin. γ·mean(Ḡ) is the control that separates L_HN's adaptivity from its mean margin.

    Relations:
        `hard_negative_loss` with gamma = 0. margin = 0 is InfoNCE.

    Reference:
        CosFace, Wang et al. 2018.
    """
    return tiled_hard_negative_loss(image, text, scale, 0.0, margin=margin, **shard)


def smoothed_loss(
    image: Tensor, text: Tensor, scale: float | Tensor, *, smoothing: float = 0.1, **shard: Any
) -> Tensor:
    """InfoNCE with label smoothing: 1 − smoothing for the positive, the rest spread over positive and negatives.

    With logits L = s·S this is InfoNCE + smoothing·(L_ii − mean_j L_ij), the mean over all columns but duplicates.

    Relations:
        smoothing = 0 is InfoNCE. The minimum is the entropy of the smoothed labels, not 0.

    Reference:
        Long-CLIP, Zhang et al. 2024; Szegedy et al. 2016.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing}")
    infonce = clip_loss(image, text, scale, **shard)
    if smoothing == 0:
        return infonce
    pairs = check_pairs(image, text, scale, **shard)
    duplicates = pairs.duplicates()  # [R, N] or None
    excess = pairs.scale.new_zeros(())
    for similarity in pairs.similarities():  # [R, N] each
        kept = torch.ones_like(similarity) if duplicates is None else (~duplicates).to(similarity.dtype)  # [R, N]
        mean = (similarity * kept).sum(1) / kept.sum(1)  # [R]
        excess = excess + (similarity.diagonal(pairs.offset) - mean).mean() / 2
    return infonce + smoothing * pairs.scale * excess


def score_margin_loss(
    image: Tensor, text: Tensor, scale: float | Tensor, *, strength: float = 9.0, **shard: Any
) -> Tensor:
    """InfoNCE whose negatives are raised by strength·stopgrad(S_ij), added after the scaling by s.

    Args:
        strength: penalty in logits; L_HN's margin is s·γ ≈ 50.

    Relations:
        strength = 0 is InfoNCE. Hardness is the image–text score itself, where L_HN uses caption similarity.

    Reference:
        LLaVE, Lan et al. 2025, eq. 5.
    """
    check_non_negative("strength", strength)
    pairs = check_pairs(image, text, scale, **shard)
    negatives, duplicates = pairs.negatives(image.device), pairs.duplicates()  # [R, N] each
    logits = [
        exclude(pairs.scale * similarity + strength * similarity.detach() * negatives, duplicates)  # [R, N]
        for similarity in pairs.similarities()
    ]
    return symmetric_cross_entropy(logits[0], logits[1], pairs.offset)


def hn_nce_loss(
    image: Tensor, text: Tensor, scale: float | Tensor, *, alpha: float = 1.0, beta: float = 0.25, **shard: Any
) -> Tensor:
    """−log[e^z_ii / (α·e^z_ii + Σ_j w_ij·e^z_ij)] with z = s·S and w_ij ∝ e^(β·z_ij), mean over both directions.

    The weights of a row sum to its number of negatives; their gradient is kept.

    Args:
        alpha: weight of the positive in the denominator.
        beta: concentration on hard negatives; it multiplies s·S, so at s = 100 even 0.25 is strong.

    Relations:
        alpha = 1, beta = 0 is InfoNCE. alpha = 1 is `hcl_loss` with tau_plus = 0.

    Reference:
        DiHT, Radenovic et al. 2023.
    """
    check_non_negative("alpha", alpha)
    pairs = check_pairs(image, text, scale, **shard)
    log_alpha = math.log(alpha) if alpha > 0 else -math.inf
    total = pairs.scale.new_zeros(())
    for positive, negative, _ in _weighted_sums(pairs, beta):  # [R] each
        excess = negative - positive
        total = total + torch.logaddexp(torch.full_like(excess, log_alpha), excess).mean() / 2
    return total


def hcl_loss(
    image: Tensor, text: Tensor, scale: float | Tensor, *, beta: float = 1.0, tau_plus: float = 0.0, **shard: Any
) -> Tensor:
    """InfoNCE over negatives weighted by e^(β·z), corrected for an assumed share τ⁺ of false negatives.

    With n negatives and their weighted sum Σ_j w_ij·e^z_ij as in `hn_nce_loss`, the negatives of row i count
    max((Σ − τ⁺·n·e^z_ii) / (1 − τ⁺), n·e^−s).

    Args:
        beta: concentration on hard negatives; at s = 100, beta = 1 keeps little but the hardest.
        tau_plus: assumed probability that a negative is false, in [0, 1).

    Relations:
        beta = 0 is `debiased_loss`, and with tau_plus = 0 InfoNCE.

    Reference:
        HCL, Robinson et al. 2021.
    """
    if not 0 <= tau_plus < 1:
        raise ValueError(f"tau_plus must be in [0, 1), got {tau_plus}")
    pairs = check_pairs(image, text, scale, **shard)
    log_tau = math.log(tau_plus) if tau_plus > 0 else -math.inf
    total = pairs.scale.new_zeros(())
    for positive, negative, log_count in _weighted_sums(pairs, beta):  # [R] each
        floor = log_count - pairs.scale  # [R]
        share = log_tau + log_count + positive - negative  # [R], log of the subtracted part of the sum
        exhausted = share >= 0  # nothing remains; −1 keeps NaN out of the gradient of the branch that is not taken
        rest = negative + torch.log(-torch.expm1(share.masked_fill(exhausted, -1.0))) - math.log1p(-tau_plus)  # [R]
        debiased = torch.where(exhausted | (rest < floor), floor, rest)  # [R]
        total = total - F.logsigmoid(positive - debiased).mean() / 2
    return total


def debiased_loss(
    image: Tensor, text: Tensor, scale: float | Tensor, *, tau_plus: float = 0.01, **shard: Any
) -> Tensor:
    """InfoNCE corrected for an assumed share τ⁺ of false negatives.

    At CLIP's temperature it degenerates: with positives 0.2 above the negatives, s = 33 or 100 and τ⁺ = 0.01, every row
    is at its floor n·e^−s and its negatives get no gradient. It needs a small s or τ⁺ ≈ 0.

    Relations:
        `hcl_loss` with beta = 0. tau_plus = 0 is InfoNCE.

    Reference:
        DCL, Chuang et al. 2020.
    """
    return hcl_loss(image, text, scale, beta=0.0, tau_plus=tau_plus, **shard)


def _weighted_sums(pairs: Pairs, beta: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per direction, [R] each: logits of the positives, log Σ_j w_ij·e^z_ij over negatives, log of their number."""
    check_non_negative("beta", beta)
    negatives = pairs.negatives(pairs.image.device)  # [R, N]
    log_count = negatives.sum(1).to(pairs.image.dtype).log()  # [R]
    sums = []
    for similarity in pairs.similarities():
        logits = pairs.scale * similarity  # [R, N]
        log_weights = exclude(beta * logits, ~negatives).log_softmax(1) + log_count[:, None]  # [R, N]
        sums.append((logits.diagonal(pairs.offset), exclude(logits + log_weights, ~negatives).logsumexp(1), log_count))
    return sums


def max_hinge_loss(image: Tensor, text: Tensor, scale: float | Tensor, *, margin: float = 0.2, **shard: Any) -> Tensor:
    """max(0, margin + hardest negative − positive) on cosines, both directions summed, mean over the queries.

    The scale is not used. Equal similarities give 2·margin, the plateau on which this loss can get stuck.

    Reference:
        VSE++, Faghri et al. 2018 (there summed over the batch).
    """
    check_non_negative("margin", margin)
    pairs = check_pairs(image, text, scale, **shard)
    negatives = pairs.negatives(image.device)  # [R, N]
    total = pairs.image.new_zeros(())
    for similarity in pairs.similarities():
        hardest = exclude(similarity, ~negatives).amax(1)  # [R]
        total = total + (margin + hardest - similarity.diagonal(pairs.offset)).relu().mean()
    return total


def sigmoid_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    *,
    bias: float | Tensor | None = None,
    gamma: float = 0.0,
    margin_text: Tensor | None = None,
    **shard: Any,
) -> Tensor:
    """−Σ_ij log σ(±(s·S_ij + bias)) / R, + for positives and − for negatives, negatives raised by s·γ·Ḡ_ij.

    Args:
        bias: number or scalar tensor. None: −s·mean(negative S) − log(negatives per pair) without gradient, computed
            from the batch: a model that was trained with a softmax starts balanced, and nothing has to be learnt.
        gamma, margin_text: the caption-similarity margin, as in `hard_negative_loss`.

    Relations:
        With gamma = 0 and a learnt bias this is SigLIP. Each (image, caption) cell counts once over all shards.

    Reference:
        SigLIP, Zhai et al. 2023.
    """
    check_non_negative("gamma", gamma)
    pairs = check_pairs(image, text, scale, **shard)
    if bias is None:
        mean, count = negative_statistics(pairs.image, pairs.text, pairs.ids)
        bias = -pairs.scale.detach() * mean - count.clamp(min=1).log()
    similarity = product(pairs.image[pairs.own], pairs.text)  # [R, N]
    margins = negative_margins(pairs, gamma, margin_text=margin_text)  # [R, N] or None
    logits = pairs.scale * (similarity if margins is None else similarity + margins) + bias  # [R, N]
    positive = F.logsigmoid(logits.diagonal(pairs.offset)).sum()
    negative = (F.logsigmoid(-logits) * pairs.negatives(image.device)).sum()
    return -(positive + negative) / pairs.rows
