"""L_HN: InfoNCE in which every negative carries the similarity of its caption as a margin.

This file imports torch and the standard library only, so it can be copied alone into another project. The
other losses of this package take their shared pieces (checked pairs, same-pair masks, cross-entropy) from
here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Most elements of a mask that is needed only to be summed, 4 MiB in float32.
MASK_ELEMENTS = 2**20


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
    check_values: bool = True,
) -> Tensor:
    """Symmetric cross-entropy over s·(S + M) with the margin M_ij = margin + γ·(Ḡ_ij − center) for negatives.

    S is the image-text similarity, Ḡ the text-text similarity without gradient; a positive's margin is 0. The
    scale multiplies the margins too and keeps its gradient through them. Computed in at least float32, also
    under autocast.

    Args:
        image, text: embeddings of all N pairs, used as given (the caller normalises).
        scale: the inverse temperature s, already exponentiated.
        gamma: strength of the caption-similarity margin.
        margin: the part of the margin that every negative gets alike.
        center: number subtracted from Ḡ, or "mean" for the mean of G over the negatives of all N pairs, so
            that γ moves margin between negatives without raising their mean.
        margin_text: vectors to build Ḡ from instead of `text`, e.g. of a frozen encoder.
        offset, rows: pairs offset … offset+rows−1 are the queries of this call, as images and as captions;
            all N pairs are their columns. None means every pair. The mean over equal shards is the
            whole-batch loss, in value and in gradient.
        ids: pairs that agree in any column of ids are the same image or caption, never negatives of each
            other.
        check_values: also look for NaN and infinity, which makes an accelerator wait for the host.

    Shape:
        image, text [N, D]; scale scalar; margin_text [N, D']; ids [N] or [N, K] integers; returns a scalar.

    Relations:
        margin = center = 0 is the paper's loss. gamma = 0 is a fixed margin, and with margin = 0 InfoNCE.
        Equal Ḡ everywhere is a fixed margin of γ·Ḡ. center = c with margin = γ·c is the paper's loss again.

    Reference:
        HN-CLIP, eq. 2.
    """
    check_margins(gamma, margin, center)
    pairs = check_pairs(image, text, scale, offset=offset, rows=rows, ids=ids, check_values=check_values)
    margins = negative_margins(pairs, gamma, margin, center, margin_text, check_values=check_values)
    same = pairs.same()

    def logits(similarity: Tensor) -> Tensor:
        boosted = similarity if margins is None else similarity + margins  # [R, N]
        return exclude(pairs.scale * boosted, same)  # [R, N]

    similarity, transposed = pairs.similarities()  # [R, N] each
    image_to_text = logits(similarity)  # [R, N]
    # Margins and masks are symmetric, so the whole batch's second direction is a view of the first.
    text_to_image = image_to_text.T if pairs.whole else logits(transposed)  # [R, N]
    return symmetric_cross_entropy(image_to_text, text_to_image, offset)


class HardNegativeLoss(nn.Module):
    """`hard_negative_loss` as a module with the call of open_clip's losses.

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
            logit_bias: must be None; a softmax has no use for a bias.
            options: margin_text, offset, rows, ids and check_values of `hard_negative_loss`.
        """
        if logit_bias is not None:
            raise ValueError("logit_bias must be None: a bias cancels in a softmax; it belongs to a sigmoid loss")
        loss = hard_negative_loss(
            image_features,
            text_features,
            logit_scale,
            self.gamma,
            margin=self.margin,
            center=self.center,
            **options,
        )
        return {"contrastive_loss": loss} if output_dict else loss


@dataclass(frozen=True)
class Pairs:
    """N checked pairs in at least float32, and which R of them are the queries of this call.

    Shape:
        image, text: [N, D]. scale: scalar. ids: [N, K] or None.
    """

    image: Tensor
    text: Tensor
    scale: Tensor
    offset: int
    rows: int
    ids: Tensor | None

    @property
    def whole(self) -> bool:
        """Whether every pair is a query."""
        return self.rows == len(self.image)

    @property
    def local(self) -> slice:
        """The queries among the N pairs."""
        return slice(self.offset, self.offset + self.rows)

    def similarities(self) -> tuple[Tensor, Tensor]:
        """Query images × all captions, and query captions × all images: [R, N] each."""
        if self.whole:  # a slice of everything would cost a copy on the way back
            similarity = product(self.image, self.text)  # [N, N]
            return similarity, similarity.T
        return product(self.image[self.local], self.text), product(self.text[self.local], self.image)

    def same(self) -> Tensor | None:
        """[R, N], True where a column is another pair with the query's image or caption; None without ids."""
        return None if self.ids is None else same_pairs(self.ids, self.offset, self.rows)

    def negatives(self) -> Tensor:
        """[R, N], True where a column is a negative: neither the query's own pair nor the same thing."""
        same = self.same()
        shape = (self.rows, len(self.image))
        mask = torch.ones(shape, dtype=torch.bool, device=self.image.device) if same is None else ~same  # [R, N]
        mask.diagonal(self.offset).fill_(False)
        return mask


def check_pairs(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    *,
    offset: int,
    rows: int | None,
    ids: Tensor | None,
    check_values: bool,
) -> Pairs:
    """The arguments that every global loss shares, checked and promoted; ValueError names what is wrong."""
    check_embeddings("image", image, 2)
    check_embeddings("text", text, 2)
    if image.shape != text.shape:
        raise ValueError(f"image and text must have the same shape, got {tuple(image.shape)} and {tuple(text.shape)}")
    count = check_count("image", image)
    if check_values:
        check_finite("image", image)
        check_finite("text", text)
    dtype = at_least_float32(image, text)
    image, text = image.to(dtype), text.to(dtype)
    return Pairs(
        image=image,
        text=text,
        scale=check_scale(scale, image, check_values),
        offset=offset,
        rows=check_rows(count, offset, rows),
        ids=check_ids(ids, count),
    )


def check_embeddings(name: str, tensor: Tensor, ndim: int) -> None:
    """ValueError unless `tensor` holds floating-point numbers in `ndim` dimensions."""
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}")


