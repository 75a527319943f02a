"""Similarity of captions of different images: all pairs, hardest negatives, suspected duplicates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hnclip.losses.hard_negative import product
from hnclip.util.console import Iterate

BINS = 20_000  # of [-1, 1]
LARGEST = 50_000  # captions whose pairs are all compared; larger sets are sampled to this size
TILE = 1024
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, eq=False)
class Histogram:
    """How many cosines lie in each of `BINS` equal bins of [-1, 1], and their exact mean.

    Shape:
        counts: [BINS] int64
    """

    counts: np.ndarray
    mean: float

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def edges(self) -> np.ndarray:
        return np.linspace(-1, 1, len(self.counts) + 1)

    def quantile(self, share: float) -> float:
        """The value below which this share lies, to the width of a bin."""
        cumulated = np.cumsum(self.counts)
        place = share * self.total
        number = int(np.searchsorted(cumulated, max(place, 0.5)))  # the lowest value, too, is in a bin with values
        inside = (place - (cumulated[number] - self.counts[number])) / self.counts[number]
        return float(-1 + (number + inside) * 2 / len(self.counts))

    def share_above(self, value: float) -> float:
        """The share of at least `value`: exact at the edge of a bin, otherwise to the width of one."""
        first = int(np.searchsorted(self.edges, value - 1e-9))  # 0.8 and its edge may differ in their last digit
        return float(self.counts[first:].sum() / self.total)

    def to_dict(self) -> dict[str, Any]:
        quantiles = {f"{share:g}": self.quantile(share) for share in QUANTILES}
        bars = self.counts.reshape(200, -1).sum(1).tolist()
        return {"count": self.total, "mean": self.mean, "quantiles": quantiles, "counts": bars}


def count_values(similarity: Tensor) -> Tensor:
    """[BINS] int64: values in each bin of a `Histogram`, -inf left out. A bin holds its lower edge.

    Places are computed in fp64: in fp32 a value just below an edge is rounded onto it.
    """
    place = similarity.flatten().double().add_(1).mul_(BINS / 2).clamp_(0, BINS - 1)  # [n]
    counts = place.int().bincount(minlength=BINS)
    counts[0] -= (similarity == -torch.inf).sum()
    return counts


class Suspect(NamedTuple):
    """Two captions of different records, by row, that are nearly the same to the encoder."""

    first: int
    second: int
    similarity: float


@dataclass(frozen=True)
class CaptionGeometry:
    """Cosines of S captions, of `total` that there are, with those of other images.

    Args:
        pairwise, hardest: of all pairs, and of each caption with its hardest negative.
        suspected: pairs from the threshold on, without duplicates; `suspects` are the most similar of them.

    Shape:
        rows, similarity, nearest [S]: row of each caption, and cosine and row of its hardest negative; on the CPU
    """

    total: int
    images: int
    pairwise: Histogram
    hardest: Histogram
    rows: Tensor
    similarity: Tensor
    nearest: Tensor
    suspected: int
    suspects: tuple[Suspect, ...]

    def to_dict(self) -> dict[str, Any]:
        counts = {"captions": len(self.rows), "total": self.total, "images": self.images}
        return {**counts, "pairwise": self.pairwise.to_dict(), "hardest": self.hardest.to_dict()}


def caption_geometry(
    text: Tensor,
    owner: Tensor,
    *,
    ids: Tensor | None = None,
    threshold: float = math.inf,
    keep: int = 1000,
    largest: int = LARGEST,
    tile: int = TILE,
    progress: Iterate = iter,
) -> CaptionGeometry:
    """Every two captions of different images, compared once.

    Args:
        ids: captions that agree in any column are duplicates, and not suspected of being one.
        threshold: cosine from which other pairs are suspected; the `keep` most similar ones are returned.
        largest: of more captions, a random part of this size is compared.

    Shape:
        text [T, D], unit vectors; owner [T], the image of each; ids [T, K]. Memory is O(tile²).

    Reference:
        HN-CLIP, section 2.1, figure "Dense-caption benchmarks are dominated by hard negatives".
    """
    total, rows = len(text), torch.arange(len(text))
    if total > largest:
        rows = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:largest].sort().values
    text, own = _check_captions(text[rows], owner[rows])
    names = torch.arange(len(text))[:, None] if ids is None else ids[rows]  # [S, K]
    counts = torch.zeros(BINS, dtype=torch.int64, device=text.device)
    hardest = _Hardest(text)
    suspected, values, pairs = 0, text.new_empty(0), rows.new_empty(2, 0)
    for left, right, similarity in _tiles(text, own, tile, progress):
        counts += count_values(similarity)
        hardest.add(left, right, similarity)
        places = (similarity >= threshold).nonzero().T  # [2, n]
        found = torch.stack([places[0] + left.start, places[1] + right.start]).cpu()  # [2, n]
        new = (names[found[0]] != names[found[1]]).all(1)  # [n]
        suspected += int(new.sum())
        values = torch.cat([values, similarity[places[0], places[1]][new.to(text.device)]])
        values, order = values.sort(descending=True, stable=True)
        values, pairs = values[:keep], torch.cat([pairs, found[:, new]], dim=1)[:, order.cpu()[:keep]]
    similarity = hardest.similarity.cpu()
    return CaptionGeometry(
        total=total,
        images=int(own.max()) + 1,
        pairwise=Histogram(counts.cpu().numpy(), _mean(text, own)),
        hardest=Histogram(count_values(similarity).numpy(), similarity.double().mean().item()),
        rows=rows,
        similarity=similarity,
        nearest=rows[hardest.nearest.cpu()],
        suspected=suspected,
        suspects=tuple(map(Suspect, *rows[pairs].tolist(), values.tolist())),
    )


def caption_similarity(text: Tensor, owner: Tensor) -> dict[str, float]:
    """Mean cosine of all pairs of captions of different images ("pairwise"), and of each caption with its hardest
    negative ("hardest"). Arguments as of `caption_geometry`.

    Reference:
        HN-CLIP, section 2.1 and table s1.
    """
    found = caption_geometry(text, owner, largest=len(text))
    return {"pairwise": found.pairwise.mean, "hardest": found.hardest.mean}


def mean_similarity(text: Tensor, owner: Tensor) -> float:
    """`caption_similarity`'s "pairwise" alone, for any number of captions: γ times it is the fixed margin of the same
    mean as L_HN's."""
    return _mean(*_check_captions(text, owner))


