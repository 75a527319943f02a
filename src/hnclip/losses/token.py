"""Late interaction of patches and words (FILIP): which patch shows a word, and which word names a patch."""

from __future__ import annotations

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
    same_pairs,
    symmetric_cross_entropy,
)
from hnclip.losses.token_scores import packed_layout, padded_layout, token_scores


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

    Among equal matches the first one counts and gets all of the gradient, as in `torch.max`. Computed in at least
    float32, also under autocast.

    Memory: the R·P·N·Q similarities never exist together, forward or backward; tiles of them are a few MiB. The
    backward pass needs the positions of the maxima, R·N·(P + Q) numbers of 2 bytes, and computes no similarity
    again. Time: the product of all patches and words, once, and about half as much again. Tokens that do not count
    cost nothing where the caption lengths are known on the host.

    Args:
        patches, words: token embeddings of all N pairs, used as given (the caller normalises).
        patch_mask, word_mask: True where a token counts: no class, start, end or pad token. What stands in
            the other places is never read.
        scale, offset, rows, ids: as in `hard_negative_loss`.
        check_values: also look for NaN, infinity and pairs that have no token, which makes an accelerator wait for
            the host. Without it a pair that has no token makes the loss NaN, and an accelerator, which then does
            not know the caption lengths either, computes all N·P patches and N·Q words, copies in place of
            those that do not count.

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

    if check_values:
        check_finite("patches", extremes(patches, patch_mask))
        check_finite("words", extremes(words, word_mask))
    dtype = at_least_float32(patches, words)
    scale = check_scale(scale, patches.new_empty((), dtype=dtype), check_values)

    make_layout = packed_layout if host_knows_lengths(patches.device, check_values) else padded_layout
    image, text = make_layout(patch_mask, dtype), make_layout(word_mask, dtype)
    scores = token_scores(patches.flatten(0, 1), words.flatten(0, 1), image, text, offset, rows, dtype)  # [R, N] twice
    same = None if ids is None else same_pairs(ids, offset, rows)  # [R, N]
    image_to_text, text_to_image = (exclude(scale * matrix, same) for matrix in scores)
    return symmetric_cross_entropy(image_to_text, text_to_image, offset)


def host_knows_lengths(device: torch.device, check_values: bool) -> bool:
    """Whether counting tokens on the host is free, or is waited for anyway."""
    return device.type == "cpu" or check_values


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


def extremes(tokens: Tensor, mask: Tensor) -> Tensor:
    """The largest and smallest element of every token that counts: finite if all are, and small. [2, M]"""
    return torch.stack([tokens.detach().amax(2)[mask], tokens.detach().amin(2)[mask]])
