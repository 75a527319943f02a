"""`hard_negative_loss` without its matrices: the same value and gradients from tiles, in memory linear in the batch.

Let L_ij = s·(S_ij + M_ij) be the logits and n_i the log-sum-exp of a query's negatives. Then

    loss of query i     = log(1 + exp(n_i − L_ii))
    its slack           σ_i = 1 − softmax_i(L)_i = sigmoid(n_i − L_ii)
    gradient to L_ij    = exp(L_ij − log(exp(n_i) + exp(L_ii))) for a negative, −σ_i for the positive

so the forward pass stores one number per query and direction, and the backward pass recomputes each tile. Leaving the
positive out of the sum keeps losses and slacks far below 1 exact, where 1 − softmax would cancel.

Three identities make the tiles cheap:
- if the margins come from the captions themselves, Ḡ needs no product of its own:
  image_i·text_j + γ·text_i·text_j = (image_i + γ·text_i)·text_j;
- a margin that all negatives share can be subtracted from the positive instead: the softmax is the same;
- where the columns of a tile are queries too, the tile's columns are the rows of the other direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hnclip.losses.hard_negative import (
    agree,
    at_least_float32,
    check_margins,
    check_pairs,
    constant_margin,
    hard_negative_loss,
    margin_source,
)

# A tile stays in the processor's cache while it is computed, reduced and multiplied; from 1 to 16 MiB no size was
# faster beyond a scatter of 15 % (one thread, 2,048 and 4,096 pairs). The size for accelerators, which need more work
# per kernel launch, was not measured.
TILE_BYTES = {"cpu": 2**22}
ACCELERATOR_TILE_BYTES = 2**26


def tile_bytes(device_type: str) -> int:
    """Size of the largest tile on this type of device."""
    return TILE_BYTES.get(device_type, ACCELERATOR_TILE_BYTES)


def tile_shape(rows: int, columns: int, item_bytes: int, size: int) -> tuple[int, int]:
    """Height and width of the largest tile: square if there are enough rows, else as wide as `size` bytes allow."""
    elements = max(1, size // item_bytes)
    height = min(rows, isqrt(elements))
    return height, min(columns, elements // height)


def tiled_hard_negative_loss(
    image: Tensor, text: Tensor, scale: float | Tensor, gamma: float = 0.5, **options: Any
) -> Tensor:
    """`hard_negative_loss` that never holds an R × N matrix if that would be large; exact in value and gradients.

    Memory: R·D numbers and four tiles of a few MiB in addition to the gradients, where the eager loss holds 7 to 9
    matrices of R × N. Work: 8·R·N·D operations for the whole batch, as many as the eager loss, whose Ḡ costs what
    recomputing S costs here; a `margin_text` of width D' adds 2·R·N·D'. A second derivative is not available.

    Args:
        image, text, scale, gamma: as in `hard_negative_loss`.
        options: margin, center, margin_text, offset, rows and ids, as in `hard_negative_loss`.

    Shape:
        image, text [N, D]; scale scalar; returns a scalar.

    Relations:
        While all logits fit into one tile (1,024 pairs in float32 on a processor, 4,096 on an accelerator) this is
        `hard_negative_loss`, bit for bit. Beyond, equal up to rounding, which is smaller here for small losses.

    Reference:
        HN-CLIP, eq. 2; recomputation as in FlashAttention, Dao et al. 2022.
    """
    logits = len(image) * (options.get("rows") or len(image))
    # One tile saves no memory. On a processor tiles are level with the eager loss at 512 pairs and faster at 1,024.
    one_tile = logits * at_least_float32(image, text).itemsize <= tile_bytes(image.device.type)
    loss = hard_negative_loss if one_tile else loss_from_tiles
    return loss(image, text, scale, gamma, **options)


def loss_from_tiles(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor,
    gamma: float = 0.5,
    *,
    margin: float = 0.0,
    center: float | str = 0.0,
    margin_text: Tensor | None = None,
    size: int | None = None,
    **shard: Any,
) -> Tensor:
    """`tiled_hard_negative_loss` for any number of pairs, in tiles of `size` bytes (None: by device).

    Args:
        shard: offset, rows and ids, as in `hard_negative_loss`.
    """
    check_margins(gamma, margin, center)
    pairs = check_pairs(image, text, scale, **shard)
    source = margin_source(pairs, margin_text)  # [N, D']
    constant = constant_margin(source, pairs.ids, gamma, margin, center)
    shape = tile_shape(pairs.rows, pairs.count, pairs.image.element_size(), size or tile_bytes(image.device.type))
    frozen = source.contiguous() if gamma and margin_text is not None else None
    layout = Layout(gamma, pairs.offset, pairs.rows, pairs.ids, *shape)
    return _TiledLoss.apply(pairs.image, pairs.text, pairs.scale, frozen, constant, layout)


class Layout(NamedTuple):
    """γ, the queries offset … offset+rows−1, duplicates by ids [N, K], and the shape of the largest tile."""

    gamma: float
    offset: int
    rows: int
    ids: Tensor | None
    height: int
    width: int


class LogitTile(NamedTuple):
    """Logits of some queries of one direction against some columns; may be overwritten.

    Args:
        direction: 0 if the queries are images and the columns captions, 1 the other way round.
        queries, columns: slices of the N pairs; `rows` is the slice of the R queries.
        column_rows: the slice of the R queries of the other direction that the columns are; None if they are none.
        logits: [height, width], with zero softmax weight where a column is not a negative.
    """

    direction: int
    queries: slice
    columns: slice
    rows: slice
    column_rows: slice | None
    logits: Tensor

    @property
    def has_positives(self) -> bool:
        return self.rows == self.column_rows


@dataclass(frozen=True)
class TiledLogits:
    """The logits of all queries in both directions, one tile at a time.

    Memory: s·(image + γ·text) of the queries and of the columns of a tile, and one or two tiles.

    Shape:
        image, text [N, D]; scale scalar; frozen [N, D'], embeddings for the margins if these are not the captions.
    """

    image: Tensor
    text: Tensor
    scale: Tensor
    frozen: Tensor | None
    layout: Layout

    def scaled(self, part: slice) -> Tensor:
        """s·image, or s·(image + γ·text) if the margins come from the captions: [C, D]."""
        if self.frozen is None and self.layout.gamma:
            return torch.add(self.image[part], self.text[part], alpha=self.layout.gamma).mul_(self.scale)
        return self.image[part] * self.scale

    def tiles(self) -> Iterator[LogitTile]:
        """Every logit of a negative once per direction; once for both where row and column are queries."""
        gamma, offset, rows, ids, height, width = self.layout
        end = offset + rows
        queries = self.scaled(slice(offset, end))  # [R, D]
        frozen_queries = None if self.frozen is None else self.frozen[offset:end] * (gamma * self.scale)  # [R, D']
        buffers = [self.image.new_empty(height * width) for _ in range(1 if self.frozen is None else 2)]
        smallest = torch.finfo(self.image.dtype).min  # finite, as in `exclude`

        def compute(left: Tensor, right: Tensor, margin: Tensor | None, duplicates: Tensor | None) -> Tensor:
            logits = buffers[0][: len(left) * len(right)].view(len(left), len(right))
            if margin is None:
                torch.mm(left, right.T, out=logits)
            else:
                torch.addmm(margin, left, right.T, out=logits)
            return logits if duplicates is None else logits.masked_fill_(duplicates, smallest)

        # Columns in the outer loop: what they need is computed once. The square of queries has the same blocks on
        # both sides.
        for columns in (*blocks(0, offset, width), *blocks(offset, end, height), *blocks(end, len(self.image), width)):
            inside = offset <= columns.start < end
            column_rows = slice(columns.start - offset, columns.stop - offset) if inside else None
            scaled = queries[column_rows] if column_rows else self.scaled(columns)  # [W, D]
            for local in blocks(0, rows, height):
                if column_rows and local.start > column_rows.start:
                    break  # transposes of tiles that were computed before
                part = slice(offset + local.start, offset + local.stop)
                margin = None
                if frozen_queries is not None and self.frozen is not None:
                    shape = (local.stop - local.start, columns.stop - columns.start)
                    margin = buffers[1][: shape[0] * shape[1]].view(shape)
                    torch.mm(frozen_queries[local], self.frozen[columns].T, out=margin)  # [H, W], for both directions
                duplicates = None if ids is None else agree(ids[part], ids[columns])  # [H, W]
                logits = compute(queries[local], self.text[columns], margin, duplicates)
                tile = LogitTile(0, part, columns, local, column_rows, logits)
                if tile.has_positives:
                    tile.logits.fill_diagonal_(smallest)
                yield tile
                if not tile.has_positives:  # else the second direction is the transpose
                    yield tile._replace(direction=1, logits=compute(self.text[part], scaled, margin, duplicates))


class _TiledLoss(torch.autograd.Function):
    """The mean loss of all queries; saves the log-sum-exp of their negatives and recomputes the tiles in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        frozen: Tensor | None,
        constant: float | Tensor,
        layout: Layout,
    ) -> Tensor:
        with torch.autocast(image.device.type, enabled=False):
            image, text = image.contiguous(), text.contiguous()  # a product would copy anything else for each tile
            local = slice(layout.offset, layout.offset + layout.rows)
            positive = scale * ((image[local] * text[local]).sum(1) - constant)  # [R]
            negative = log_sums(TiledLogits(image, text, scale, frozen, layout))  # [2, R]
            ctx.save_for_backward(image, text, scale, frozen, positive, negative)
            ctx.layout = layout
            excess = negative - positive  # [2, R]
            return torch.logaddexp(excess, excess.new_zeros(())).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        image, text, scale, frozen, positive, negative = ctx.saved_tensors
        with torch.autocast(image.device.type, enabled=False):
            logits = TiledLogits(image, text, scale, frozen, ctx.layout)
            by_image, by_text, by_scale = residual_sums(logits, positive, negative, ctx.needs_input_grad[:3])
            factor = grad / (2 * ctx.layout.rows)
            for by_embedding in (by_image, by_text):
                if by_embedding is not None:
                    by_embedding.mul_(factor * scale)
            if by_scale is not None:
                by_scale = by_scale * factor / scale
        return by_image, by_text, by_scale, None, None, None


