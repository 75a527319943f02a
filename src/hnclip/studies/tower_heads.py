"""Linear heads from two frozen towers into one space, trained as a run trains its projections.

Unlike the heads of `hnclip.analysis.heads`, which turn vectors of a space that exists already, these make the space:
towers of different origin and width have none. So the temperature is trained with them, as in CLIP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hnclip.analysis.heads import HeadLoss, PairRows, TowerFeatures, batch_loss
from hnclip.config import SCALE_MAX, OptimConfig
from hnclip.evaluate.ranks import Ranks, retrieval_ranks
from hnclip.losses.hard_negative import negative_statistics
from hnclip.train.optimizer import clamp_scale, learning_rate_factor, set_learning_rate

_OPTIM = OptimConfig()  # momenta, decay, warm-up, floor and clipping of every run
SCALE = 1 / 0.07  # CLIP's inverse temperature before training

Negatives = Literal["micro", "batch"]


@dataclass(frozen=True)
class MarginLoss:
    """A member of the margin family: every negative's margin is `margin` + γ·(Ḡ − center).

    Relations:
        InfoNCE has neither margin nor γ, L_HN γ alone. Centred, γ moves margin between negatives and leaves their mean;
        γ = 0 is then the fixed margin.
    """

    margin: float = 0.0
    gamma: float = 0.0
    centred: bool = False

    @property
    def name(self) -> str:
        if self.centred:
            return f"affine, m {self.margin:.3g}, γ {self.gamma:g}"
        if self.gamma and self.margin:
            return f"margin {self.margin:.3g} and γ {self.gamma:g}"
        if self.gamma:
            return f"L_HN, γ {self.gamma:g}"
        return f"fixed margin {self.margin:.3g}" if self.margin else "InfoNCE"

    def value(self, image: Tensor, text: Tensor, *, scale: float | Tensor, size: int) -> Tensor:
        """The mean over micro-batches of `size` pairs. Shape: image, text [B, D] of length 1; returns a scalar."""
        center: float | Literal["mean"] = "mean" if self.centred else 0.0
        return batch_loss(image, text, HeadLoss(self.gamma, self.margin), scale=scale, size=size, center=center)


@dataclass(frozen=True)
class HeadSettings:
    """How heads are trained. Pairs of a step are `micro_batch` × `accumulate`, as in `OptimConfig`."""

    epochs: int = 20
    micro_batch: int = 16
    accumulate: int = 8
    width: int = 256
    """D of the space that the heads make."""

    def __post_init__(self) -> None:
        for name, least in {"epochs": 1, "micro_batch": 2, "accumulate": 1, "width": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def batch(self) -> int:
        """Pairs of an optimiser step."""
        return self.micro_batch * self.accumulate

    def size(self, negatives: Negatives) -> int:
        """Pairs that are compared with each other."""
        return self.micro_batch if negatives == "micro" else self.batch


@dataclass(frozen=True)
class TowerHeads:
    """Two heads after an epoch, the inverse temperature then, and the mean of Ḡ over the negatives of all steps so far.

    Shape:
        image: [W, D], text: [V, D].
    """

    image: Tensor
    text: Tensor
    scale: float
    similarity: float

    def ranks(self, features: TowerFeatures) -> Ranks:
        return retrieval_ranks(features.image @ self.image, features.text @ self.text, features.owner)


def scaled(features: TowerFeatures) -> TowerFeatures:
    """The same with every vector at a length of the root of its width: towers differ in size, and heads of one learning
    rate should see numbers of about 1. Directions stay, and with them how alike captions are before training; centred
    features would have a mean of Ḡ of 0 from beginning to end."""

    def at_length(vectors: Tensor) -> Tensor:
        return F.normalize(vectors.float(), dim=1) * math.sqrt(vectors.shape[1])

    return replace(features, image=at_length(features.image), text=at_length(features.text))


def initial_heads(image_width: int, text_width: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """[W, D] and [V, D] from the seed alone, as CLIP begins its projections: of deviation 1/√W and 1/√V."""
    generator = torch.Generator().manual_seed((2 << 60) + seed)  # not the draws of orders and captions
    return (
        torch.randn(image_width, width, generator=generator) / math.sqrt(image_width),
        torch.randn(text_width, width, generator=generator) / math.sqrt(text_width),
    )


def project(vectors: Tensor, head: Tensor) -> Tensor:
    """Shape: vectors [N, W], head [W, D]; returns [N, D] of length 1."""
    return F.normalize(vectors @ head, dim=1)


def train_tower_heads(
    train: TowerFeatures,
    epochs: Sequence[Sequence[PairRows]],
    loss: MarginLoss,
    *,
    negatives: Negatives,
    rate: float,
    seed: int,
    settings: HeadSettings,
) -> Iterator[TowerHeads]:
    """Train heads and temperature on these batches; what they are after every epoch.

    AdamW, warm-up, cosine, clipping and decay are those of training, and so is the clamp of the temperature. Whoever
    stops reading stops the training; what was read until then is the same.

    Args:
        epochs: from `deal_epochs`.
        seed: of the heads before training.
    """
    image, text = train.image.float(), train.text.float()
    first = initial_heads(image.shape[1], text.shape[1], settings.width, seed)
    image_head, text_head = (nn.Parameter(head.to(image.device)) for head in first)
    log_scale = nn.Parameter(torch.tensor(math.log(SCALE), device=image.device))
    optimizer = torch.optim.AdamW(
        [
            {"params": [image_head, text_head], "peak_lr": rate, "weight_decay": _OPTIM.weight_decay},
            {"params": [log_scale], "peak_lr": rate, "weight_decay": 0.0},
        ],
        lr=rate,
        betas=(_OPTIM.beta1, _OPTIM.beta2),
        fused=image.device.type in ("cpu", "cuda") or None,
    )
    trained = [image_head, text_head, log_scale]
    size, total = settings.size(negatives), sum(map(len, epochs))
    warmup = round(_OPTIM.warmup * total)
    step, similarity = 0, torch.zeros((), device=image.device)
    for batches in epochs:
        for rows in batches:
            set_learning_rate(optimizer, learning_rate_factor(step, total=total, warmup=warmup, floor=_OPTIM.lr_floor))
            optimizer.zero_grad(set_to_none=True)
            images = project(image[rows.pictures], image_head)  # [B, D]
            texts = project(text[rows.captions], text_head)  # [B, D]
            loss.value(images, texts, scale=log_scale.exp(), size=size).backward()
            nn.utils.clip_grad_norm_(trained, _OPTIM.clip_grad)
            optimizer.step()
            clamp_scale(log_scale, SCALE_MAX)
            # Micro-batches are random parts of a batch: the mean over all its negatives is that over theirs.
            similarity += negative_statistics(texts, texts, None)[0]
            step += 1
        yield TowerHeads(
            image_head.detach().clone(),
            text_head.detach().clone(),
            float(log_scale.detach().exp()),
            float(similarity / step),
        )
