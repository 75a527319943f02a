"""SmartCLIP's mask network: which dimensions of the joint space a caption speaks of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hnclip.models.readout import Readout, Seen

# Where the logits of the mask start: the sigmoid is then above 0.9, so nearly all dimensions are open and training
# begins at the model's own similarity; but not so far out that no gradient would pass.
OPEN = 2.5


class CaptionMask(Readout):
    """A caption's token features into one vector of zeros and ones.

    One Transformer block over the tokens, attention pooling with a learnt query, a sigmoid and a threshold of 0.5.
    Sigmoid and threshold are computed in at least float32, also under autocast. Neither the length of padding nor what
    stands in it matters, and there is no dropout.

    Args:
        width: D of the joint space.

    Shape:
        tokens [B, 1, D] in {0, 1}, not normalised; mask [B, 1], all True. The gradient is that of the sigmoid.

    Relations:
        The sources leave open where the tokens are taken from and how the network starts. Here they are all tokens of
        the caption, special ones too, in the joint space, whose dimensions the mask opens and closes; it starts with
        nearly all of them open.

    Reference:
        SmartCLIP, mask network.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        heads = head_count(width)
        self.block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(width)
        self.query = nn.Parameter(torch.randn(width) * width**-0.5)
        self.pool = nn.MultiheadAttention(width, heads, batch_first=True)
        nn.init.constant_(self.pool.out_proj.bias, OPEN)

    def forward(self, seen: Seen) -> tuple[Tensor, Tensor]:
        tokens = seen.project(seen.hidden)  # [B, T, D]
        pads = ~seen.inside  # [B, T]
        tokens = self.norm(self.block(tokens, src_key_padding_mask=pads))  # [B, T, D]
        query = self.query.to(tokens).expand(len(tokens), 1, -1)  # [B, 1, D]
        logits, _ = self.pool(query, tokens, tokens, key_padding_mask=pads, need_weights=False)  # [B, 1, D]
        return open_or_closed(logits), seen.inside.new_ones(len(tokens), 1)


def open_or_closed(logits: Tensor) -> Tensor:
    """1 where the sigmoid is above 0.5, else 0; backward as if it were the sigmoid (straight-through estimator)."""
    soft = torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    hard = (soft > 0.5).to(soft)
    return hard + (soft - soft.detach())  # the bracket is exactly 0


def head_count(width: int) -> int:
    """The divisor of the width that comes nearest to heads of 64 dimensions."""
    divisors = [count for count in range(1, width + 1) if width % count == 0]
    return min(divisors, key=lambda count: abs(count - width / 64))
