"""L_HN: InfoNCE in which each negative gets a margin proportional to the similarity of its caption to the positive's.

This file imports only torch and the standard library, so it can be copied into another project. The other losses of
this package share its building blocks: validated pairs, duplicate masks, cross-entropy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MASK_ELEMENTS = 2**20  # largest duplicate mask that is only needed as a sum; 4 MiB in float32


def hard_negative_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    gamma: float = 0.5,
    *,
    margin: float = 0.0,
    center: float | str = 0.0,
    margin_text: Tensor | None = None,
    offset: int = 0,
    rows: int | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """Symmetric cross-entropy over s·(S + M) with the margin M_ij = margin + γ·(Ḡ_ij − center) for negatives.

    S is the image–text similarity, Ḡ the text–text similarity without gradient; the margin of a positive is 0. The
    scale multiplies the margins too and keeps its gradient through them. Computed in at least float32, also under
    autocast.

    Args:
        image, text: embeddings of all N pairs, normalised by the caller.
        scale: the inverse temperature s, already exponentiated.
        gamma: strength of the caption-similarity margin.
        margin: constant part of the margin.
        center: number subtracted from Ḡ, or "mean" for the mean of Ḡ over all negatives, so that γ redistributes the
            margin between negatives without raising its mean.
        margin_text: embeddings to compute Ḡ from instead of `text`, e.g. those of a frozen encoder.
        offset, rows: pairs offset … offset+rows−1 are the queries of this call, as images and as captions; all N
            pairs are their columns. None: all pairs. The mean over equal shards is the loss of the whole batch, in
            value and in gradient.
        ids: pairs that agree in any column of ids show the same image or caption and are not negatives of each other.

    Shape:
        image, text [N, D]; scale scalar; margin_text [N, D']; ids [N] or [N, K] integers; returns a scalar.

    Relations:
        margin = center = 0 is the paper's loss. gamma = 0 is a fixed margin, and with margin = 0 InfoNCE. A constant Ḡ
        is a fixed margin of γ·Ḡ. center = c with margin = γ·c is the paper's loss again.

    Reference:
        HN-CLIP, eq. 2.
    """
    check_margins(gamma, margin, center)
    pairs = check_pairs(image, text, scale, offset=offset, rows=rows, ids=ids)
    margins = negative_margins(pairs, gamma, margin, center, margin_text)  # [R, N] or None
    duplicates = pairs.duplicates()  # [R, N] or None

    def logits(similarity: Tensor) -> Tensor:
        raised = similarity if margins is None else similarity + margins  # [R, N]
        return exclude(pairs.scale * raised, duplicates)  # [R, N]

    similarity, transposed = pairs.similarities()  # [R, N] each
    image_to_text = logits(similarity)  # [R, N]
    # Margins and masks are symmetric: for the whole batch the second direction is a view of the first.
    text_to_image = image_to_text.T if pairs.whole else logits(transposed)  # [R, N]
    return symmetric_cross_entropy(image_to_text, text_to_image, offset)


class HardNegativeLoss(nn.Module):
    """`hard_negative_loss` as a module with the call signature of open_clip's losses.

    Args:
        gamma, margin, center: as in `hard_negative_loss`.

    Shape:
        image_features, text_features [N, D]; logit_scale scalar, already exponentiated.
    """

    def __init__(self, gamma: float = 0.5, margin: float = 0.0, center: float | str = 0.0) -> None:
        super().__init__()
        check_margins(gamma, margin, center)
        self.gamma, self.margin, self.center = gamma, margin, center

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, margin={self.margin}, center={self.center!r}"

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        output_dict: bool = False,
        *,
        logit_bias: Tensor | None = None,
        **options: Any,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss, or {"contrastive_loss": loss} with `output_dict`.

        Args:
            logit_bias: must be None: a constant bias cancels in a softmax.
            options: margin_text, offset, rows and ids of `hard_negative_loss`.
        """
        if logit_bias is not None:
            raise ValueError("logit_bias must be None: a bias cancels in a softmax; it belongs to a sigmoid loss")
        margins: dict[str, Any] = {"gamma": self.gamma, "margin": self.margin, "center": self.center}
        loss = hard_negative_loss(image_features, text_features, logit_scale, **margins, **options)
        return {"contrastive_loss": loss} if output_dict else loss


@dataclass(frozen=True)
class Queries:
    """R of N pairs, which are the queries of a call, as images and as captions; all N pairs are their columns.

    Shape:
        ids [N, K] or None.
    """

    count: int
    offset: int
    rows: int
    ids: Tensor | None

    @property
    def whole(self) -> bool:
        """Whether every pair is a query."""
        return self.rows == self.count

    @property
    def own(self) -> slice:
        """The queries among the N pairs."""
        return slice(self.offset, self.offset + self.rows)

    def duplicates(self) -> Tensor | None:
        """[R, N], True where a column is another pair with the query's image or caption; None without ids."""
        if self.ids is None:
            return None
        mask = agree(self.ids[self.own], self.ids)  # [R, N]
        mask.diagonal(self.offset).fill_(False)
        return mask

    def negatives(self, device: torch.device) -> Tensor:
        """[R, N], True where a column is neither the query's own pair nor a duplicate of it."""
        ids = torch.arange(self.count, device=device)[:, None] if self.ids is None else self.ids  # [N, K]
        return ~agree(ids[self.own], ids)


@dataclass(frozen=True)
class Pairs(Queries):
    """N validated pairs in at least float32.

    Shape:
        image, text [N, D]; scale scalar.
    """

    image: Tensor
    text: Tensor
    scale: Tensor

    def similarities(self) -> tuple[Tensor, Tensor]:
        """Query images × all captions, and query captions × all images: [R, N] each."""
        if self.whole:  # slicing everything would cost a copy in the backward pass
            similarity = product(self.image, self.text)  # [N, N]
            return similarity, similarity.T
        return product(self.image[self.own], self.text), product(self.text[self.own], self.image)


def check_pairs(image: Tensor, text: Tensor, scale: float | Tensor, **shard: Any) -> Pairs:
    """Validate and promote the arguments that all global losses share; ValueError names the wrong one.

    Args:
        shard: offset, rows and ids, as in `hard_negative_loss`.
    """
    check_embeddings("image", image, 2)
    check_embeddings("text", text, 2)
    if image.shape != text.shape:
        raise ValueError(f"image and text must have the same shape, got {tuple(image.shape)} and {tuple(text.shape)}")
    if len(image) < 2:
        raise ValueError(f"image must hold at least 2 pairs, or there are no negatives; got {len(image)}")
    dtype = at_least_float32(image, text)
    image, text = image.to(dtype), text.to(dtype)
    queries = check_queries(len(image), **shard)
    return Pairs(**vars(queries), image=image, text=text, scale=check_scale(scale, image))


def check_queries(count: int, *, offset: int = 0, rows: int | None = None, ids: Tensor | None = None) -> Queries:
    """The queries offset … offset+rows−1 of `count` pairs; ValueError unless these exist and ids fit the pairs."""
    rows = count if rows is None and offset == 0 else rows
    if rows is None or offset < 0 or rows < 1 or offset + rows > count:
        raise ValueError(f"offset and rows must select at least one of {count} pairs, got offset {offset}, rows {rows}")
    return Queries(count, offset, rows, None if ids is None else check_ids(ids, count))


def check_embeddings(name: str, tensor: Tensor, ndim: int) -> None:
    """ValueError unless `tensor` is floating point with `ndim` dimensions."""
    if tensor.ndim != ndim or not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point with {ndim} dimensions, got {tensor.dtype} {[*tensor.shape]}")


def check_non_negative(name: str, value: float) -> None:
    """ValueError unless `value` is a finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}")


def check_margins(gamma: float, margin: float, center: float | str) -> None:
    """ValueError unless the parameters of the margin are valid."""
    check_non_negative("gamma", gamma)
    check_non_negative("margin", margin)
    if center != "mean" and (isinstance(center, str) or not math.isfinite(center)):
        raise ValueError(f'center must be a finite number or "mean", got {center!r}')


def check_scale(scale: float | Tensor, like: Tensor) -> Tensor:
    """`scale` as a scalar tensor with the dtype and device of `like`; a tensor keeps its gradient."""
    if not isinstance(scale, Tensor):
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale must be finite and greater than 0, got {scale}")
        return like.new_full((), scale)
    if scale.numel() != 1:
        raise ValueError(f"scale must be a number or a tensor of one element, got shape {tuple(scale.shape)}")
    return scale.reshape(()).to(like)


def check_ids(ids: Tensor, count: int) -> Tensor:
    """`ids` as [N, K]; ValueError unless it holds integers for each of the `count` pairs."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be integers, got {ids.dtype}")
    if ids.ndim not in (1, 2) or len(ids) != count:
        raise ValueError(f"ids must have shape [{count}] or [{count}, K], got {tuple(ids.shape)}")
    return ids.reshape(count, -1)  # [N, K]


