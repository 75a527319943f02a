"""FineLIP's fine-grained matching: scores between two sets of learnt tokens, and a hinge on them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.losses.hard_negative import (
    agree,
    at_least_float32,
    check_count,
    check_ids,
    check_non_negative,
    check_rows,
    product,
)
from hnclip.losses.tiles import tile_bytes, tile_sides
from hnclip.losses.token import check_tokens


def late_interaction_scores(
    image_tokens: Tensor,
    text_tokens: Tensor,
    image_mask: Tensor,
    text_mask: Tensor,
    *,
    slope: float = 0.1,
    offset: int = 0,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """How well pictures and captions match, token by token: with C = LeakyReLU(text_tokens · image_tokensᵀ) of a pair,

        score = mean over text tokens of max over image tokens of C + mean over image tokens of max over text tokens

    which lies in [−2·slope, 2] for tokens of length 1. Among equal matches the first one counts and gets all of the
    gradient. Computed in at least float32, also under autocast.

    Memory: similarities exist in tiles of a few MiB, forward and backward; what stays is the best match of every token
    of R × N pairs, and where it stood.

    Args:
        image_tokens, text_tokens: of all N pairs, used as given (the caller normalises).
        image_mask, text_mask: True where a token counts. A pair without any token has scores that are NaN.
        slope: of LeakyReLU below 0.
        offset, rows: pairs offset … offset+rows−1 are the queries; None means every pair.

    Shape:
        image_tokens [N, K, D]; text_tokens [N, K', D]; image_mask [N, K] bool; text_mask [N, K'] bool. Returns query
        images × all captions and query captions × all images, [R, N] each.

    Relations:
        For all pairs at once the second matrix is the first one's transpose, unlike those of `token_loss`: a score
        adds both directions.

    Reference:
        FineLIP, Asokan et al. 2025: cross-modal late interaction.
    """
    check_tokens("image_tokens", image_tokens, "image_mask", image_mask, check_values=False)
    check_tokens("text_tokens", text_tokens, "text_mask", text_mask, check_values=False)
    if len(image_tokens) != len(text_tokens) or image_tokens.shape[2] != text_tokens.shape[2]:
        raise ValueError(
            "image_tokens and text_tokens must agree in pairs and width, "
            f"got shapes {tuple(image_tokens.shape)} and {tuple(text_tokens.shape)}"
        )
    check_non_negative("slope", slope)
    if slope > 1:
        raise ValueError(f"slope must be at most 1, or the best match is not the largest, got {slope}")
    count = check_count("image_tokens", image_tokens)
    rows = check_rows(count, offset, rows)
    dtype = at_least_float32(image_tokens, text_tokens)
    images = _counted(image_tokens.to(dtype), image_mask)
    texts = _counted(text_tokens.to(dtype), text_mask)
    if rows == count:
        scores = _scores(images, texts, slope)  # [N, N]
        return scores, scores.T
    own = slice(offset, offset + rows)
    own_images, own_texts = ((tokens[own], weights[own]) for tokens, weights in (images, texts))
    return _scores(own_images, texts, slope), _scores(own_texts, images, slope)


def triplet_loss(
    image_scores: Tensor,
    text_scores: Tensor,
    *,
    margin: float = 0.2,
    ids: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Σ_ij max(0, margin + M_ij − M_ii) + Σ_ij max(0, margin + M_ij − M_jj) over all negatives: a sum and no mean.

    Of R queries it is N / R times their share of the sum, so that the mean over equal shards is the sum of the whole
    batch, in value and in gradient.

    Args:
        image_scores, text_scores: as `late_interaction_scores` returns them.
        margin: by which a positive must beat each negative, in units of the scores.
        ids: pairs that agree in any column of ids are never negatives of each other.
        offset: the first query among the N pairs.

    Shape:
        image_scores, text_scores [R, N]; ids [N] or [N, K]; returns a scalar.

    Reference:
        FineLIP, Asokan et al. 2025; the hinge is that of VSE++, Faghri et al. 2018.
    """
    check_non_negative("margin", margin)
    if image_scores.ndim != 2 or image_scores.shape != text_scores.shape:
        raise ValueError(
            "image_scores and text_scores must have the same shape [R, N], "
            f"got {tuple(image_scores.shape)} and {tuple(text_scores.shape)}"
        )
    count = image_scores.shape[1]
    rows = check_rows(count, offset, len(image_scores))
    ids = check_ids(ids, count)
    if ids is None:
        ids = torch.arange(count, device=image_scores.device)[:, None]  # [N, 1]
    same = agree(ids[offset : offset + rows], ids)  # [R, N], True for positives too
    total = image_scores.new_zeros(())
    for scores in (image_scores, text_scores):
        hinges = (margin + scores - scores.diagonal(offset)[:, None]).relu().masked_fill(same, 0.0)  # [R, N]
        total = total + hinges.sum()
    return count / rows * total


def _counted(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [N, K, D] in which those that do not count are copies of one that does, and what each weighs in a mean
    [N, K]. A copy never changes a maximum, so that no tile needs a mask."""
    first = mask.int().argmax(1)[:, None, None].expand(-1, 1, tokens.shape[2])  # [N, 1, D]
    filled = torch.where(mask[:, :, None], tokens, tokens.gather(1, first))  # [N, K, D]
    return filled, mask.to(tokens.dtype) / mask.sum(1, keepdim=True)


def _scores(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], slope: float) -> Tensor:
    """Scores of A sets of tokens [A, K, D] with B sets [B, K', D], given with their weights: [A, B]."""
    a, b = left[0], right[0]
    pair_bytes = a.shape[1] * b.shape[1] * a.element_size()
    height, width = tile_sides(len(a), len(b), pair_bytes, tile_bytes(a.device.type))
    # Splitting all at once, and not slicing in the loop, lets the gradient of each tensor be put together once.
    columns = list(zip(b.split(width), right[1].split(width)))
    lines = []
    for tokens, weights in zip(a.split(height), left[1].split(height)):
        tiles = [_tile(tokens, weights, others, other_weights, slope) for others, other_weights in columns]
        lines.append(torch.cat(tiles, 1))  # [C, B]
    return torch.cat(lines)


def _tile(left: Tensor, left_weights: Tensor, right: Tensor, right_weights: Tensor, slope: float) -> Tensor:
    """[A, K, D] and [B, K', D] into [A, B]."""
    similarity = product(left.flatten(0, 1), right.flatten(0, 1))  # [A·K, B·K']
    similarity = similarity.view(*left.shape[:2], *right.shape[:2])  # [A, K, B, K']
    # LeakyReLU keeps the order, so it is taken of the largest alone.
    by_left = F.leaky_relu(similarity.max(3).values, slope)  # [A, K, B]
    by_right = F.leaky_relu(similarity.max(1).values, slope)  # [A, B, K']
    return (by_left * left_weights[:, :, None]).sum(1) + (by_right * right_weights).sum(2)
