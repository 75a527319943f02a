"""Small heads on frozen features: a linear map per side that starts as the identity, trained as a run trains a model.

What is left of fine-tuning when the towers stand still: the same losses, batches, captions of an epoch, optimiser and
schedule, and weights that are a matrix per side. A step costs a few products, so many runs fit into a minute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.config import OptimConfig
from hnclip.data.sampler import choose_captions, cut_batches, epoch_order
from hnclip.losses import hard_negative_loss
from hnclip.train.optimizer import learning_rate_factor, set_learning_rate
from hnclip.train.step import chunk_slices

_OPTIM = OptimConfig()  # momenta, decay, warm-up, floor, clipping and largest scale of every run

_Same = TypeVar("_Same", bound="TowerFeatures")


@dataclass(frozen=True)
class TowerFeatures:
    """What two towers make of N pictures and their T captions, encoded once; their widths may differ.

    Shape:
        image: [N, W], text: [T, V].
        owner: [T], the picture each caption belongs to; every picture has at least one.
        image_ids: [N], caption_ids: [T]; equal numbers are the same picture or caption, never negatives of each other.
        groups: [N], equal numbers are a family of near-duplicates; None if every picture is a family of its own.

    Relations:
        The fields are those of `PairData`, with `group_numbers(records)`.
    """

    image: Tensor
    text: Tensor
    owner: Tensor
    image_ids: Tensor
    caption_ids: Tensor
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("image", "text"):
            _check_vectors(name, getattr(self, name))
        pictures, captions = len(self.image), len(self.text)
        for name, count in {"owner": captions, "image_ids": pictures, "caption_ids": captions}.items():
            if getattr(self, name).shape != (count,):
                raise ValueError(f"{name} must be [{count}], got shape {tuple(getattr(self, name).shape)}")
        if self.groups is not None and self.groups.shape != (pictures,):
            raise ValueError(f"groups must be [{pictures}], got shape {tuple(self.groups.shape)}")
        if int(self.owner.min()) < 0 or int(self.owner.max()) >= pictures or bool((self.counts == 0).any()):
            raise ValueError(f"owner must name each of the {pictures} pictures at least once, and no other")

    def __len__(self) -> int:
        return len(self.image)

    @property
    def counts(self) -> Tensor:
        """[N]: captions of each picture."""
        return self.owner.bincount(minlength=len(self))

    @property
    def families(self) -> Tensor:
        """[N]: `groups`, or a number of its own for every picture."""
        return torch.arange(len(self)) if self.groups is None else self.groups

    def take(self: _Same, pictures: Tensor) -> _Same:
        """These pictures alone, in this order, with all their captions."""
        place = torch.full((len(self),), -1)  # [N]
        place[pictures] = torch.arange(len(pictures))
        captions = (place[self.owner] >= 0).nonzero().flatten()  # [t]
        return replace(
            self,
            image=self.image[pictures],
            text=self.text[captions],
            owner=place[self.owner[captions]],
            image_ids=self.image_ids[pictures],
            caption_ids=self.caption_ids[captions],
            groups=None if self.groups is None else self.groups[pictures],
        )


@dataclass(frozen=True)
class Features(TowerFeatures):
    """What a model makes of N pictures and their T captions, in the space that they are compared in.

    Shape:
        image: [N, D], text: [T, D]; lengths are divided out.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image.shape[1] != self.text.shape[1]:
            raise ValueError(
                f"image features are {self.image.shape[1]} wide and text features {self.text.shape[1]}: encode both "
                "into the space that they are compared in, behind the projections"
            )


def _check_vectors(name: str, vectors: Tensor) -> None:
    if vectors.ndim != 2 or vectors.numel() == 0 or not vectors.is_floating_point():
        raise ValueError(
            f"{name} features must be floating-point [N, D] with at least one row, got {vectors.dtype} of shape "
            f"{tuple(vectors.shape)}"
        )
    lengths = torch.linalg.vector_norm(vectors.float(), dim=1)  # [N], NaN or infinite if any entry is
    bad = (~(lengths.isfinite() & (lengths > 0))).nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"{len(bad)} {name} features are not finite or have no length, first row {int(bad[0])}: the encoder fails "
            "on these inputs; try it in fp32, or leave them out"
        )


