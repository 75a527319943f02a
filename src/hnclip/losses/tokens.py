"""Late interaction between sets of tokens: the token term of HN-CLIP (FILIP) and FineLIP's fine-grained hinge.

The similarities of all token pairs are computed in tiles of a few MiB and reduced to both maxima at once, so that the
[R·P, N·Q] matrix never exists; autograd keeps the positions of the maxima.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.losses.hard_negative import (
    at_least_float32,
    check_embeddings,
    check_queries,
    check_scale,
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


def check_masked(name: str, tokens: Tensor, mask: Tensor) -> None:
    """ValueError unless `tokens` [N, T, D] is floating point and `mask` [N, T] boolean."""
    check_embeddings(name, tokens, 3)
    if mask.dtype != torch.bool or mask.shape != tokens.shape[:2]:
        expected = [*tokens.shape[:2]]
        raise ValueError(f"the mask of {name} must be bool of shape {expected}, got {mask.dtype} {[*mask.shape]}")


def token_loss(
    patches: Tensor, words: Tensor, patch_mask: Tensor, word_mask: Tensor, scale: float | Tensor, **shard: Any
) -> Tensor:
    """Symmetric cross-entropy over token scores.

    An image scores a caption by the mean over patches of the maximum over words, a caption scores an image by the mean
    over words of the maximum over patches; L = ½[CE(s·i2t) + CE(s·t2i)]. Computed in at least float32, also under
    autocast.

    Args:
        patches, words: token embeddings of all N pairs, normalised by the caller.
        patch_mask, word_mask: True for tokens that count (no class, start, end or padding token). The loss is NaN if a
            pair has none.
        scale: as in `hard_negative_loss`.
        shard: offset, rows and ids, as in `hard_negative_loss`.

    Shape:
        patches [N, P, D]; words [N, Q, D]; patch_mask [N, P] bool; word_mask [N, Q] bool; returns a scalar.

    Relations:
        With one patch and one word per pair this is InfoNCE.

    Reference:
        FILIP, Yao et al. 2022; the term L_tok of HN-CLIP, eq. 3.
    """
    dtype, queries = at_least_float32(patches, words), check_queries(len(patches), **shard)
    image, text = token_sets("patches", patches, patch_mask, dtype), token_sets("words", words, word_mask, dtype)
    image_scores, by_words = max_similarity(image.rows(queries.own), text)  # [R, N] each
    # For the whole batch both directions come from the same tiles.
    text_scores = by_words.T if queries.whole else max_similarity(text.rows(queries.own), image)[0]  # [R, N]
    scale, duplicates = check_scale(scale, image_scores), queries.duplicates()
    logits = [exclude(scale * scores, duplicates) for scores in (image_scores, text_scores)]  # [R, N] each
    return symmetric_cross_entropy(logits[0], logits[1], queries.offset)


def late_interaction_loss(
    image_tokens: Tensor,
    text_tokens: Tensor,
    image_mask: Tensor,
    text_mask: Tensor,
    *,
    slope: float = 0.1,
    margin: float = 0.2,
    **shard: Any,
) -> Tensor:
    """FineLIP's fine-grained hinge Σ_ij max(0, margin + M_ij − M_ii) over both directions: a sum, not a mean.

    M_ij, the score of an image and a caption, is the sum of both directed means of maxima of LeakyReLU similarities.
    For R of N queries the loss is N/R times their share, so that the mean over equal shards is that of the whole batch.

    Args:
        image_tokens, text_tokens, image_mask, text_mask: as in `token_loss`.
        slope: of the LeakyReLU, in [0, 1].
        shard: offset, rows and ids, as in `hard_negative_loss`.

    Shape:
        image_tokens [N, K, D]; text_tokens [N, K', D]; image_mask [N, K] bool; text_mask [N, K'] bool; returns a
        scalar.

    Relations:
        Unlike the scores of `token_loss`, M is the same in both directions.

    Reference:
        FineLIP, Asokan et al. 2025: cross-modal late interaction; the hinge is that of VSE++.
    """
    dtype, queries = at_least_float32(image_tokens, text_tokens), check_queries(len(image_tokens), **shard)
    image = token_sets("image_tokens", image_tokens, image_mask, dtype)
    text = token_sets("text_tokens", text_tokens, text_mask, dtype)

    def score(left: TokenSets, right: TokenSets) -> Tensor:
        by_left, by_right = max_similarity(left.rows(queries.own), right, slope)
        return by_left + by_right  # [R, N]

    image_scores = score(image, text)  # [R, N]
    text_scores = image_scores.T if queries.whole else score(text, image)  # [R, N]
    positive_or_duplicate = ~queries.negatives(image_tokens.device)  # [R, N]
    total = image_scores.new_zeros(())
    for scores in (image_scores, text_scores):
        hinges = (margin + scores - scores.diagonal(queries.offset)[:, None]).relu()  # [R, N]
        total = total + hinges.masked_fill(positive_or_duplicate, 0.0).sum()
    return queries.count / queries.rows * total


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
