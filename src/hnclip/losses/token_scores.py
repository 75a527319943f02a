"""Scores between sets of tokens from tiles of their similarity; positions of the maxima carry the gradient.

Forward: similarities exist in one tile at a time, [words of some captions, patches of some images]. A tile is
reduced to the maxima of both directions while it lies in the cache, and what stays is where they stood.

Backward: d scores / d similarity is zero but at the maxima, so a token's gradient is a weighted sum of few vectors:
of those that it chose, one per pair of the other side, and of those that chose it. Nothing is multiplied that
weighs 0, and no similarity is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hnclip.losses.hard_negative import product

# Most tokens along the sides of a tile. Forward on a processor: 512 words × 2048 patches are 4 MiB of similarities.
# Backward: 2048 vectors of width 768 are 6 MiB, and all that a tile reads. An accelerator needs larger kernels.
WORDS = {"cpu": 512}
PATCHES = {"cpu": 2048}
VECTORS = {"cpu": 2048}
ON_ACCELERATOR = 4096

# A processor finds a maximum much faster than its position; so it looks for the best run of rows first.
RUN = 16


class Layout(NamedTuple):
    """Where the tokens of N pairs lie in a table of N·T vectors; M tokens in all, those of a pair together.

    Args:
        lengths: tokens of every pair, in Python, since they shape the tiles.
        rows: [M], the row of every token in the table; None if token k is row k.
        padded: all lengths are T and token k is row k, but rows that do not count are read as copies of their
            pair's first token. A copy never changes a maximum, and its weight is 0.
        starts: [N], the first token of every pair.
        owners: [M], the pair of every token.
        weights: [M], 1 / (tokens of the pair); 0 for a copy; NaN if the pair has no token.
    """

    lengths: list[int]
    rows: Tensor | None
    padded: bool
    starts: Tensor
    owners: Tensor
    weights: Tensor

    def read(self, table: Tensor, tokens: slice, dtype: torch.dtype) -> Tensor:
        """The vectors of some tokens, [m, D]; a view where that is possible."""
        found = table[tokens] if self.rows is None else table.index_select(0, self.rows[tokens])
        return found.to(dtype)

    def write(self, table: Tensor, tokens: slice, vectors: Tensor) -> None:
        """Put vectors [m, D] where the tokens lie. What would go to a copy is 0, so it may go to the copy's row."""
        if self.rows is None or self.padded:
            table[tokens] = vectors
        else:
            table.index_copy_(0, self.rows[tokens], vectors.to(table.dtype))

    def originals(self, pairs: slice, positions: Tensor) -> Tensor:
        """Positions [n, ...] within n pairs, with a copy replaced by what it is a copy of."""
        if self.rows is None or not self.padded:
            return positions
        starts = self.starts[pairs].view(-1, *[1] * (positions.ndim - 1))  # [n, ...]
        return self.rows[positions + starts] - starts


def packed_layout(mask: Tensor, dtype: torch.dtype) -> Layout:
    """Only the tokens that count; their number is needed on the host, so an accelerator waits once."""
    kept = mask.clone()  # [N, T]
    kept[:, 0] |= ~mask.any(1)  # a pair without tokens keeps one, whose weight is 0 / 0
    counts = kept.sum(1)  # [N]
    lengths = counts.tolist()
    rows = None if sum(lengths) == mask.numel() else kept.flatten().nonzero().flatten()  # [M]
    return _layout(lengths, counts, rows, False, _weights(mask, dtype)[kept])


def padded_layout(mask: Tensor, dtype: torch.dtype) -> Layout:
    """All tokens of the table, copies where they do not count; nobody waits."""
    n, t = mask.shape
    table = torch.arange(n * t, device=mask.device).view(n, t)  # [N, T]
    first = table.gather(1, mask.int().argmax(1, keepdim=True))  # [N, 1]
    rows = torch.where(mask, table, first).flatten()  # [N·T]
    counts = torch.full((n,), t, device=mask.device)  # [N]
    return _layout([t] * n, counts, rows, True, _weights(mask, dtype).flatten())