def log_sums(logits: TiledLogits) -> Tensor:
    """Log-sum-exp over the negatives of every query, as image and as caption: [2, R]."""
    layout, image = logits.layout, logits.image
    sums = image.new_full((2, layout.rows), torch.finfo(image.dtype).min)  # [2, R]
    buffer = image.new_empty(layout.height * layout.width)

    def add(total: Tensor, tile: Tensor, dim: int) -> None:
        largest = tile.amax(dim, keepdim=True)
        shifted = torch.sub(tile, largest, out=buffer[: tile.numel()].view_as(tile)).exp_()  # [H, W]
        torch.logaddexp(total, shifted.sum(dim).log_().add_(largest.squeeze(dim)), out=total)

    for tile in logits.tiles():
        add(sums[tile.direction, tile.rows], tile.logits, 1)
        if tile.column_rows:
            add(sums[1 - tile.direction, tile.column_rows], tile.logits, 0)
    return sums


def residual_sums(
    logits: TiledLogits, positive: Tensor, negative: Tensor, needed: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Residuals Q_ij = softmax − one-hot, summed over directions, times the factors of S and the logits.

    A common shift of the logits does not change the third sum, because the residuals of each query sum to 0.

    Shape:
        positive [R]; negative [2, R]; returns Q·text and Qᵀ·image, [N, D] each, and the scalar Σ Q_ij·L_ij; None
        where not needed.
    """
    layout, sides = logits.layout, (logits.image, logits.text)
    slack = torch.sigmoid(negative - positive)  # [2, R]
    total = torch.logaddexp(negative, positive)  # [2, R]
    sums = [torch.zeros_like(side) if need else None for side, need in zip(sides, needed)]
    weighted = -(slack * positive).sum() if needed[2] else None
    buffers = [sides[0].new_empty(layout.height * layout.width) for _ in range(2)]

    for tile in logits.tiles():
        direction, scores = tile.direction, tile.logits
        residual, other = (buffer[: scores.numel()].view_as(scores) for buffer in buffers)
        torch.sub(scores, total[direction, tile.rows, None], out=residual).exp_()  # [H, W]
        if tile.column_rows:
            residual += torch.sub(scores, total[1 - direction, tile.column_rows], out=other).exp_()
        if weighted is not None:
            weighted += scores.mul_(residual).sum()
        if tile.has_positives:
            residual.diagonal().sub_(slack[:, tile.rows].sum(0))
        by_queries, by_columns = sums[direction], sums[1 - direction]
        if by_queries is not None:
            by_queries[tile.queries].addmm_(residual, sides[1 - direction][tile.columns])
        if by_columns is not None:
            by_columns[tile.columns].addmm_(residual.T, sides[direction][tile.queries])
    return sums[0], sums[1], weighted


def blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    """start … stop−1 as consecutive slices of at most `size`, as equal as possible."""
    count = -(-(stop - start) // size)
    for k in range(count):
        yield slice(start + (stop - start) * k // count, start + (stop - start) * (k + 1) // count)