def at_least_float32(*tensors: Tensor) -> torch.dtype:
    """The common dtype of `tensors`, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def product(left: Tensor, right: Tensor) -> Tensor:
    """left · rightᵀ in the dtype of its arguments: autocast would round similarities to half precision."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right.T


def agree(left: Tensor, right: Tensor) -> Tensor:
    """[A, B], True where rows of left [A, K] and right [B, K] have the same id in any column."""
    same = torch.zeros(len(left), len(right), dtype=torch.bool, device=left.device)  # [A, B]
    for a, b in zip(left.T, right.T):  # one column at a time: no [A, B, K] tensor
        same |= a[:, None] == b[None, :]
    return same


def exclude(logits: Tensor, mask: Tensor | None) -> Tensor:
    """`logits` with zero softmax weight where `mask` is True. The filler is finite, so that a row without negatives
    gives no NaN."""
    return logits if mask is None else logits.masked_fill(mask, torch.finfo(logits.dtype).min)


@torch.no_grad()
def negative_statistics(left: Tensor, right: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean of left_i·right_j over the negatives of all N pairs, and the mean number of negatives of a pair.

    Sums of vectors replace the N × N matrix: O(N·D), and with ids a product with a mask that exists in blocks of rows.
    All N pairs count, whichever are queries, so that every shard computes the same numbers.

    Shape:
        left, right [N, D]; ids [N, K] or None; returns two scalars.
    """
    count = len(left)
    total = (left.sum(0) * right.sum(0)).sum() - (left * right).sum()
    negatives = left.new_full((), count * (count - 1))
    if ids is not None:
        block = max(1, MASK_ELEMENTS // count)
        for start in range(0, count, block):
            part = left[start : start + block]  # [C, D]
            same = agree(ids[start : start + block], ids)  # [C, N]
            same.diagonal(start).fill_(False)
            mask = same.to(left.dtype)  # [C, N]
            total = total - (part * product(mask, right.T)).sum()
            negatives = negatives - mask.sum()
    return total / negatives.clamp(min=1), negatives / count


def margin_source(pairs: Pairs, margin_text: Tensor | None) -> Tensor:
    """The embeddings [N, D'] that Ḡ is computed from; ValueError unless there is one for every pair."""
    if margin_text is None:
        return pairs.text.detach()
    check_embeddings("margin_text", margin_text, 2)
    if len(margin_text) != len(pairs.text):
        raise ValueError(f"margin_text must have {len(pairs.text)} rows, one per pair, got {len(margin_text)}")
    return margin_text.detach().to(pairs.text)  # [N, D']


def constant_margin(
    source: Tensor, ids: Tensor | None, gamma: float, margin: float, center: float | str
) -> float | Tensor:
    """The part of the margin that all negatives share: margin − γ·center."""
    if gamma == 0:
        return margin
    shift = negative_statistics(source, source, ids)[0] if isinstance(center, str) else center
    return margin - gamma * shift


@torch.no_grad()
def negative_margins(
    pairs: Pairs,
    gamma: float,
    margin: float = 0.0,
    center: float | str = 0.0,
    margin_text: Tensor | None = None,
) -> Tensor | None:
    """The margins M [R, N] of `hard_negative_loss`, 0 for positives; None if all are 0."""
    source = margin_source(pairs, margin_text)  # [N, D']
    if gamma == 0 and margin == 0:
        return None
    if gamma == 0:
        margins = source.new_full((pairs.rows, len(source)), margin)  # [R, N]
    else:
        constant = constant_margin(source, pairs.ids, gamma, margin, center)
        margins = product(source[pairs.own], source).mul_(gamma).add_(constant)  # [R, N]
    margins.diagonal(pairs.offset).zero_()
    return margins


def symmetric_cross_entropy(image_to_text: Tensor, text_to_image: Tensor, offset: int) -> Tensor:
    """½[CE(image_to_text) + CE(text_to_image)]; the positive of query i is column offset + i.

    Shape:
        image_to_text, text_to_image [R, N]; returns a scalar.
    """
    target = torch.arange(offset, offset + len(image_to_text), device=image_to_text.device)  # [R]
    return (F.cross_entropy(image_to_text, target) + F.cross_entropy(text_to_image, target)) / 2
