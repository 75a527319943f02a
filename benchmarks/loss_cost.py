"""What a batch costs each of W processes: the memory of the loss and the bytes on the wire, from formulas.

A process holds R = B / W pairs as queries and gathers all B as columns. Plain numbers: nothing here looks at a tensor.
`hnclip bench batch_memory` prints these formulas and checks them where they fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from hnclip.losses.tiled import tile_bytes, tile_shape

# Matrices of R × B that `hard_negative_loss` holds at once when its forward pass ends: margins, S, S + M, logits and
# log-softmax, where the last four exist twice if the second direction is no transpose of the first.
EAGER_MATRICES_ALONE, EAGER_MATRICES = 7, 9
# Tensors as large as the features of one side that its backward pass holds at once: each direction has its own
# gradients before they are added.
EAGER_GRADIENTS_ALONE, EAGER_GRADIENTS = 3, 4
# Tiles of the backward pass: the logits, the softmax of the rows, the softmax of the columns.
TILES = 3
# Numbers per query: the positive, and for each direction the log-sums of negatives and of all, and the slack.
VECTORS = 7


@dataclass(frozen=True)
class RankCost:
    """Bytes for one process.

    Args:
        features: gathered image and text vectors of the whole batch.
        gradients: theirs, which any loss returns.
        eager, tiled: what `hard_negative_loss` and `tiled_hard_negative_loss` allocate at their peak, forward and
            backward, gradients included, features not.
        gather_sent: sent to gather the features, each process its own to every other.
        reduce_scatter_sent, all_reduce_sent: sent to sum the gradients over processes if each gets its own
            rows, or everybody gets all of them.
    """

    features: int
    gradients: int
    eager: int
    tiled: int
    gather_sent: int
    reduce_scatter_sent: int
    all_reduce_sent: int


def rank_cost(pairs: int, width: int, world: int = 1, *, item_bytes: int = 4, device_type: str = "cpu") -> RankCost:
    """The cost of L_HN for one of `world` processes that share a batch of `pairs` vectors of `width` numbers."""
    if world < 1 or pairs < 2 or pairs % world:
        raise ValueError(f"pairs must be at least 2 and a multiple of world, got {pairs} pairs and world {world}")
    rows = pairs // world
    side = pairs * width * item_bytes
    eager = eager_bytes(pairs, rows, width, item_bytes)
    return RankCost(
        features=2 * side,
        gradients=2 * side,
        eager=eager,
        tiled=2 * side + tiled_extra_bytes(pairs, rows, width, item_bytes, device_type)
        if rows * pairs * item_bytes > tile_bytes(device_type)
        else eager,
        gather_sent=(world - 1) * 2 * rows * width * item_bytes,
        reduce_scatter_sent=(world - 1) * 2 * side // world,
        all_reduce_sent=2 * (world - 1) * 2 * side // world,
    )


def eager_bytes(pairs: int, rows: int, width: int, item_bytes: int) -> int:
    """The peak of `hard_negative_loss`: its matrices when the forward pass ends or, if larger, its gradients."""
    alone = rows == pairs
    matrices = (EAGER_MATRICES_ALONE if alone else EAGER_MATRICES) * rows
    gradients = (EAGER_GRADIENTS_ALONE if alone else EAGER_GRADIENTS) * width
    return max(matrices, gradients) * pairs * item_bytes


def tiled_extra_bytes(pairs: int, rows: int, width: int, item_bytes: int, device_type: str = "cpu") -> int:
    """What the tiled loss allocates beside the gradients: scaled queries, tiles, and a few numbers per query."""
    height, wide = tile_shape(rows, pairs, item_bytes, tile_bytes(device_type))
    columns = 0 if rows == pairs else 2 * wide * width  # scaled columns of this tile and of the one before
    return (rows * width + columns + TILES * height * wide + VECTORS * rows) * item_bytes
