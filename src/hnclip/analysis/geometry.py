"""How alike the captions of a data set are to an encoder: the paper's diagnosis as two distributions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hnclip.analysis.caption_pairs import CaptionPairs, Hardest, caption_pairs
from hnclip.analysis.histogram import BINS, Histogram, count_values, sampling_error
from hnclip.util.console import Iterate

SEARCH_UP_TO = 20_000_000_000
"""Most similarities that are computed to find hardest companions; all pairs of 200,000 captions are as many."""


@dataclass(frozen=True)
class CaptionGeometry:
    """Similarities of captions of different pictures: of any two, and of each with its hardest companion.

    Attributes:
        pairwise, hardest: the two distributions; their `error` is 0 unless they are of a sample.
        rows: the captions whose companion was looked for: all in order, or independent draws.
        similarity, nearest: the similarity of the hardest companion of each of `rows`, and its row.

    Shape:
        rows, similarity, nearest [S], on the CPU; S is `captions` unless they are a sample.
    """

    captions: int
    pictures: int
    pairwise: Histogram
    hardest: Histogram
    rows: Tensor
    similarity: Tensor
    nearest: Tensor

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without a list of captions."""
        return {
            "captions": self.captions,
            "pictures": self.pictures,
            "pairwise": self.pairwise.to_dict(),
            "hardest": self.hardest.to_dict(),
        }


def caption_geometry(
    text: Tensor,
    owner: Tensor,
    *,
    exact_up_to: int = 20_000,
    samples: int = 4_000_000,
    search_up_to: int = SEARCH_UP_TO,
    seed: int = 0,
    chunk: int = 1024,
    progress: Iterate = iter,
) -> CaptionGeometry:
    """Both distributions in bins of 1e-4, from a few tiles of similarities at a time.

    All pairs are counted up to `exact_up_to` captions. Above that, `samples` pairs are drawn independently, each pair
    as likely as any other; the mean stays that of all. The hardest companions are exact for every caption as long as
    there are no more pairs than `search_up_to`. Above that, they are exact for captions drawn independently, each
    compared with all, as many as make `search_up_to` similarities. The `error` of a sampled distribution is the bound
    of Dvoretzky, Kiefer and Wolfowitz, sqrt(ln(2 / 0.05) / 2n): every share, of whatever range below or above a value,
    is that close to the true one, all at once with 95 % confidence.

    Args:
        text: caption embeddings, L2-normalised by the caller.
        owner: the picture each caption belongs to; captions of one picture are not each other's companions.
        seed: of the draws.
        chunk: side of a tile.
        progress: walks through the tiles and draws.

    Shape:
        text [T, D]; owner [T] integers. Memory is O(chunk²) beside the vectors.

    Relations:
        `caption_similarity` is the two means.

    Reference:
        HN-CLIP, section 2.1, figure "Dense-caption benchmarks are dominated by hard negatives"; appendix A.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    pairs = caption_pairs(text, owner)
    generator = torch.Generator().manual_seed(seed)
    exact = len(pairs) <= exact_up_to
    counts = torch.zeros(BINS, dtype=torch.int64, device=pairs.text.device)  # [K]
    rows = torch.arange(len(pairs), device=pairs.text.device)  # [T]
    searched_error = 0.0
    if exact or pairs.count <= search_up_to:
        found = Hardest(pairs.text, len(pairs))
        for tile in pairs.tiles(chunk, progress):
            found.add(tile)
            if exact:
                counts += count_values(tile.similarity)
        similarity, nearest = found.similarity, found.nearest  # [T]
    else:
        draws = max(1, search_up_to // len(pairs))
        rows = torch.randint(len(pairs), (draws,), generator=generator).to(rows)  # [S]
        similarity, nearest = pairs.search(rows, chunk, progress)  # [S]
        searched_error = sampling_error(draws)
    if not exact:
        block = max(1, chunk**2 // pairs.text.shape[1])  # as many numbers as a tile has
        for left, right in _random_pairs(pairs, samples, block, generator, progress):
            counts += count_values((pairs.text[left] * pairs.text[right]).sum(1))
    return CaptionGeometry(
        captions=len(pairs),
        pictures=len(pairs.sizes),
        pairwise=Histogram(counts.cpu().numpy(), pairs.mean(), error=0.0 if exact else sampling_error(samples)),
        hardest=Histogram(
            count_values(similarity).cpu().numpy(), similarity.mean(dtype=torch.float64).item(), error=searched_error
        ),
        rows=rows.cpu(),
        similarity=similarity.cpu(),
        nearest=nearest.cpu(),
    )


def _random_pairs(
    pairs: CaptionPairs, samples: int, block: int, generator: torch.Generator, progress: Iterate
) -> Iterator[tuple[Tensor, Tensor]]:
    """Independent pairs of captions of different pictures, each as likely as any other: [n] rows and [n] rows.

    One number below the count of ordered pairs names a caption and one of its companions, so none is drawn in vain,
    even where nearly all captions belong to one picture.
    """
    order = pairs.own.argsort()  # [T], the captions of a picture side by side
    first = pairs.sizes.cumsum(0) - pairs.sizes  # [P], where those of each picture begin
    companions = len(pairs) - pairs.sizes[pairs.own]  # [T]
    ends = companions.cumsum(0)  # [T]
    starts = range(0, samples, block)
    for start in progress(starts):
        number = torch.randint(2 * pairs.count, (min(block, samples - start),), generator=generator)  # [n]
        number = number.to(ends.device)
        left = torch.searchsorted(ends, number, right=True)  # [n]
        place = number - (ends[left] - companions[left])  # [n], among the companions of `left`
        own = pairs.own[left]  # [n]
        place = place + pairs.sizes[own] * (place >= first[own])  # step over the captions of its own picture
        yield left, order[place]
