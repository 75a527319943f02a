"""`hard_negative_loss` without its matrices: the same value and gradients from tiles, in memory linear in the batch.

Let L_ij = s·(S_ij + M_ij) be the logits and n_i the log-sum-exp of a query's negatives. Then

    loss of query i     = log(1 + exp(n_i − L_ii))
    its slack           σ_i = 1 − softmax_i(L)_i = sigmoid(n_i − L_ii)
    gradient to L_ij    = exp(L_ij − log(exp(n_i) + exp(L_ii))) for a negative, −σ_i for the positive

so the forward pass keeps one number per query and direction, and the backward pass makes every tile again. Leaving the
positive out of the sum keeps losses and slacks far below 1 exact to the last digits, where 1 − softmax would cancel.

Three identities make the tiles cheap. Where the margins come from the captions themselves, Ḡ needs no product of its
own: image_i·text_j + γ·text_i·text_j = (image_i + γ·text_i)·text_j. A margin that all negatives share is taken from the
positive instead, which is the same softmax. And where a tile's columns are queries too, its columns are the other
direction's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hnclip.losses.hard_negative import (
    agree,
    at_least_float32,
    check_margin_text,
    check_margins,
    check_pairs,
    hard_negative_loss,
    negative_statistics,
)
from hnclip.losses.tiles import blocks, tile_bytes, tile_sides


def tiled_hard_negative_loss(
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
    """`hard_negative_loss` that never holds an R × N matrix once that would be large; exact in value and gradients.

    Memory: beside the gradients, R·D numbers and four tiles of a few MiB, where the eager loss holds 7 to 9
    matrices of R × N. Work: 8·R·N·D operations in products for all pairs at once, as many as the eager loss, whose Ḡ
    costs what the second look at S costs here; a `margin_text` of width D' adds 2·R·N·D'. A gradient of the gradient
    is not available.

    Args:
        image, text, scale, gamma, margin, center, margin_text, offset, rows, ids, check_values: as in
            `hard_negative_loss`.

    Shape:
        image, text [N, D]; scale scalar; margin_text [N, D']; ids [N] or [N, K] integers; returns a scalar.

    Relations:
        While all logits fit one tile (1,024 pairs in float32 on a processor, 4,096 on an accelerator) this is
        `hard_negative_loss`, bit for bit. Beyond, equal up to rounding, which is smaller here when losses are.

    Reference:
        HN-CLIP, eq. 2; the recomputation is that of FlashAttention, Dao et al. 2022.
    """
    count = len(image) if image.ndim else 0
    logits = count * (count if rows is None else rows)
    # One tile saves no memory. On a processor tiles are level with the eager loss at 512 pairs and faster at 1,024.
    one_tile = logits * at_least_float32(image, text).itemsize <= tile_bytes(image.device.type)
    loss = hard_negative_loss if one_tile else loss_from_tiles
    return loss(
        image,
        text,
        scale,
        gamma,
        margin=margin,
        center=center,
        margin_text=margin_text,
        offset=offset,
        rows=rows,
        ids=ids,
        check_values=check_values,
    )


def loss_from_tiles(
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
    size: int | None = None,
) -> Tensor:
    """`tiled_hard_negative_loss` of any number of pairs, in tiles of `size` bytes; None lets the device decide."""
    check_margins(gamma, margin, center)
    pairs = check_pairs(image, text, scale, offset=offset, rows=rows, ids=ids, check_values=check_values)
    frozen = None if margin_text is None else check_margin_text(margin_text, pairs.text, check_values)
    common: float | Tensor = margin
    if gamma:
        source = pairs.text if frozen is None else frozen
        # Only the word "mean" passes the checks.
        shift = negative_statistics(source, source, pairs.ids)[0] if isinstance(center, str) else center
        common = margin - gamma * shift
    size = tile_bytes(image.device.type) if size is None else size
    shape = tile_sides(pairs.rows, len(image), pairs.image.element_size(), size)
    plan = Plan(gamma, offset, pairs.rows, *shape)
    frozen = frozen.detach().contiguous() if gamma and frozen is not None else None
    return _TiledLoss.apply(pairs.image, pairs.text, pairs.scale, frozen, common, pairs.ids, plan)


class Plan(NamedTuple):
    """What is known without looking at a tensor: γ, the queries offset … offset+rows−1, and the largest tile."""

    gamma: float
    offset: int
    rows: int
    height: int
    width: int


class Tile(NamedTuple):
    """Logits of some queries of one direction and some columns; free to be overwritten.

    Args:
        direction: 0 if the queries are images and the columns captions, 1 the other way round.
        queries, columns: which of the N pairs; `rows` says the same of the R queries.
        column_rows: which of the R queries of the other direction the columns are; None if they are none.
        logits: [height, width], without weight where a column is no negative.
    """

    direction: int
    queries: slice
    columns: slice
    rows: slice
    column_rows: slice | None
    logits: Tensor

    @property
    def holds_positives(self) -> bool:
        return self.rows == self.column_rows


@dataclass(frozen=True)
class Logits:
    """The logits of all queries in both directions, a tile at a time.

    Memory: s·(image + γ·text) of the queries and of one tile's columns, and one or two tiles.

    Shape:
        image, text: [N, D]. scale: scalar. frozen: [N, D'], what margins come from if not the captions, or None.
        ids: [N, K] or None.
    """

    image: Tensor
    text: Tensor
    scale: Tensor
    frozen: Tensor | None
    ids: Tensor | None
    plan: Plan

    def boosted(self, part: slice) -> Tensor:
        """s·image, or s·(image + γ·text) where the margins come from the captions: [C, D]."""
        if self.frozen is None and self.plan.gamma:
            return torch.add(self.image[part], self.text[part], alpha=self.plan.gamma).mul_(self.scale)
        return self.image[part] * self.scale

    def tiles(self) -> Iterator[Tile]:
        """Every logit of a negative once per direction or, where both its ends are queries, once for both."""
        _, offset, rows, height, width = self.plan
        end = offset + rows
        queries = self.boosted(slice(offset, end))  # [R, D]
        margins = None  # [R, D']
        if self.frozen is not None:
            margins = self.frozen[offset:end] * (self.plan.gamma * self.scale)
        memory = [self.image.new_empty(height * width) for _ in range(1 if margins is None else 2)]

        def make(left: Tensor, right: Tensor, margin: Tensor | None, same: Tensor | None) -> Tensor:
            logits = memory[0][: len(left) * len(right)].view(len(left), len(right))
            if margin is None:
                torch.mm(left, right.T, out=logits)
            else:
                torch.addmm(margin, left, right.T, out=logits)
            # Finite like the filler of `exclude`: a query without any negative yields no NaN.
            return logits if same is None else logits.masked_fill_(same, torch.finfo(logits.dtype).min)

        # Columns in the outer loop: what they need is made once. A square of queries is cut alike on both sides.
        for columns in (*blocks(0, offset, width), *blocks(offset, end, height), *blocks(end, len(self.image), width)):
            inside = offset <= columns.start < end
            column_rows = slice(columns.start - offset, columns.stop - offset) if inside else None
            boosted = queries[column_rows] if column_rows else self.boosted(columns)  # [W, D]
            for local in blocks(0, rows, height):
                if column_rows and local.start > column_rows.start:
                    break  # mirror images of tiles that came before
                part = slice(offset + local.start, offset + local.stop)
                margin = None
                if margins is not None and self.frozen is not None:
                    shape = (local.stop - local.start, columns.stop - columns.start)
                    margin = memory[1][: shape[0] * shape[1]].view(shape)
                    torch.mm(margins[local], self.frozen[columns].T, out=margin)  # [H, W], for both directions
                same = None if self.ids is None else agree(self.ids[part], self.ids[columns])  # [H, W]
                tile = Tile(
                    0, part, columns, local, column_rows, make(queries[local], self.text[columns], margin, same)
                )
                if tile.holds_positives:
                    tile.logits.fill_diagonal_(torch.finfo(tile.logits.dtype).min)
                yield tile
                if not tile.holds_positives:  # else the second direction is the transpose
                    yield tile._replace(direction=1, logits=make(self.text[part], boosted, margin, same))


class _TiledLoss(torch.autograd.Function):
    """The loss of all queries; saves the log-sum-exp of their negatives and makes the tiles again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        frozen: Tensor | None,
        common: float | Tensor,
        ids: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        with torch.autocast(image.device.type, enabled=False):
            image, text = image.contiguous(), text.contiguous()  # a product would copy anything else once per tile
            local = slice(plan.offset, plan.offset + plan.rows)
            # The margin that all negatives share lowers the positive instead.
            positive = scale * ((image[local] * text[local]).sum(1) - common)  # [R]
            logits = Logits(image, text, scale, frozen, ids, plan)
            negative = log_sums(logits)  # [2, R]
            ctx.save_for_backward(image, text, scale, frozen, ids, positive, negative)
            ctx.plan = plan
            excess = negative - positive  # [2, R]
            return torch.logaddexp(excess, excess.new_zeros(())).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        image, text, scale, frozen, ids, positive, negative = ctx.saved_tensors
        need_image, need_text, need_scale = ctx.needs_input_grad[:3]
        with torch.autocast(image.device.type, enabled=False):
            logits = Logits(image, text, scale, frozen, ids, ctx.plan)
            wanted = need_image, need_text, need_scale
            by_image, by_text, by_scale = residual_sums(logits, positive, negative, wanted)
            factor = grad / (2 * ctx.plan.rows)
            for by_vectors in (by_image, by_text):
                if by_vectors is not None:
                    by_vectors.mul_(factor * scale)
            if by_scale is not None:
                by_scale = by_scale * factor / scale
        return by_image, by_text, by_scale, None, None, None, None


def log_sums(logits: Logits) -> Tensor:
    """Log-sum-exp over the negatives of every query, as image and as caption: [2, R]."""
    plan, image = logits.plan, logits.image
    sums = image.new_full((2, plan.rows), torch.finfo(image.dtype).min)  # [2, R]
    memory = image.new_empty(plan.height * plan.width)

    def add(total: Tensor, tile: Tensor, dim: int) -> None:
        largest = tile.amax(dim, keepdim=True)
        shifted = torch.sub(tile, largest, out=memory[: tile.numel()].view_as(tile)).exp_()  # [H, W]
        torch.logaddexp(total, shifted.sum(dim).log_().add_(largest.squeeze(dim)), out=total)

    for tile in logits.tiles():
        add(sums[tile.direction, tile.rows], tile.logits, 1)
        if tile.column_rows:
            add(sums[1 - tile.direction, tile.column_rows], tile.logits, 0)
    return sums


def residual_sums(
    logits: Logits, positive: Tensor, negative: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Residuals Q_ij = softmax − one-hot, summed over directions, times what S and the logits are made of.

    A common shift of the logits does not matter to the third sum, because each query's residuals sum to 0.

    Shape:
        positive [R]; negative [2, R]; returns Q·text and Qᵀ·image, [N, D] each, and the scalar Σ Q_ij·L_ij; None
        where not wanted.
    """
    plan, sides = logits.plan, (logits.image, logits.text)
    slack = torch.sigmoid(negative - positive)  # [2, R]
    total = torch.logaddexp(negative, positive)  # [2, R]
    sums = [torch.zeros_like(side) if want else None for side, want in zip(sides, wanted)]
    weighted = -(slack * positive).sum() if wanted[2] else None
    memory = [sides[0].new_empty(plan.height * plan.width) for _ in range(2)]

    for tile in logits.tiles():
        direction, scores = tile.direction, tile.logits
        residual, other = (part[: scores.numel()].view_as(scores) for part in memory)
        torch.sub(scores, total[direction, tile.rows, None], out=residual).exp_()  # [H, W]
        if tile.column_rows:
            residual += torch.sub(scores, total[1 - direction, tile.column_rows], out=other).exp_()
        if weighted is not None:
            weighted += scores.mul_(residual).sum()
        if tile.holds_positives:
            residual.diagonal().sub_(slack[:, tile.rows].sum(0))
        by_queries, by_columns = sums[direction], sums[1 - direction]
        if by_queries is not None:
            by_queries[tile.queries].addmm_(residual, sides[1 - direction][tile.columns])
        if by_columns is not None:
            by_columns[tile.columns].addmm_(residual.T, sides[direction][tile.queries])
    return sums[0], sums[1], weighted
