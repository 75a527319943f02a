"""Rivals that re-weight negatives by their score within each softmax: HN-NCE, HCL and debiased InfoNCE."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.losses.hard_negative import Pairs, check_non_negative, check_pairs, exclude


def hn_nce_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.25,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """−log[e^z_ii / (α·e^z_ii + Σ_j w_ij·e^z_ij)], z = s·S and w_ij ∝ e^(β·z_ij), mean of both directions.

    The weights sum to the number of negatives in every row; their gradient is kept.

    Args:
        alpha: weight of the positive in the denominator.
        beta: concentration on hard negatives. It multiplies s·S, so at s = 100 even 0.25 is strong.
        image, text, scale, offset, rows, ids, check_values: as in `hard_negative_loss`.

    Shape:
        image, text [N, D]; scale scalar; ids [N] or [N, K]; returns a scalar.

    Relations:
        alpha = 1, beta = 0 is InfoNCE. alpha = 1 is `hcl_loss` with tau_plus = 0 and the same beta.

    Reference:
        DiHT, Radenovic et al. 2023 (HN-NCE).
    """
    check_non_negative("alpha", alpha)
    check_non_negative("beta", beta)
    pairs = check_pairs(image, text, scale, offset=offset, rows=rows, ids=ids, check_values=check_values)
    terms = []
    for positive, negative, _ in log_sums(pairs, beta):  # [R] each
        own = torch.full_like(positive, math.log(alpha) if alpha > 0 else -math.inf)  # [R]
        terms.append(torch.logaddexp(own, negative - positive).mean())
    return (terms[0] + terms[1]) / 2


def hcl_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    *,
    beta: float = 1.0,
    tau_plus: float = 0.0,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """InfoNCE over negatives weighted by e^(β·z), corrected for the share τ⁺ of false negatives among them.

    With R = Σ_j w_ij·e^z_ij (weights as in `hn_nce_loss`) the negatives of row i count
    max((R − τ⁺·n·e^z_ii) / (1 − τ⁺), n·e^−s), n being the row's number of negatives.

    Args:
        beta: concentration on hard negatives. It multiplies s·S: at s = 100, beta = 1 is nearly the hardest
            only.
        tau_plus: assumed probability that a negative is a false one, in [0, 1). See `debiased_floor_rows`.
        image, text, scale, offset, rows, ids, check_values: as in `hard_negative_loss`.

    Shape:
        image, text [N, D]; scale scalar; ids [N] or [N, K]; returns a scalar.

    Relations:
        beta = 0 is `debiased_loss`, and with tau_plus = 0 InfoNCE.

    Reference:
        HCL, Robinson et al. 2021; the mean of e^(β·z), not its sum, normalises.
    """
    pairs = check_pairs(image, text, scale, offset=offset, rows=rows, ids=ids, check_values=check_values)
    directions = debiased_negatives(pairs, beta, tau_plus)
    # −log(e^p / (e^p + e^n)) = −logsigmoid(p − n), exact for tiny losses too.
    image_to_text, text_to_image = (-F.logsigmoid(positive - negative).mean() for positive, negative, _ in directions)
    return (image_to_text + text_to_image) / 2


def debiased_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    *,
    tau_plus: float = 0.01,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """InfoNCE corrected for the share τ⁺ of false negatives. Read the warning of `debiased_floor_rows` first.

    Args:
        tau_plus: assumed probability that a negative is a false one, in [0, 1).
        image, text, scale, offset, rows, ids, check_values: as in `hard_negative_loss`.

    Shape:
        image, text [N, D]; scale scalar; ids [N] or [N, K]; returns a scalar.

    Relations:
        `hcl_loss` with beta = 0. tau_plus = 0 is InfoNCE.

    Reference:
        DCL, Chuang et al. 2020.
    """
    return hcl_loss(
        image,
        text,
        scale,
        beta=0.0,
        tau_plus=tau_plus,
        offset=offset,
        rows=rows,
        ids=ids,
        check_values=check_values,
    )


@torch.no_grad()
def debiased_floor_rows(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    *,
    tau_plus: float = 0.01,
    beta: float = 0.0,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """How many of the 2·R softmaxes of `debiased_loss` have their negatives replaced by the floor n·e^−s.

    Warning: such a row gives its negatives no gradient at all, and at CLIP's temperature that is nearly every
    row. With positives 0.2 above the negatives and τ⁺ = 0.01, all rows are at the floor for s = 33 and 100:
    what is then trained is not a debiased loss. It needs a small s or τ⁺ ≈ 0. Report this count beside any
    such baseline.

    Args:
        beta: `hcl_loss`'s beta, for its floor; 0 is `debiased_loss`.
        others: as in `debiased_loss`.

    Shape:
        as `debiased_loss`; returns a scalar int64 tensor between 0 and 2·R.
    """
    pairs = check_pairs(image, text, scale, offset=offset, rows=rows, ids=ids, check_values=check_values)
    directions = debiased_negatives(pairs, beta, tau_plus)
    return torch.stack([floored.sum() for _, _, floored in directions]).sum()


def log_weights(logits: Tensor, negatives: Tensor, beta: float) -> Tensor:
    """log w [R, N], w ∝ e^(β·logits) over each row's negatives, summing to their number; w = 0 elsewhere."""
    count = negatives.sum(1, keepdim=True).to(logits.dtype)  # [R, 1]
    shares = exclude(beta * logits, ~negatives).log_softmax(1)  # [R, N]
    return exclude(shares + count.log(), ~negatives)  # [R, N]


def log_sums(pairs: Pairs, beta: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per direction, [R] each: positives' logits, log Σ_j w_ij·e^z_ij over negatives, log of their number."""
    negatives = pairs.negatives()  # [R, N]
    log_count = negatives.sum(1).to(pairs.image.dtype).log()  # [R]
    sums = []
    for similarity in pairs.similarities():
        logits = pairs.scale * similarity  # [R, N]
        weighted = logits + log_weights(logits, negatives, beta)  # [R, N]
        sums.append((logits.diagonal(pairs.offset), weighted.logsumexp(1), log_count))
    return sums


def debiased_negatives(pairs: Pairs, beta: float, tau_plus: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per direction, [R] each: positives' logits, log of the debiased negatives, whether it is the floor."""
    check_non_negative("beta", beta)
    if not 0 <= tau_plus < 1:
        raise ValueError(f"tau_plus must be at least 0 and less than 1, got {tau_plus}")
    log_tau = math.log(tau_plus) if tau_plus > 0 else -math.inf
    directions = []
    for positive, log_sum, log_count in log_sums(pairs, beta):  # [R] each
        floor = log_count - pairs.scale  # [R]
        # Log of what is subtracted, relative to what it is taken from; at 0 or more nothing remains.
        share = log_tau + log_count + positive - log_sum  # [R]
        exhausted = share >= 0  # [R]
        # −1 stands in there, so that the branch not taken sends no NaN into the gradient.
        remaining = torch.log(-torch.expm1(share.masked_fill(exhausted, -1.0)))  # [R]
        debiased = log_sum + remaining - math.log1p(-tau_plus)  # [R]
        floored = exhausted | (debiased < floor)  # [R]
        directions.append((positive, torch.where(floored, floor, debiased), floored))
    return directions