@dataclass(frozen=True)
class ProbeSettings:
    """How heads are trained and chosen. Batches are the run's: `micro_batch`, `accumulate` and `negatives` as in
    `OptimConfig`."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the order of pairs and of which caption a picture shows; the same for every loss."""
    gammas: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    """Strengths of L_HN to choose from."""
    rates: tuple[float, ...] = (0.01, 0.03, 0.1)
    """Learning rates to choose from, times the width: no step moves a vector of length 1 much further than this."""
    epochs: int = 6
    micro_batch: int = 16
    accumulate: int = 8
    negatives: Literal["micro", "batch"] = "micro"
    most: int = 10_000
    """Training pairs above this number are left out, at random."""
    choosing: float = 0.1
    """Share of the training pictures, families whole, that only choose rate, epoch and γ; others for each seed."""

    def __post_init__(self) -> None:
        for name in ("seeds", "gammas", "rates"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must name at least one value, and none twice, got {values}")
        if min(self.gammas) <= 0 or not all(map(math.isfinite, self.gammas)):
            raise ValueError(f"gammas must be positive, got {self.gammas}: 0 is InfoNCE, which is always beside them")
        if min(self.rates) <= 0 or not all(map(math.isfinite, self.rates)):
            raise ValueError(f"rates must be positive, got {self.rates}")
        if self.negatives not in ("micro", "batch"):
            raise ValueError(f'negatives must be "micro" or "batch", got {self.negatives!r}')
        for name, least in {"epochs": 1, "micro_batch": 2, "accumulate": 1, "most": LEAST_TRAIN}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.choosing < 1:
            raise ValueError(f"choosing must lie between 0 and 1, got {self.choosing}")

    @property
    def batch(self) -> int:
        """Pairs of an optimiser step."""
        return self.micro_batch * self.accumulate


LEAST_TRAIN = 64  # pairs: fewer choose on a handful of pictures


class HeadLoss(NamedTuple):
    """A member of the margin family: InfoNCE without a margin, L_HN with a γ, a fixed margin for all negatives."""

    gamma: float = 0.0
    margin: float = 0.0

    @property
    def name(self) -> str:
        if self.gamma:
            return f"L_HN, γ {self.gamma:g}"
        return f"fixed margin {self.margin:.3g}" if self.margin else "InfoNCE"


class PairRows(NamedTuple):
    """A batch: rows of pictures [B], and of the caption that each shows [B]."""

    pictures: Tensor
    captions: Tensor


class Dealt(Protocol):
    """How many epochs there are, and how many pairs an optimiser step has."""

    @property
    def epochs(self) -> int: ...

    @property
    def batch(self) -> int: ...


def deal_epochs(features: TowerFeatures, seed: int, settings: Dealt) -> list[list[PairRows]]:
    """The batches of all epochs, as a run of this seed deals them: one caption of each picture in an epoch, and no two
    pairs in a batch that are the same picture or caption."""
    counts = features.counts.cpu()  # [N]
    by_picture = features.owner.cpu().argsort(stable=True)  # [T]
    first = counts.cumsum(0) - counts  # [N]
    sizes = [rows.stop - rows.start for rows in chunk_slices(len(features), settings.batch)]
    epochs = []
    for epoch in range(settings.epochs):
        chosen = by_picture[first + choose_captions(counts, seed, epoch)]  # [N]
        batches = [torch.tensor(rows) for rows in cut_batches(epoch_order(len(features), seed, epoch), sizes)]
        epochs.append([PairRows(rows, chosen[rows]) for rows in batches])
    return epochs


def turned(vectors: Tensor, head: Tensor) -> Tensor:
    """What a head makes of vectors: x + x·head, of length 1. Shape: vectors [N, D], head [D, D], returns [N, D]."""
    return F.normalize(vectors + vectors @ head, dim=1)


def batch_loss(
    image: Tensor,
    text: Tensor,
    loss: HeadLoss,
    *,
    scale: float | Tensor,
    size: int,
    center: float | Literal["mean"] = 0.0,
) -> Tensor:
    """The mean loss of micro-batches of `size` pairs, each with its own negatives; Ḡ from `text`, without gradient.

    Args:
        center: subtracted from Ḡ, as in `hard_negative_loss`; "mean" is that of the micro-batch.

    Shape:
        image, text [B, D]; returns a scalar.

    Relations:
        With `size` as large as the batch every pair is everybody's negative. Uneven micro-batches count by their pairs,
        as in `micro_backward`. InfoNCE here is `clip_loss` and L_HN the `tiled_hard_negative_loss`, both of which are
        this function while all logits fit one tile.
    """
    # Dealt batches hold no doubles, so no ids are needed to tell negatives.
    one = partial(hard_negative_loss, scale=scale, gamma=loss.gamma, margin=loss.margin, center=center)
    slices = chunk_slices(len(image), size)
    last = slices[-1]
    if last.stop - last.start == size:
        last = slice(last.stop, last.stop)
    terms = []
    if last.start:  # equal ones at once: eight calls of 16 pairs would take longer than the heads
        parts = (vectors[: last.start].unflatten(0, (-1, size)) for vectors in (image, text))  # [M, size, D] each
        terms.append(size * torch.vmap(one)(*parts).sum())
    if last.stop > last.start:
        terms.append((last.stop - last.start) * one(image[last], text[last]))
    return torch.stack(terms).sum() / len(image)


def train_heads(
    features: Features,
    epochs: Sequence[Sequence[PairRows]],
    loss: HeadLoss,
    *,
    scale: float,
    rate: float,
    settings: ProbeSettings,
) -> list[Tensor]:
    """Train the two heads on these batches; what they are after every epoch.

    AdamW, warm-up, cosine, clipping and decay are those of training; decay draws a head towards the identity. The scale
    stays as it is: fine-tuning moves its logarithm by at most rate × steps, some thousandths at the rates of towers,
    while the rates of heads would let it run, and with it what a margin weighs.

    Args:
        rate: the learning rate, times the width.

    Shape:
        returns one [2, D, D] per epoch: what the heads of images and captions add to the identity.
    """
    image, text = F.normalize(features.image.float(), dim=1), F.normalize(features.text.float(), dim=1)
    width = image.shape[1]
    size = settings.micro_batch if settings.negatives == "micro" else settings.batch
    heads = torch.zeros(2, width, width, device=image.device, requires_grad=True)
    optimizer = torch.optim.AdamW(
        [{"params": [heads], "peak_lr": rate / width}],
        lr=rate / width,
        betas=(_OPTIM.beta1, _OPTIM.beta2),
        weight_decay=_OPTIM.weight_decay,
        fused=heads.device.type in ("cpu", "cuda") or None,
    )
    total = sum(map(len, epochs))
    step, after = 0, []
    for batches in epochs:
        for rows in batches:
            set_learning_rate(
                optimizer,
                learning_rate_factor(step, total=total, warmup=round(_OPTIM.warmup * total), floor=_OPTIM.lr_floor),
            )
            optimizer.zero_grad(set_to_none=True)
            image_head, text_head = heads.unbind()  # [D, D] each
            pair = turned(image[rows.pictures], image_head), turned(text[rows.captions], text_head)  # [B, D] each
            batch_loss(*pair, loss, scale=scale, size=size).backward()
            torch.nn.utils.clip_grad_norm_([heads], _OPTIM.clip_grad)
            optimizer.step()
            step += 1
        after.append(heads.detach().clone())
    return after
