"""Similarity of captions of different images, tile by tile: its mean, and the hardest negative of each caption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hnclip.losses.hard_negative import check_embeddings, product
from hnclip.util.console import Iterate


class CaptionSimilarity(NamedTuple):
    """Mean cosine of all pairs of captions, and of each caption with its hardest negative."""

    pairwise: float
    hardest: float


def caption_similarity(text: Tensor, owner: Tensor, *, chunk: int = 1024) -> CaptionSimilarity:
    """How similar captions are, in two numbers. Arguments as of `caption_pairs` and `CaptionPairs.tiles`.

    Relations:
        The means of the two distributions of `analysis.geometry.caption_geometry`.

    Reference:
        HN-CLIP, section 2.1 and table s1.
    """
    pairs = caption_pairs(text, owner)
    hardest = Hardest(pairs.text, len(pairs))
    for tile in pairs.tiles(chunk):
        hardest.add(tile)
    return CaptionSimilarity(pairwise=pairs.mean(), hardest=hardest.similarity.cpu().double().mean().item())


class Tile(NamedTuple):
    """Similarities of some captions with some others; -inf where two are no pair, or one of another tile.

    Shape:
        similarity [r, c]
    """

    rows: slice
    columns: slice
    similarity: Tensor


@dataclass(frozen=True)
class CaptionPairs:
    """T captions, of which any two of different images are a pair; see `caption_pairs`.

    Attributes:
        count: pairs, each counted once.

    Shape:
        text: [T, D]. own: [T], the image of each caption as a number from 0 to P - 1. sizes: [P], captions of each.
    """

    text: Tensor
    own: Tensor
    sizes: Tensor

    def __len__(self) -> int:
        return len(self.text)

    @property
    def count(self) -> int:
        return (len(self) ** 2 - int(self.sizes.square().sum())) // 2

    def mean(self) -> float:
        """Mean similarity of all pairs, without their products: their sum is |Σ t|², less that within each image.

        In fp64 on the CPU, because not every accelerator has it.
        """
        own, sizes = self.own.cpu(), self.sizes.cpu()
        order = own.argsort()  # [T], the captions of an image in a row
        ends = sizes.cumsum(0).tolist()
        everything = torch.zeros(self.text.shape[1], dtype=torch.float64)  # [D]
        within = everything.sum()
        for images in _blocks(len(ends), 1024):  # sums in fp64 of all images would be larger than the vectors
            rows = order[ends[images.start] - int(sizes[images.start]) : ends[images.stop - 1]]  # [n]
            sums = everything.new_zeros(images.stop - images.start, len(everything))  # [p, D]
            sums.index_add_(0, own[rows] - images.start, self.text[rows.to(self.text.device)].cpu().double())
            everything += sums.sum(0)
            within += sums.square().sum()
        return (everything.square().sum() - within).item() / (2 * self.count)

    def similarities(self, rows: slice | Tensor, columns: slice | Tensor) -> Tensor:
        """Cosines [r, c] of captions with captions, -inf where both belong to one image."""
        similarity = product(self.text[rows], self.text[columns])  # [r, c]
        return similarity.masked_fill_(self.own[rows, None] == self.own[None, columns], -torch.inf)

    def tiles(self, chunk: int = 1024, progress: Iterate = iter) -> Iterator[Tile]:
        """Every pair once, in tiles of at most `chunk` × `chunk`; similarity is symmetric, so a triangle of them does.

        A caption is in rows of some tiles and in columns of others.
        """
        blocks = _blocks(len(self), chunk)
        places = [(i, j) for i in range(len(blocks)) for j in range(i, len(blocks))]
        # Captions mostly come in the order of their images. Then few tiles hold two of one image, and masking the
        # others for nothing would cost a good part of what their products do.
        low = [int(self.own[block].min()) for block in blocks]
        high = [int(self.own[block].max()) for block in blocks]
        for place in progress(range(len(places))):
            i, j = places[place]
            rows, columns = blocks[i], blocks[j]
            if low[j] <= high[i] and low[i] <= high[j]:
                similarity = self.similarities(rows, columns)  # [r, c]
            else:
                similarity = product(self.text[rows], self.text[columns])  # [r, c]
            if i == j:
                below = torch.ones_like(similarity, dtype=torch.bool).tril_()  # [r, r]
                similarity.masked_fill_(below, -torch.inf)
            yield Tile(rows, columns, similarity)

    def search(self, queries: Tensor, chunk: int = 1024, progress: Iterate = iter) -> tuple[Tensor, Tensor]:
        """The similarity of the hardest negative of some captions among all, and its row.

        Shape:
            queries [S], rows of `text`; returns two [S].
        """
        found = Hardest(self.text, len(queries))
        places = _blocks(len(queries), chunk)
        for place in progress(range(len(places))):
            rows = places[place]
            for columns in _blocks(len(self), chunk):
                found.raise_to(rows, self.similarities(queries[rows], columns), columns.start)
        return found.similarity, found.nearest


def caption_pairs(text: Tensor, owner: Tensor) -> CaptionPairs:
    """Captions ready to be compared, in fp32 on the device they are on.

    Args:
        text: caption embeddings, L2-normalised by the caller.
        owner: the image each caption belongs to; captions of one image are not each other's negatives.

    Shape:
        text [T, D]; owner [T] integers.
    """
    check_embeddings("text", text, 2)
    if owner.shape != text.shape[:1]:
        raise ValueError(f"owner must be [{len(text)}], one per caption, got {tuple(owner.shape)}")
    images, own = owner.to(text.device).unique(return_inverse=True)  # [I], [T]
    if len(images) < 2:
        raise ValueError(
            f"captions are compared with those of other images, so at least 2 images are needed; here are "
            f"{len(text)} captions of {len(images)}"
        )
    text = text.detach().float()
    # The largest entry of a row shows NaN and infinity, without a mask as large as the vectors.
    broken = int((~torch.linalg.vector_norm(text, ord=torch.inf, dim=1).isfinite()).sum())
    if broken:
        raise ValueError(
            f"the model returned NaN or infinity for {broken} of {len(text)} captions: they have no similarity; check "
            "its weights and its precision"
        )
    return CaptionPairs(text, own, own.bincount())


class Hardest:
    """The hardest negative of each query among the similarities added so far.

    Shape:
        similarity [Q], nearest [Q], its row; -inf and -1 before there is any.
    """

    def __init__(self, like: Tensor, queries: int) -> None:
        self.similarity = like.new_full((queries,), -torch.inf)
        self.nearest = torch.full((queries,), -1, device=like.device)

    def add(self, tile: Tile) -> None:
        """Where every caption is a query: those of a tile's rows meet those of its columns."""
        self.raise_to(tile.rows, tile.similarity, tile.columns.start)
        self.raise_to(tile.columns, tile.similarity.T, tile.rows.start)

    def raise_to(self, queries: slice, similarity: Tensor, first: int) -> None:
        """`similarity` [q, c] of these queries with the captions `first`, `first` + 1, …"""
        highest = similarity.amax(1)  # [q]
        # A maximum with its place takes many times as long as one without, and after the first tiles few are raised.
        raised = (highest > self.similarity[queries]).nonzero().squeeze(1)  # [n]
        self.similarity[queries][raised] = highest[raised]
        self.nearest[queries][raised] = first + similarity[raised].argmax(1)


def _blocks(length: int, chunk: int) -> list[slice]:
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]