def _mean(text: Tensor, own: Tensor) -> float:
    """Mean cosine of all pairs, without their products: their sum is |Σt|² less that within each image.

    In fp64 on the CPU, because not every accelerator has it.
    """
    sizes, total = own.bincount().cpu(), 0.0
    for part in text.split(64, dim=1):  # sums of all dimensions in fp64 could be larger than the vectors
        sums = torch.zeros(len(sizes), part.shape[1], dtype=torch.float64).index_add_(0, own.cpu(), part.cpu().double())
        total += (sums.sum(0).square().sum() - sums.square().sum()).item()
    return total / (len(text) ** 2 - int(sizes.square().sum()))


def _check_captions(text: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors in fp32, and the image of each as a number from 0 on."""
    images, own = owner.to(text.device).unique(return_inverse=True)
    if len(images) < 2:
        raise ValueError(
            f"captions are compared with those of other images, so at least 2 images are needed; here are {len(text)} "
            f"captions of {len(images)}"
        )
    text = text.detach().float()
    if invalid := int((~torch.linalg.vector_norm(text, ord=torch.inf, dim=1).isfinite()).sum()):
        raise ValueError(
            f"the model returned NaN or infinity for {invalid} of {len(text)} captions: check its weights and precision"
        )
    return text, own


def _tiles(text: Tensor, own: Tensor, tile: int, progress: Iterate) -> Iterator[tuple[slice, slice, Tensor]]:
    """Similarities of all pairs, each once, in tiles: rows, columns, [r, c]; -inf where two are no pair."""
    parts = [slice(start, min(start + tile, len(text))) for start in range(0, len(text), tile)]
    places = [(left, right) for number, left in enumerate(parts) for right in parts[number:]]
    for place in progress(range(len(places))):
        left, right = places[place]
        similarity = product(text[left], text[right]).masked_fill_(own[left, None] == own[right], -torch.inf)
        if left == right:
            similarity.masked_fill_(torch.ones_like(similarity, dtype=torch.bool).tril_(), -torch.inf)
        yield left, right, similarity


class _Hardest:
    """The hardest negative of each caption in the tiles that were added.

    Shape:
        similarity [T], nearest [T]
    """

    def __init__(self, text: Tensor) -> None:
        self.similarity = text.new_full((len(text),), -torch.inf)
        self.nearest = torch.zeros(len(text), dtype=torch.int64, device=text.device)

    def add(self, left: slice, right: slice, similarity: Tensor) -> None:
        for queries, first, values in ((left, right.start, similarity), (right, left.start, similarity.T)):
            highest = values.amax(1)  # [q]
            # The place of a maximum costs many times the maximum, and after the first tiles few are raised.
            raised = (highest > self.similarity[queries]).nonzero().squeeze(1)  # [n]
            self.similarity[queries][raised] = highest[raised]
            self.nearest[queries][raised] = first + values[raised].argmax(1)
