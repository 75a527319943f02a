"""Late interaction between sets of tokens: the token term of HN-CLIP (FILIP) and FineLIP's fine-grained hinge.

The similarities of all token pairs are computed in tiles of a few MiB and reduced to both maxima at once, so that the
[R·P, N·Q] matrix never exists; autograd keeps the positions of the maxima.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.losses.hard_negative import (
    agree,
    at_least_float32,
    check_ids,
    check_masked,
    check_non_negative,
    check_rows,
    check_scale,
    duplicate_mask,
    exclude,
    product,
    symmetric_cross_entropy,
)
from hnclip.losses.tiled import tile_bytes, tile_shape


class TokenSets(NamedTuple):
    """N sets of tokens without masked places: those hold copies of the first valid token, which change no maximum.

    Shape:
        tokens [N, T, D]; weights [N, T], 1 / (number of valid tokens), 0 for copies.
    """

    tokens: Tensor
    weights: Tensor

    def rows(self, part: slice) -> TokenSets:
        return TokenSets(self.tokens[part], self.weights[part])

    def split(self, size: int) -> list[TokenSets]:
        # Splitting once instead of slicing in a loop lets autograd assemble the gradient once.
        return [TokenSets(*parts) for parts in zip(self.tokens.split(size), self.weights.split(size))]


def token_sets(name: str, tokens: Tensor, mask: Tensor, dtype: torch.dtype) -> TokenSets:
    """Validate and fill masked tokens; a set without any valid token gets NaN weights."""
    check_masked(name, tokens, mask)
    first = mask.int().argmax(1)[:, None, None].expand(-1, 1, tokens.shape[2])  # [N, 1, D]
    filled = torch.where(mask[:, :, None], tokens, tokens.gather(1, first)).to(dtype)  # [N, T, D]
    return TokenSets(filled, mask.to(dtype) / mask.sum(1, keepdim=True))


def token_loss(
    patches: Tensor,
    words: Tensor,
    patch_mask: Tensor,
    word_mask: Tensor,
    scale: float | Tensor,
    *,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """Symmetric cross-entropy over token scores.

    An image scores a caption by the mean over patches of the maximum over words, a caption scores an image by the mean
    over words of the maximum over patches; L = ½[CE(s·i2t) + CE(s·t2i)]. Computed in at least float32, also under
    autocast.

    Args:
        patches, words: token embeddings of all N pairs, normalised by the caller.
        patch_mask, word_mask: True for tokens that count (no class, start, end or padding token). The loss is NaN if a
            pair has none.
        scale, offset, rows, ids: as in `hard_negative_loss`.

    Shape:
        patches [N, P, D]; words [N, Q, D]; patch_mask [N, P] bool; word_mask [N, Q] bool; returns a scalar.

    Relations:
        With one patch and one word per pair this is InfoNCE.

    Reference:
        FILIP, Yao et al. 2022; the term L_tok of HN-CLIP, eq. 3.
    """
    dtype = at_least_float32(patches, words)
    image, text = token_sets("patches", patches, patch_mask, dtype), token_sets("words", words, word_mask, dtype)
    count = len(patches)
    rows, ids = check_rows(count, offset, rows), check_ids(ids, count)
    own = slice(offset, offset + rows)
    image_scores, by_words = max_similarity(image.rows(own), text)  # [R, N] each
    # For the whole batch both directions come from the same tiles.
    text_scores = by_words.T if rows == count else max_similarity(text.rows(own), image)[0]  # [R, N]
    scale = check_scale(scale, image_scores)
    duplicates = None if ids is None else duplicate_mask(ids, offset, rows)  # [R, N]
    logits = [exclude(scale * scores, duplicates) for scores in (image_scores, text_scores)]
    return symmetric_cross_entropy(logits[0], logits[1], offset)


def max_similarity(left: TokenSets, right: TokenSets, slope: float = 1.0) -> tuple[Tensor, Tensor]:
    """For each pair of sets, the mean over tokens of one set of the best match in the other set.

    Among equal matches the first one gets the gradient, as in `torch.max`.

    Args:
        left, right: A and B sets.
        slope: of a LeakyReLU applied to the similarities; 1: none.

    Shape:
        returns two matrices [A, B]: means over left tokens, means over right tokens.
    """
    pair_bytes = left.tokens.shape[1] * right.tokens.shape[1] * left.tokens.element_size()
    height, width = tile_shape(len(left.tokens), len(right.tokens), pair_bytes, tile_bytes(left.tokens.device.type))
    columns = right.split(width)
    by_left, by_right = [], []
    for a in left.split(height):
        line = [_tile_scores(a, b, slope) for b in columns]
        by_left.append(torch.cat([scores for scores, _ in line], 1))
        by_right.append(torch.cat([scores for _, scores in line], 1))
    return torch.cat(by_left), torch.cat(by_right)


def _tile_scores(left: TokenSets, right: TokenSets, slope: float) -> tuple[Tensor, Tensor]:
    """`max_similarity` of sets whose similarities fit into one tile."""
    similarity = product(left.tokens.flatten(0, 1), right.tokens.flatten(0, 1))  # [A·K, B·K']
    similarity = similarity.view(*left.tokens.shape[:2], *right.tokens.shape[:2])  # [A, K, B, K']
    best_left, best_right = similarity.max(3).values, similarity.max(1).values  # [A, K, B], [A, B, K']
    if slope != 1:  # LeakyReLU is monotone, so it is applied to the maxima only
        best_left, best_right = F.leaky_relu(best_left, slope), F.leaky_relu(best_right, slope)
    return (best_left * left.weights[:, :, None]).sum(1), (best_right * right.weights).sum(2)  # [A, B] each


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
    """FineLIP's score of an image and a caption: the sum of both directed means, on LeakyReLU similarities.

    Args:
        image_tokens, text_tokens, image_mask, text_mask, offset, rows: as in `token_loss`.
        slope: of the LeakyReLU, in [0, 1].

    Shape:
        image_tokens [N, K, D]; text_tokens [N, K', D]; image_mask [N, K] bool; text_mask [N, K'] bool. Returns query
        images × captions and query captions × images, [R, N] each.

    Relations:
        For the whole batch the second matrix is the transpose of the first, unlike the scores of `token_loss`.

    Reference:
        FineLIP, Asokan et al. 2025: cross-modal late interaction.
    """
    if not 0 <= slope <= 1:
        raise ValueError(f"slope must be in [0, 1], got {slope}")
    dtype = at_least_float32(image_tokens, text_tokens)
    image = token_sets("image_tokens", image_tokens, image_mask, dtype)
    text = token_sets("text_tokens", text_tokens, text_mask, dtype)
    rows = check_rows(len(image_tokens), offset, rows)
    own = slice(offset, offset + rows)

    def scores(queries: TokenSets, columns: TokenSets) -> Tensor:
        by_queries, by_columns = max_similarity(queries.rows(own), columns, slope)
        return by_queries + by_columns  # [R, N]

    image_scores = scores(image, text)
    return image_scores, image_scores.T if rows == len(image_tokens) else scores(text, image)


def triplet_loss(
    image_scores: Tensor, text_scores: Tensor, *, margin: float = 0.2, ids: Tensor | None = None, offset: int = 0
) -> Tensor:
    """Σ_ij max(0, margin + M_ij − M_ii) over both directions: a sum, not a mean.

    For R of N queries it is N/R times their share, so that the mean over equal shards is the loss of the whole batch.

    Args:
        image_scores, text_scores: as returned by `late_interaction_scores`.
        ids, offset: as in `hard_negative_loss`.

    Shape:
        image_scores, text_scores [R, N]; ids [N] or [N, K]; returns a scalar.

    Reference:
        FineLIP, Asokan et al. 2025; the hinge is that of VSE++.
    """
    check_non_negative("margin", margin)
    count = image_scores.shape[1]
    rows, ids = check_rows(count, offset, len(image_scores)), check_ids(ids, count)
    ids = torch.arange(count, device=image_scores.device)[:, None] if ids is None else ids  # [N, K]
    same = agree(ids[offset : offset + rows], ids)  # [R, N], True for positives too
    total = image_scores.new_zeros(())
    for scores in (image_scores, text_scores):
        hinges = (margin + scores - scores.diagonal(offset)[:, None]).relu()  # [R, N]
        total = total + hinges.masked_fill(same, 0.0).sum()
    return count / rows * total
