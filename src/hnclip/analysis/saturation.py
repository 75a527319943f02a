"""How much a model's batches still hold to learn from, before any training: both losses of every batch of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hnclip.losses import clip_loss, hard_negative_loss
from hnclip.train.step import SATURATED


@dataclass(frozen=True)
class BatchLosses:
    """InfoNCE and L_HN of L batches; `negatives` is how many each pair has, in the mean.

    Shape:
        infonce, hn: [L] float64
    """

    infonce: Tensor
    hn: Tensor
    negatives: float
    gamma: float

    @property
    def infonce_saturated(self) -> float:
        """Share of batches that InfoNCE has nothing to learn from."""
        return (self.infonce < SATURATED).double().mean().item()

    @property
    def hn_saturated(self) -> float:
        return (self.hn < SATURATED).double().mean().item()

    def to_dict(self) -> dict[str, Any]:
        quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
        return {
            "batches": len(self.infonce),
            "negatives": self.negatives,
            "gamma": self.gamma,
            "dtype": "float64",
            "infonce_quartiles": self.infonce.quantile(quartiles).tolist(),
            "hn_quartiles": self.hn.quantile(quartiles).tolist(),
            "infonce_saturated": self.infonce_saturated,
            "hn_saturated": self.hn_saturated,
        }


@torch.no_grad()
def batch_losses(
    image: Tensor, text: Tensor, ids: Tensor, batches: Sequence[Sequence[int]], *, scale: float, gamma: float = 0.5
) -> BatchLosses:
    """Both losses of each batch at a model's own vectors, in float64: in float32 a loss below 1e-3 has lost digits, and
    one below 1e-7 is 0.

    Args:
        image, text: unit vectors of all pairs, of each its chosen caption.
        ids: pairs that agree in any column are never negatives of each other.
        batches: rows of the pairs that see each other; those with fewer than two are left out.
        scale: the model's inverse temperature.

    Shape:
        image, text [N, D]; ids [N, K]

    Reference:
        HN-CLIP, figure 4a, at the first step.
    """
    image, text = image.double(), text.double()
    found = []
    pairs = negatives = 0
    for rows in batches:
        if len(rows) < 2:
            continue
        at = torch.as_tensor(rows, device=image.device)
        given: dict[str, Any] = {"ids": ids[at]}
        infonce = clip_loss(image[at], text[at], scale, **given)
        found.append(torch.stack([infonce, hard_negative_loss(image[at], text[at], scale, gamma, **given)]))
        pairs, negatives = pairs + len(rows), negatives + len(rows) * (len(rows) - 1)
    if not found:
        raise ValueError("no batch holds two different pairs: there is nothing to compare")
    infonce, hn = torch.stack(found, dim=1).cpu()  # [L] each
    return BatchLosses(infonce, hn, negatives / pairs, gamma)