def _weights(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return mask.to(dtype) / mask.sum(1, keepdim=True)  # [N, T]


def _layout(lengths: list[int], counts: Tensor, rows: Tensor | None, padded: bool, weights: Tensor) -> Layout:
    pairs = torch.arange(len(lengths), device=counts.device)  # [N]
    owners = pairs.repeat_interleave(counts, output_size=sum(lengths))  # [M]
    return Layout(lengths, rows, padded, counts.cumsum(0) - counts, owners, weights)


class Group(NamedTuple):
    """Consecutive pairs, their tokens, and whether they are queries."""

    pairs: slice
    tokens: slice
    queries: bool


def groups(lengths: Sequence[int], most: int, offset: int, rows: int) -> list[Group]:
    """All pairs in groups of at most `most` tokens (or one pair), queries and others apart."""
    found: list[Group] = []
    first = start = stop = 0  # pair, its token, and the token after the last
    for pair, length in enumerate([*lengths, 0]):
        borders = (offset, offset + rows, len(lengths))
        if pair > first and (pair in borders or stop + length - start > most):
            found.append(Group(slice(first, pair), slice(start, stop), offset <= first < offset + rows))
            first, start = pair, stop
        stop += length
    return found


def token_scores(
    patches: Tensor, words: Tensor, image: Layout, text: Layout, offset: int, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Mean over a query's tokens of their best match: query images × captions, and query captions × images.

    Among equal matches the first one counts, as in `torch.max`: it alone gets the gradient.

    Memory: positions, 2 bytes each (4 if a pair has more than 32,768 tokens), R·P·N + R·Q·N of them; tiles beside.

    Args:
        image, text: where patches and words lie in their tables.
        offset, rows: pairs offset … offset+rows−1 are the queries.
        dtype: of the computation and of the scores.

    Shape:
        patches [N·P, D]; words [N·Q, D]; returns two matrices [R, N].
    """
    return _TokenScores.apply(patches, words, image, text, offset, rows, dtype)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        patches: Tensor,
        words: Tensor,
        image: Layout,
        text: Layout,
        offset: int,
        rows: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        device, queries, pairs = patches.device.type, slice(offset, offset + rows), len(image.lengths)
        image_scores, text_scores = patches.new_empty(2, rows, pairs, dtype=dtype)  # [R, N] each
        image_best = _positions(image.lengths[queries], text, patches)  # [query patches, N]
        text_best = _positions(text.lengths[queries], image, patches)  # [query words, N]
        image_groups = groups(image.lengths, PATCHES.get(device, ON_ACCELERATOR), offset, rows)
        for captions in groups(text.lengths, WORDS.get(device, ON_ACCELERATOR), offset, rows):
            word_vectors = text.read(words, captions.tokens, dtype)  # [w, D]
            for images in image_groups:
                if not (captions.queries or images.queries):
                    continue
                tile = product(word_vectors, image.read(patches, images.tokens, dtype))  # [w, p]
                if images.queries:
                    values, positions = best_of_rows(tile, text.lengths[captions.pairs])  # [c, p] each
                    to, own = _local(image, images, offset)
                    image_best[own, captions.pairs] = text.originals(captions.pairs, positions).T.to(image_best.dtype)
                    means = sum_rows((values * image.weights[images.tokens]).T, image.lengths[images.pairs])
                    image_scores[to, captions.pairs] = means  # [i, c]
                if captions.queries:
                    values, positions = best_of_columns(tile, image.lengths[images.pairs])  # [w, i] each
                    to, own = _local(text, captions, offset)
                    text_best[own, images.pairs] = image.originals(images.pairs, positions.T).T.to(text_best.dtype)
                    weighted = values * text.weights[captions.tokens, None]  # [w, i]
                    text_scores[to, images.pairs] = sum_rows(weighted, text.lengths[captions.pairs])  # [c, i]
        ctx.save_for_backward(patches, words, image_best, text_best)
        ctx.layouts, ctx.offset, ctx.rows, ctx.dtype = (image, text), offset, rows, dtype
        return image_scores, text_scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, image_scores: Tensor, text_scores: Tensor) -> tuple[Tensor | None, ...]:
        patches, words, image_best, text_best = ctx.saved_tensors
        image, text = ctx.layouts
        image_side = Side(patches.detach(), image, image_best, image_scores)
        text_side = Side(words.detach(), text, text_best, text_scores)
        by_patches, by_words = ctx.needs_input_grad[:2]
        return (
            gradient(image_side, text_side, ctx.offset, ctx.rows, ctx.dtype) if by_patches else None,
            gradient(text_side, image_side, ctx.offset, ctx.rows, ctx.dtype) if by_words else None,
            *[None] * 5,
        )


def _positions(lengths: Sequence[int], others: Layout, like: Tensor) -> Tensor:
    """Room for where every token of some pairs finds its best match in every other pair."""
    dtype = torch.int16 if max(others.lengths) <= 2**15 else torch.int32
    return like.new_empty(sum(lengths), len(others.lengths), dtype=dtype)


def _local(layout: Layout, group: Group, offset: int) -> tuple[slice, slice]:
    """The pairs and the tokens of a group of queries, counted from the first query."""
    before = sum(layout.lengths[:offset])
    pairs, tokens = group.pairs, group.tokens
    return slice(pairs.start - offset, pairs.stop - offset), slice(tokens.start - before, tokens.stop - before)


def best_of_rows(tile: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """First maximum, and its position, of each column within each of n blocks of rows: [m, p] -> [n, p] twice."""
    found = [best_row(block) for block in tile.split(list(lengths))]
    return torch.stack([values for values, _ in found]), torch.stack([positions for _, positions in found])


def best_row(block: Tensor) -> tuple[Tensor, Tensor]:
    """`block.max(0)` of [m, p]: the largest run of rows, and the largest row in it, are found faster."""
    count = len(block)
    if block.device.type != "cpu" or count < 2 * RUN:
        values, positions = block.max(0)
        return values, positions
    whole = count - count % RUN
    runs = block[:whole].unflatten(0, (-1, RUN)).amax(1)  # [runs, p]
    if whole < count:
        runs = torch.cat([runs, block[whole:].amax(0, keepdim=True)])
    values, run = runs.max(0)  # [p] each
    # The last run may be short; reading it from further up is safe, since the rows above it are smaller.
    start = (run * RUN).clamp_(max=count - RUN)  # [p]
    candidates = block.gather(0, start + torch.arange(RUN)[:, None])  # [RUN, p]
    return values, start + candidates.max(0).indices


def best_of_columns(tile: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """First maximum, and its position, of each row within each of n blocks of columns: [w, m] -> [w, n] twice."""
    if len(set(lengths)) == 1:
        values, positions = tile.unflatten(1, (len(lengths), -1)).max(2)
        return values, positions
    found = [block.max(1) for block in tile.split(list(lengths), 1)]
    return torch.stack([values for values, _ in found], 1), torch.stack([positions for _, positions in found], 1)


def sum_rows(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """The sums of n blocks of rows: [m, c] -> [n, c]."""
    if len(set(lengths)) == 1:
        return values.unflatten(0, (len(lengths), -1)).sum(1)
    return torch.stack([block.sum(0) for block in values.split(list(lengths))])


class Side(NamedTuple):
    """What the backward pass knows of the images, or of the captions.

    Shape:
        table [N·T, D]; best [tokens of queries, N], the position of their best match; grad [R, N], of the scores.
    """

    table: Tensor
    layout: Layout
    best: Tensor
    grad: Tensor

    def choices(self, tokens: Group, others: Layout, pairs: Group, offset: int) -> tuple[Tensor, Tensor]:
        """What m query tokens chose among the tokens of n other pairs, counted from the first of these, and the
        gradient of each choice: [m, n] twice."""
        layout = self.layout
        _, own = _local(layout, tokens, offset)
        chosen = self.best[own, pairs.pairs] + (others.starts[pairs.pairs] - pairs.tokens.start)  # [m, n]
        scores = self.grad[layout.owners[tokens.tokens] - offset, pairs.pairs]  # [m, n]
        return chosen, scores * layout.weights[tokens.tokens, None]


def gradient(own: Side, other: Side, offset: int, rows: int, dtype: torch.dtype) -> Tensor:
    """The gradient of one side's table."""
    most = VECTORS.get(own.table.device.type, ON_ACCELERATOR)
    result = torch.zeros_like(own.table)  # [N·T, D]
    other_groups = groups(other.layout.lengths, most, offset, rows)
    for mine in groups(own.layout.lengths, most, offset, rows):
        count = mine.tokens.stop - mine.tokens.start
        total = own.table.new_zeros(count, own.table.shape[1], dtype=dtype)  # [m, D]
        for theirs in other_groups:
            if not (mine.queries or theirs.queries):
                continue
            vectors = other.layout.read(other.table, theirs.tokens, dtype).contiguous()  # [t, D]
            if mine.queries:
                chosen, weights = own.choices(mine, other.layout, theirs, offset)  # [m, n] each
                total += F.embedding_bag(chosen, vectors, mode="sum", per_sample_weights=weights)
            if theirs.queries:
                total += sum_by_choice(vectors, *other.choices(theirs, own.layout, mine, offset), count)
        own.layout.write(result, mine.tokens, total)
    return result


def sum_by_choice(vectors: Tensor, chosen: Tensor, weights: Tensor, count: int) -> Tensor:
    """Per token the weighted sum of the vectors that chose it: [t, D], [t, n], [t, n] -> [count, D].

    Sorting first costs less than adding into random rows, and the sums come out the same every time.
    """
    chosen, order = chosen.flatten().int().sort(stable=True)  # [t·n] each
    tokens = torch.arange(count, device=chosen.device, dtype=chosen.dtype)
    starts = torch.searchsorted(chosen, tokens)  # [count]
    voters = order // weights.shape[1]  # [t·n]
    return F.embedding_bag(voters, vectors, starts, mode="sum", per_sample_weights=weights.flatten()[order])
