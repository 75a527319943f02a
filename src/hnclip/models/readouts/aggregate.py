"""FineLIP's token sets: a learnt mixture of patches or words, and the global vector beside it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hnclip.models.readout import Readout, Seen

HIDDEN = 0.2  # width of the hidden layer, as a share of the width of the tokens


class Aggregator(nn.Module):
    """Any number of tokens into `keep` of them, each a convex mixture of all: weights @ x, where the weights are the
    softmax over tokens of scale·W(x), W a LayerNorm and two layers, scale learnt.

    Args:
        dim: width of the tokens.
        keep: tokens that come out.

    Shape:
        x [B, T, D]; mask [B, T] bool, True where a token counts; returns [B, keep, D], zeros where none does. What
        stands in the places that do not count, and how many there are, does not matter.

    Reference:
        FineLIP, Asokan et al. 2025.
    """

    def __init__(self, dim: int, keep: int) -> None:
        super().__init__()
        hidden = max(1, int(HIDDEN * dim))
        self.weigh = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, keep))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        logits = self.weigh(x).transpose(1, 2) * self.scale  # [B, keep, T]
        logits = logits.masked_fill(~mask[:, None], torch.finfo(logits.dtype).min)
        # Where no token counts all weights are equal, so they are set to 0 once more.
        weights = logits.softmax(2) * mask[:, None]  # [B, keep, T]
        return weights @ x  # [B, keep, D]


class AggregateImage(Readout):
    """[class token ; mixtures of patches], each of length 1.

    Args:
        dim: width of the joint space.
        keep: mixtures; the readout gives one token more.
    """

    def __init__(self, dim: int, keep: int) -> None:
        super().__init__()
        self.aggregate = Aggregator(dim, keep)

    def forward(self, seen: Seen) -> tuple[Tensor, Tensor]:
        mixtures, there = _mixtures(self.aggregate, seen, seen.inside)  # [B, keep, D], [B, keep]
        whole = seen.vectors[:, None].to(mixtures.dtype)  # [B, 1, D]
        tokens = F.normalize(torch.cat([whole, mixtures], 1), dim=2)  # [B, 1 + keep, D]
        return tokens, F.pad(there, (1, 0), value=True)


class AggregateText(Readout):
    """[mixtures of all tokens before the last ; end token], each of length 1.

    Args:
        dim, keep: as in `AggregateImage`.
    """

    def __init__(self, dim: int, keep: int) -> None:
        super().__init__()
        self.aggregate = Aggregator(dim, keep)

    def forward(self, seen: Seen) -> tuple[Tensor, Tensor]:
        before_last = F.pad(seen.inside[:, 1:], (0, 1))  # [B, T], True where another token follows
        mixtures, there = _mixtures(self.aggregate, seen, before_last)  # [B, keep, D], [B, keep]
        whole = seen.vectors[:, None].to(mixtures.dtype)  # [B, 1, D]
        tokens = F.normalize(torch.cat([mixtures, whole], 1), dim=2)  # [B, keep + 1, D]
        return tokens, F.pad(there, (0, 1), value=True)


def _mixtures(aggregate: Aggregator, seen: Seen, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What the aggregator makes of a view, in the type of its weights, since lengths are taken of it; and where it is
    made of anything."""
    mixtures = aggregate(seen.project(seen.hidden), mask).to(aggregate.scale.dtype)  # [B, keep, D]
    return mixtures, mask.any(1, keepdim=True).expand(-1, mixtures.shape[1])
