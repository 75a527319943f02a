"""Late interaction of patches and words (FILIP): which patch shows a word, and which word names a patch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hnclip.losses.hard_negative import (
    at_least_float32,
    check_count,
    check_embeddings,
    check_finite,
    check_ids,
    check_rows,
    check_scale,
    exclude,
    product,
    same_pairs,
    symmetric_cross_entropy,
)

# Most patch-word similarities in one chunk, 128 MiB in float32: 16 pairs of 256 patches and 248 words fit.
# Chunks below 32 MiB would stay in the C library's heap when freed and leave it in fragments.
CHUNK_ELEMENTS = 2**25


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
    check_values: bool = True,
) -> Tensor:
    """Symmetric cross-entropy over token scores: the mean over a query's tokens of their best matches.

    An image scores a caption by mean over patches of max over words, a caption scores an image by mean over
    words of max over patches; L = ½[CE(s·i2t) + CE(s·t2iᵀ)]. The two are different matrices, unlike S and Sᵀ.

    Memory: the N²·P·Q similarities are made and reduced in chunks of at most `CHUNK_ELEMENTS` (never less
    than one query's), forward and backward; two or three are alive at a time. Between forward and backward
    only the maxima and their positions are kept, about N²·(P + Q) numbers.

    Args:
        patches, words: token embeddings of all N pairs, used as given (the caller normalises).
        patch_mask, word_mask: True where a token counts: no class, start, end or pad token. What stands in
            the other places is never read.
        scale, offset, rows, ids, check_values: as in `hard_negative_loss`. Finding the token columns that
            nobody uses, to drop them, makes an accelerator wait for the host once per side, whatever
            check_values says; without it a pair that has no token makes the loss NaN.

    Shape:
        patches [N, P, D]; words [N, Q, D]; patch_mask [N, P] bool; word_mask [N, Q] bool; returns a scalar.

    Relations:
        With one patch and one word per pair this is InfoNCE.

    Reference:
        FILIP, Yao et al. 2022; the term L_tok of HN-CLIP, eq. 3.
    """
    check_tokens("patches", patches, "patch_mask", patch_mask, check_values)
    check_tokens("words", words, "word_mask", word_mask, check_values)
    if len(patches) != len(words) or patches.shape[2] != words.shape[2]:
        raise ValueError(
            "patches and words must agree in pairs and width, "
            f"got shapes {tuple(patches.shape)} and {tuple(words.shape)}"
        )
    count = check_count("patches", patches)
    rows = check_rows(count, offset, rows)
    ids = check_ids(ids, count)

    dtype = at_least_float32(patches, words)
    image = gather_tokens(patches, patch_mask, dtype)
    text = gather_tokens(words, word_mask, dtype)
    if check_values:
        check_finite("patches", image.vectors)
        check_finite("words", text.vectors)
    scale = check_scale(scale, image.vectors, check_values)

    same = None if ids is None else same_pairs(ids, offset, rows)  # [R, N]
    image_to_text, text_to_image = (scale * scores for scores in token_scores(image, text, offset, rows))
    return symmetric_cross_entropy(exclude(image_to_text, same), exclude(text_to_image, same), offset)


class Tokens(NamedTuple):
    """The tokens of N pairs, without gaps.

    Shape:
        vectors: [N, T, D]. weights: [N, T], 1 / (tokens of the pair) where a token counts, 0 elsewhere.
    """

    vectors: Tensor
    weights: Tensor


def check_tokens(name: str, tokens: Tensor, mask_name: str, mask: Tensor, check_values: bool) -> None:
    """ValueError unless `tokens` [N, T, D] and `mask` [N, T] fit and every pair has a token."""
    check_embeddings(name, tokens, 3)
    if mask.dtype != torch.bool:
        raise ValueError(f"{mask_name} must be bool, got {mask.dtype}")
    if mask.shape != tokens.shape[:2]:
        raise ValueError(f"{mask_name} must have shape {tuple(tokens.shape[:2])} like {name}, got {tuple(mask.shape)}")
    if check_values and not bool(mask.any(1).all()):
        empty = (~mask.any(1)).nonzero().flatten().tolist()
        raise ValueError(f"{mask_name} must be True for at least one token of every pair, got none for pairs {empty}")


def gather_tokens(tokens: Tensor, mask: Tensor, dtype: torch.dtype) -> Tokens:
    """Drop the columns nobody uses and fill the gaps that remain.

    A gap gets a copy of its pair's first token and weight 0. A copy never changes a maximum, and weight 0
    keeps it out of every mean, so the big similarity tensor needs no mask.
    """
    used = mask.any(0)  # [T]
    if not bool(used.all()):
        tokens, mask = tokens[:, used], mask[:, used]  # [N, T', D], [N, T']
    first = mask.int().argmax(1)  # [N]
    filler = tokens[torch.arange(len(tokens), device=tokens.device), first]  # [N, D]
    vectors = torch.where(mask[:, :, None], tokens, filler[:, None, :]).to(dtype)  # [N, T', D]
    weights = mask.to(dtype) / mask.sum(1, keepdim=True)  # [N, T']
    return Tokens(vectors, weights)


def token_scores(image: Tokens, text: Tokens, offset: int, rows: int) -> tuple[Tensor, Tensor]:
    """Scores of query images for all captions, and of query captions for all images: [R, N] each."""
    if rows == len(image.vectors):
        # Everybody is a query, so each similarity serves both directions and is computed once.
        image_rows, text_columns = [], []
        for similarity, weights in similarity_chunks(image, text):  # [C, P, N, Q], [C, P]
            image_rows.append(best_key(similarity, weights))  # [C, N]
            text_columns.append(best_query(similarity, text.weights))  # [C, N]
        return torch.cat(image_rows), torch.cat(text_columns).T
    image_queries, text_queries = (Tokens(*(t[offset : offset + rows] for t in side)) for side in (image, text))
    return (
        torch.cat([best_key(*chunk) for chunk in similarity_chunks(image_queries, text)]),  # [R, N]
        torch.cat([best_key(*chunk) for chunk in similarity_chunks(text_queries, image)]),  # [R, N]
    )


def similarity_chunks(queries: Tokens, keys: Tokens) -> Iterator[tuple[Tensor, Tensor]]:
    """Per chunk of C queries: similarities [C, A, N, B] of all their tokens and keys, and weights [C, A]."""
    (_, a, _), (n, b, _) = queries.vectors.shape, keys.vectors.shape
    size = max(1, CHUNK_ELEMENTS // (a * n * b))
    flat_keys = keys.vectors.flatten(0, 1)  # [N·B, D]
    for vectors, weights in zip(queries.vectors.split(size), queries.weights.split(size)):
        yield product(vectors.flatten(0, 1), flat_keys).view(len(vectors), a, n, b), weights


# `max` over a dimension keeps indices for its backward, not its input; `amax` would keep all similarities.


def best_key(similarity: Tensor, query_weights: Tensor) -> Tensor:
    """Mean over query tokens of the maximum over key tokens: [C, A, N, B], [C, A] -> [C, N]."""
    return (similarity.max(dim=3).values * query_weights[:, :, None]).sum(1)


def best_query(similarity: Tensor, key_weights: Tensor) -> Tensor:
    """Mean over key tokens of the maximum over query tokens: [C, A, N, B], [N, B] -> [C, N]."""
    return (similarity.max(dim=1).values * key_weights).sum(2)
