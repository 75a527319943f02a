"""SmartCLIP: every caption is compared in the dimensions that its mask network opens.

Built from the published formulas; no released code was available for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hnclip.core import Embeddings
from hnclip.losses.hard_negative import at_least_float32
from hnclip.models.readout import Readout, TowerOutput
from hnclip.objectives.base import GlobalTerm, Objective, Term, tokens_of

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

# Initial logits of the mask: the sigmoid is above 0.9, so that nearly all dimensions are kept and training starts at
# the model's own similarity, but gradients still pass.
OPEN = 2.5


@dataclass(frozen=True)
class SmartClip(Objective):
    """L = L_global on A + λ·‖m‖₁/D, with A_ij = ⟨v_i ⊙ m_j, t_j⟩ and m_j ∈ {0, 1}^D the mask of caption j.

    A = V·(M ⊙ T)ᵀ, so the global term needs only masked captions. Both directions use the mask of the pair's caption.
    Margins are those of whole captions. Masks exist in training only; retrieval uses plain cosines.

    Relations:
        With all dimensions open this is the global term. The sources do not give λ, nor where vectors are normalised
        after masking. Here the penalty is the mean share of open dimensions, so that λ does not depend on D, its
        default is this package's own, and nothing is normalised again.

    Reference:
        SmartCLIP, modular contrast and sparsity.
    """

    @property
    def tokens(self) -> bool:
        return True

    def readouts(self, model: DualEncoder) -> Mapping[str, Readout]:
        return {"caption": CaptionMask(model.width)}

    def global_value(self, term: GlobalTerm, embeddings: Embeddings) -> Tensor:
        return term(embeddings, text=_masks(embeddings) * embeddings.texts["caption"].vectors)

    def own_terms(self) -> Mapping[str, Term]:
        # The mean of the masks, not of their absolute values, whose gradient would vanish at 0.
        return {"sparsity": lambda embeddings: _masks(embeddings).mean()}


def _masks(embeddings: Embeddings) -> Tensor:
    """The mask of each caption [N, D], as `CaptionMask` computes it."""
    masks = tokens_of(embeddings.texts["caption"])[0][:, 0]  # [N, D]
    return masks.to(at_least_float32(masks))


class CaptionMask(Readout):
    """The mask network: a caption's token features to one vector of zeros and ones.

    One Transformer block over the tokens, attention pooling with a learnt query, a sigmoid and a threshold of 0.5, both
    in at least float32. Padding has no influence, and there is no dropout.

    Args:
        width: D of the joint space.

    Shape:
        tokens [B, 1, D] in {0, 1}, not normalised; mask [B, 1], all True. The gradient is that of the sigmoid.

    Relations:
        The sources leave open which tokens it reads and how it is initialised. Here: all tokens of the caption, special
        ones included, in the joint space; nearly all dimensions open.

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

    def forward(self, tower: TowerOutput) -> tuple[Tensor, Tensor]:
        tokens = tower.project(tower.hidden)  # [B, T, D]
        padding = ~tower.inside  # [B, T]
        tokens = self.norm(self.block(tokens, src_key_padding_mask=padding))  # [B, T, D]
        query = self.query.to(tokens).expand(len(tokens), 1, -1)  # [B, 1, D]
        logits, _ = self.pool(query, tokens, tokens, key_padding_mask=padding, need_weights=False)  # [B, 1, D]
        return straight_through(logits), tower.inside.new_ones(len(tokens), 1)


def straight_through(logits: Tensor) -> Tensor:
    """1 where the sigmoid is above 0.5, else 0; the gradient is that of the sigmoid."""
    soft = torch.sigmoid(logits.to(at_least_float32(logits)))
    return (soft > 0.5).to(soft) + (soft - soft.detach())  # the bracket is exactly 0


def head_count(width: int) -> int:
    """The divisor of the width that comes nearest to heads of 64 dimensions."""
    divisors = [count for count in range(1, width + 1) if width % count == 0]
    return min(divisors, key=lambda count: abs(count - width / 64))