def check_count(name: str, tensor: Tensor) -> int:
    """The number of pairs; ValueError if there are too few for anybody to have a negative."""
    if len(tensor) < 2:
        raise ValueError(f"{name} must hold at least 2 pairs, or there are no negatives; got {len(tensor)}")
    return len(tensor)


def check_finite(name: str, tensor: Tensor) -> None:
    """ValueError if `tensor` holds NaN or infinity; waits for the device."""
    values = tensor.detach()
    # The extremes show both, in a fraction of the time of `isfinite` on every element and without its temporaries.
    if values.numel() and not bool(values.amin().isfinite() & values.amax().isfinite()):
        raise ValueError(f"{name} must be finite, got NaN or infinity")


def check_non_negative(name: str, value: float) -> None:
    """ValueError unless `value` is a finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}")


def check_margins(gamma: float, margin: float, center: float | str) -> None:
    """ValueError unless the three numbers of the margin family make sense."""
    check_non_negative("gamma", gamma)
    check_non_negative("margin", margin)
    if center != "mean" and (isinstance(center, str) or not math.isfinite(center)):
        raise ValueError(f'center must be a finite number or "mean", got {center!r}')


def check_margin_text(margin_text: Tensor, text: Tensor, check_values: bool) -> Tensor:
    """`margin_text` [N, D'] with the dtype and device of `text`; ValueError unless it has a vector for every pair."""
    check_embeddings("margin_text", margin_text, 2)
    if len(margin_text) != len(text):
        raise ValueError(f"margin_text must have {len(text)} rows, one per pair, got {len(margin_text)}")
    if check_values:
        check_finite("margin_text", margin_text)
    return margin_text.to(text)  # [N, D']


def check_scale(scale: float | Tensor, like: Tensor, check_values: bool) -> Tensor:
    """`scale` as a scalar tensor with the dtype and device of `like`, its gradient kept."""
    if not isinstance(scale, Tensor):
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale must be finite and greater than 0, got {scale}")
        return like.new_full((), scale)
    if scale.numel() != 1:
        raise ValueError(f"scale must be a number or a tensor of one element, got shape {tuple(scale.shape)}")
    if check_values and not bool(torch.isfinite(scale).all() and (scale > 0).all()):
        raise ValueError(f"scale must be finite and greater than 0, got {scale.item()}")
    return scale.reshape(()).to(like)


def check_rows(count: int, offset: int, rows: int | None) -> int:
    """The number of queries; ValueError unless offset … offset+rows−1 lies within `count` pairs."""
    if rows is None:
        if offset != 0:
            raise ValueError(f"rows must be given when offset is not 0, got offset {offset}")
        return count
    if offset < 0 or offset >= count:
        raise ValueError(f"offset must be at least 0 and less than the {count} pairs, got {offset}")
    if rows < 1 or offset + rows > count:
        raise ValueError(f"rows must be between 1 and {count - offset} after offset {offset}, got {rows}")
    return rows


def check_ids(ids: Tensor | None, count: int) -> Tensor | None:
    """`ids` as [N, K]; ValueError unless it holds integers for each of the `count` pairs."""
    if ids is None:
        return None
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be integers, got {ids.dtype}")
    if ids.ndim not in (1, 2) or len(ids) != count:
        raise ValueError(f"ids must have shape [{count}] or [{count}, K], got {tuple(ids.shape)}")
    return ids.reshape(count, -1)  # [N, K]


def at_least_float32(*tensors: Tensor) -> torch.dtype:
    """The common dtype of `tensors`, widened to float32 if it is narrower."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def product(left: Tensor, right: Tensor) -> Tensor:
    """left · rightᵀ in the dtype of its arguments: autocast would round similarities to half precision."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right.T


def same_pairs(ids: Tensor, offset: int, rows: int) -> Tensor:
    """[R, N], True where a column is another pair that agrees with the query in any of the K ids [N, K]."""
    same = agree(ids[offset : offset + rows], ids)  # [R, N]
    same.diagonal(offset).fill_(False)
    return same


def agree(left: Tensor, right: Tensor) -> Tensor:
    """[A, B], True where rows of left [A, K] and right [B, K] have an id in common, in the same column."""
    same = torch.zeros(len(left), len(right), dtype=torch.bool, device=left.device)  # [A, B]
    for a, b in zip(left.T, right.T):  # one id column at a time: no [A, B, K] tensor
        same |= a[:, None] == b[None, :]
    return same


def exclude(logits: Tensor, mask: Tensor | None) -> Tensor:
    """`logits` with no weight in any softmax where `mask` is True.

    The filler is finite (its exponential is 0 all the same), so a row without any negative yields no NaN.
    """
    return logits if mask is None else logits.masked_fill(mask, torch.finfo(logits.dtype).min)


@torch.no_grad()
def negative_statistics(left: Tensor, right: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean of left_i·right_j over the negatives of all N pairs, and the mean number of negatives of a pair.

    Sums of vectors replace the N×N matrix, so this costs O(N·D); ids add the product with an N×N mask, of which
    a few rows exist at a time. All N pairs count, whichever are queries, so that every shard finds the same numbers.

    Shape:
        left, right [N, D]; ids [N, K] or None; returns two scalars.
    """
    count = len(left)
    total = (left.sum(0) * right.sum(0)).sum() - (left * right).sum()
    negatives = left.new_full((), count * (count - 1))
    if ids is not None:
        block = max(1, MASK_ELEMENTS // count)
        for start in range(0, count, block):
            some = left[start : start + block]  # [C, D]
            same = same_pairs(ids, start, len(some)).to(left.dtype)  # [C, N]
            total = total - (some * product(same, right.T)).sum()
            negatives = negatives - same.sum()
    return total / negatives.clamp(min=1), negatives / count


@torch.no_grad()
def negative_margins(
    pairs: Pairs,
    gamma: float,
    margin: float = 0.0,
    center: float | str = 0.0,
    margin_text: Tensor | None = None,
    *,
    check_values: bool = True,
) -> Tensor | None:
    """The margins M [R, N] of `hard_negative_loss`, 0 for positives; None where they are 0 for everybody."""
    source = pairs.text if margin_text is None else check_margin_text(margin_text, pairs.text, check_values)  # [N, D']
    if gamma == 0 and margin == 0:
        return None
    if gamma == 0:
        margins = source.new_full((pairs.rows, len(source)), margin)  # [R, N]
    else:
        # Only the word "mean" passes the checks.
        shift = negative_statistics(source, source, pairs.ids)[0] if isinstance(center, str) else center
        margins = product(source[pairs.local], source).sub_(shift).mul_(gamma).add_(margin)  # [R, N]
    margins.diagonal(pairs.offset).zero_()
    return margins


def symmetric_cross_entropy(image_to_text: Tensor, text_to_image: Tensor, offset: int) -> Tensor:
    """½[CE(image_to_text) + CE(text_to_image)], where query i's positive is column offset + i.

    Shape:
        image_to_text, text_to_image [R, N]; returns a scalar.
    """
    rows = len(image_to_text)
    target = torch.arange(offset, offset + rows, device=image_to_text.device)  # [R]
    return (F.cross_entropy(image_to_text, target) + F.cross_entropy(text_to_image, target)) / 2
