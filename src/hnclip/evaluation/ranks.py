"""Ranks of the right answer and the best wrong candidates, in both directions, by tiles of the score matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ARROWS = {"text_to_image": "T→I", "image_to_text": "I→T"}  # the directions, and what tables call them

# Small enough for a processor's caches; the tiles on the diagonal, which are multiplied twice, are then a small share.
TILE = 1024

# Two copies of one vector need not get bit-identical scores: a matrix product adds in an order that depends
# on the shape of the tile and on the place in it, which moves a cosine by some 5e-7 (fp32, 4096 dimensions)
# and 5e-15 (fp64). Scores closer than this are one score, so a copy always ties.
TIE_TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}


@dataclass(frozen=True)
class Ranks:
    """The 1-based rank of the right answer to every query, on the CPU.

    Shape:
        text_to_image: [T] int64, for each caption the rank of the image it describes.
        image_to_text: [I] int64, for each image the rank of the best of its own captions.
        owner: [T] int64, the image each caption describes; it tells which captions belong together.
    """

    text_to_image: Tensor
    image_to_text: Tensor
    owner: Tensor

    def query_groups(self, groups: Tensor | None = None) -> dict[str, Tensor]:
        """The group of every query by direction, [T] and [I], from the label [I] of every image. Captions have that of
        their image; without labels every image is its own group."""
        groups = torch.arange(len(self.image_to_text)) if groups is None else groups.cpu()
        return {"text_to_image": groups[self.owner], "image_to_text": groups}


def retrieval_ranks(image: Tensor, text: Tensor, text_to_image: Tensor, *, chunk: int | None = None) -> Ranks:
    """Rank the right image of every caption and the best own caption of every image, ties against the model.

    The rank is 1 + the number of wrong candidates that score at least as high as the right one. From image to
    text an image may have several own captions: the best of them is the right answer, the others are neither
    wrong nor counted.

    Two images, four captions, the first two of image 0. Captions 1 and 2 are the same vector:

    >>> image = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> text = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, 0.8], [0.8, 0.6]])
    >>> ranks = retrieval_ranks(image, text, torch.tensor([0, 0, 1, 1]))
    >>> ranks.text_to_image  # captions 1 and 3 are closer to the wrong image
    tensor([1, 2, 1, 2])
    >>> ranks.image_to_text  # image 1: its best caption 2 is tied by the wrong caption 1, so rank 2
    tensor([1, 2])

    Args:
        image: global image vectors; lengths are divided out, so the scores are cosines.
        text: global caption vectors of the same width, on the same device; the work is done there.
        text_to_image: index of the image each caption describes; every image needs at least one caption.
        chunk: side of the square score tiles, 1024 if not given.

    Shape:
        image [I, D], text [T, D], text_to_image [T] integers; the ranks are [T] and [I].
        Memory is O(chunk² + (I + T)·D); I × T is never built. Time is one product, plus the tiles that hold a
        right pair once more (the diagonal when captions come in the order of their images, all at worst).

    Relations:
        Scores are fp32 (fp64 for fp64 input) for any input type and outside any autocast; scores within
        `TIE_TOLERANCE` are tied. With one caption per image and no ties this is the position in a descending
        sort. With identical vectors everywhere every caption has rank I.

    Raises:
        ValueError: wrong shape, type, device or index, an empty side, an image without caption, or a vector
            that is not finite or has no length. The message names the argument.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    tile = chunk or TILE
    owner = _checked_owner(image, text, text_to_image)  # [T]
    # Autocast would turn the products into bf16, where nearly identical captions tie by the hundred.
    with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        image, text = _unit_vectors(image, text)
        right = _right_scores(image, text, owner, tile)  # [T]
        best = torch.full_like(image[:, 0], -torch.inf).scatter_reduce(0, owner, right, "amax")  # [I]
        text_bar = right - TIE_TOLERANCE[right.dtype]  # [T] the score from which a wrong image counts
        image_bar = best - TIE_TOLERANCE[right.dtype]  # [I] the score from which a wrong caption counts
        text_ranks = torch.ones_like(owner)  # [T]
        image_ranks = owner.new_ones(len(image))  # [I]
        for texts, images, scores in _wrong_scores(image, text, owner, tile):
            # A sum of booleans is an int64 one by default, and then takes half as long as the product itself.
            text_ranks[texts] += (scores >= text_bar[texts, None]).sum(1, dtype=torch.int32)  # [t]
            image_ranks[images] += (scores >= image_bar[None, images]).sum(0, dtype=torch.int32)  # [i]
    return Ranks(text_ranks.cpu(), image_ranks.cpu(), owner.cpu())


class TopCandidates(NamedTuple):
    """Scores of right pairs, and the best wrong candidates of every query, in no particular order.

    Shape:
        right: [T], each caption with its own image. images: scores and rows [T, k] of wrong images for each caption.
        texts: scores and rows [I, k] of wrong captions for each image. -inf where there are fewer than k.
    """

    right: Tensor
    images: tuple[Tensor, Tensor]
    texts: tuple[Tensor, Tensor]


