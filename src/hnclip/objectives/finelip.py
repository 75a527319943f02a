"""FineLIP: a hinge on token-by-token scores of learnt token sets, and the injected global term, if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hnclip.core import Embeddings
from hnclip.losses.tokens import late_interaction_loss
from hnclip.models.readout import Readout, TowerOutput
from hnclip.objectives.base import Objective, Term, TrainProgress, tokens_of

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

OFFICIAL_PATCHES = 196  # default of the released code, for every model
RATIOS = (0.4, 0.5)  # shares of the patches that are aggregated, and of those that are kept
HIDDEN = 0.2  # width of the aggregator's hidden layer, as a share of the width of the tokens


@dataclass(frozen=True)
class FineLip(Objective):
    """L = L_global(image, caption) + w·α·L_fine, L_fine the sum of hinges on late-interaction scores of the token sets
    of `TokenAggregation`; α rises from 0 to 1 in the first epoch.

    Relations:
        FineLIP as released has no global term; InfoNCE or L_HN are added to it.

    Reference:
        FineLIP, Asokan et al. 2025.
    """

    @property
    def tokens(self) -> bool:
        return self.weights["fine"] > 0

    def at(self, progress: TrainProgress) -> FineLip:
        return replace(self, factors={"fine": progress.within if progress.epoch == 0 else 1.0})

    def readouts(self, model: DualEncoder) -> Mapping[str, Readout]:
        if not self.tokens:
            return {}
        keep = kept_tokens(OFFICIAL_PATCHES if self.official else _patches(model))
        return {
            "full": TokenAggregation(model.width, keep, text=False),
            "caption": TokenAggregation(model.width, keep, text=True),
        }

    def own_terms(self) -> Mapping[str, Term]:
        return {"fine": _fine}


def _fine(embeddings: Embeddings) -> Tensor:
    image, image_mask = tokens_of(embeddings.images["full"])
    text, text_mask = tokens_of(embeddings.texts["caption"])
    return late_interaction_loss(image, text, image_mask, text_mask, ids=embeddings.ids)


def kept_tokens(patches: int) -> int:
    """Number of mixtures of an image with so many patches, and of a caption."""
    aggregated, kept = RATIOS
    return max(1, int(patches * aggregated * kept))


def _patches(model: DualEncoder) -> int:
    side = model.family.grid(model.backbone, model.image_size)
    if side is None:
        raise ValueError(
            "FineLIP keeps a share of an image's patches, and the number of patches of this model is unknown: use a "
            "ViT, or --fidelity official, which assumes 196"
        )
    return side * side


class Aggregator(nn.Module):
    """Any number of tokens to `keep` convex mixtures: weights @ x with the weights softmax over tokens of scale·W(x), W
    a LayerNorm and two layers, scale learnt.

    Shape:
        x [B, T, D]; mask [B, T] bool, True where a token counts; returns [B, keep, D], zeros where none does. Masked
        places do not influence the result.

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
        weights = logits.softmax(2) * mask[:, None]  # [B, keep, T]; zeros if no token counts
        return weights @ x  # [B, keep, D]


class TokenAggregation(Readout):
    """[class token ; mixtures of patches] of an image, [mixtures of all tokens before the last ; end token] of a text;
    each of length 1.

    Args:
        dim: width of the joint space.
        keep: number of mixtures; the readout returns one token more.
        text: whether the view is a text.
    """

    def __init__(self, dim: int, keep: int, *, text: bool) -> None:
        super().__init__()
        self.aggregate = Aggregator(dim, keep)
        self.text = text

    def forward(self, tower: TowerOutput) -> tuple[Tensor, Tensor]:
        # For a text, the tokens before its last one.
        mask = F.pad(tower.inside[:, 1:], (0, 1)) if self.text else tower.inside  # [B, T]
        # In the dtype of the weights, since lengths are computed from it.
        mixtures = self.aggregate(tower.project(tower.hidden), mask).to(self.aggregate.scale.dtype)  # [B, keep, D]
        there = mask.any(1, keepdim=True).expand(-1, mixtures.shape[1])  # [B, keep]
        whole = tower.vectors[:, None].to(mixtures.dtype)  # [B, 1, D]
        sets = [mixtures, whole] if self.text else [whole, mixtures]
        tokens = F.normalize(torch.cat(sets, 1), dim=2)  # [B, keep + 1, D]
        return tokens, F.pad(there, (0, 1) if self.text else (1, 0), value=True)