def top_candidates(image: Tensor, text: Tensor, owner: Tensor, k: int, *, chunk: int = TILE) -> TopCandidates:
    """The k best wrong candidates of every caption and every image, on the CPU; arguments as of `retrieval_ranks`.

    Shape:
        Memory is O(chunk² + (I + T)·(D + k)); I × T is never built.
    """
    owner = owner.to(image.device)
    with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        image, text = _unit_vectors(image, text)
        images, texts = (
            (image.new_full((queries, k), -torch.inf), owner.new_zeros(queries, k))
            for queries in (len(text), len(image))
        )
        for rows, columns, scores in _wrong_scores(image, text, owner, chunk):
            _merge(images, rows, columns.start, scores)
            _merge(texts, columns, rows.start, scores.T)
        right = _right_scores(image, text, owner, chunk)
    return TopCandidates(right.cpu(), (images[0].cpu(), images[1].cpu()), (texts[0].cpu(), texts[1].cpu()))


def _merge(best: tuple[Tensor, Tensor], queries: slice, first: int, scores: Tensor) -> None:
    """Take in a tile [q, c] whose candidates are numbered from `first`."""
    known, rows = best[0][queries], best[1][queries]  # [q, k], views
    here, place = scores.topk(min(known.shape[1], scores.shape[1]), dim=1)  # [q, ≤ k]
    merged, chosen = torch.cat([known, here], 1).topk(known.shape[1], dim=1)  # [q, k]
    rows.copy_(torch.cat([rows, first + place], 1).gather(1, chosen))
    known.copy_(merged)


def _wrong_scores(image: Tensor, text: Tensor, owner: Tensor, tile: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """The [T, I] scores by tiles [t, i], each with its captions and images; own pairs are -inf, never candidates."""
    for texts, images in _tiles(len(text), len(image), tile):
        scores = text[texts] @ image[images].T  # [t, i]
        rows, columns = _own_cells(owner[texts], images)
        scores[rows, columns] = -torch.inf
        yield texts, images, scores


def _right_scores(image: Tensor, text: Tensor, owner: Tensor, tile: int) -> Tensor:
    """Score [T] of every caption with its own image, read from the tile products of the candidates.

    A separate row-wise dot product would be cheaper, but a device may round it differently (TF32 multiplies
    the tiles in reduced precision), and then a copy of the right image would no longer tie with it.
    """
    right = text.new_empty(len(text))  # [T]
    for texts, images in _tiles(len(text), len(image), tile):
        rows, columns = _own_cells(owner[texts], images)
        if len(rows):
            right[texts.start + rows] = (text[texts] @ image[images].T)[rows, columns]
    return right


def _tiles(texts: int, images: int, tile: int) -> Iterator[tuple[slice, slice]]:
    """Cut the [T, I] score matrix into squares of side `tile`, smaller at the far edges."""
    for row in range(0, texts, tile):
        for column in range(0, images, tile):
            yield slice(row, min(row + tile, texts)), slice(column, min(column + tile, images))


def _own_cells(owner: Tensor, images: slice) -> tuple[Tensor, Tensor]:
    """Rows and columns, inside one tile, of the captions [t] whose image is among the tile's columns."""
    rows = ((owner >= images.start) & (owner < images.stop)).nonzero().squeeze(1)  # [n]
    return rows, owner[rows] - images.start


def _unit_vectors(image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one precision, every row divided by its length; a row without a finite, non-zero length has no cosine."""
    dtype = torch.promote_types(torch.promote_types(image.dtype, text.dtype), torch.float32)
    found = []
    for name, vectors in (("image", image.to(dtype)), ("text", text.to(dtype))):
        lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)  # [N, 1], NaN or inf if any entry is
        if not bool((lengths.isfinite() & (lengths > 0)).all()):
            raise ValueError(f"{name} has a row that is not finite or has no length; check the model's weights")
        found.append(vectors / lengths)
    return found[0], found[1]


def _checked_owner(image: Tensor, text: Tensor, text_to_image: Tensor) -> Tensor:
    """`text_to_image` as int64 on the device of the vectors."""
    for name, vectors in (("image", image), ("text", text)):
        if vectors.ndim != 2 or vectors.numel() == 0 or not vectors.is_floating_point():
            raise ValueError(f"{name} must be [N, D] numbers, got {tuple(vectors.shape)} of {vectors.dtype}")
    if text.shape[1] != image.shape[1] or text.device != image.device:
        raise ValueError(
            f"text must have the width and device of image, got {text.shape[1]} on {text.device} and {image.shape[1]} "
            f"on {image.device}"
        )
    if text_to_image.shape != text.shape[:1] or text_to_image.dtype.is_floating_point:
        raise ValueError(f"text_to_image must be [{len(text)}] integers, got {tuple(text_to_image.shape)}")
    owner = text_to_image.detach().to("cpu", torch.int64)  # [T]
    if not owner.unique().equal(torch.arange(len(image))):
        raise ValueError(f"text_to_image must name each of the {len(image)} images, and no others")
    return owner.to(image.device)
