"""Ranks of the right answer, in both directions, without ever holding the full score matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
        text: global caption vectors of the same width.
        text_to_image: index of the image each caption describes; every image needs at least one caption.
        chunk: side of the square score tiles, 1024 unless told.

    Shape:
        image [I, D], text [T, D], text_to_image [T] integers; the ranks are [T] and [I].
        Memory is O(chunk² + (I + T)·D); I × T is never built. Time is one product, plus the tiles that hold a
        right pair once more (the diagonal when captions come in the order of their images, all at worst).

    Relations:
        Scores are fp32 (fp64 for fp64 input) whatever the input and outside any autocast; scores within
        `TIE_TOLERANCE` are tied. With one caption per image and no ties this is the position in a descending
        sort. With identical vectors everywhere every caption has rank I.

    Raises:
        ValueError: wrong shape, type, device or index, an empty side, an image without caption, or a vector
            that is not finite or has no length. The message names the argument.
    """
    _check_vectors("image", image)
    _check_vectors("text", text)
    if text.shape[1] != image.shape[1]:
        raise ValueError(f"text has width {text.shape[1]}, image has {image.shape[1]}; they must agree")
    if text.device != image.device:
        raise ValueError(f"text is on {text.device}, image on {image.device}; they must agree")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    owner = _checked_owner(text_to_image, texts=len(text), images=len(image)).to(image.device)  # [T]
    tile = TILE if chunk is None else chunk
    dtype = torch.promote_types(torch.promote_types(image.dtype, text.dtype), torch.float32)

    # Autocast would turn the products into bf16, where nearly identical captions tie by the hundred.
    with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        image = unit_vectors("image", image.to(dtype))  # [I, D]
        text = unit_vectors("text", text.to(dtype))  # [T, D]
        right = right_scores(image, text, owner, tile)  # [T]
        best = torch.full_like(image[:, 0], -torch.inf).scatter_reduce(0, owner, right, "amax")  # [I]
        text_bar = right - TIE_TOLERANCE[dtype]  # [T] the score from which a wrong image counts
        image_bar = best - TIE_TOLERANCE[dtype]  # [I] the score from which a wrong caption counts

        text_ranks = torch.ones_like(owner)  # [T]
        image_ranks = owner.new_ones(len(image))  # [I]
        for texts, images, scores in wrong_scores(image, text, owner, tile):
            # A sum of booleans is an int64 one unless told, and then takes half as long as the product itself.
            text_ranks[texts] += (scores >= text_bar[texts, None]).sum(1, dtype=torch.int32)  # [t]
            image_ranks[images] += (scores >= image_bar[None, images]).sum(0, dtype=torch.int32)  # [i]
    return Ranks(text_ranks.cpu(), image_ranks.cpu(), owner.cpu())


def wrong_scores(image: Tensor, text: Tensor, owner: Tensor, tile: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """The [T, I] scores by tiles [t, i], each with its captions and images; own pairs are -inf, never candidates."""
    for texts, images in _tiles(len(text), len(image), tile):
        scores = text[texts] @ image[images].T  # [t, i]
        rows, columns = _own_cells(owner[texts], images)
        scores[rows, columns] = -torch.inf
        yield texts, images, scores


def right_scores(image: Tensor, text: Tensor, owner: Tensor, tile: int) -> Tensor:
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


def _check_vectors(name: str, vectors: Tensor) -> None:
    if vectors.ndim != 2:
        raise ValueError(f"{name} must be [N, D], got shape {tuple(vectors.shape)}")
    if not vectors.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {vectors.dtype}")
    if vectors.numel() == 0:
        raise ValueError(f"{name} is empty, got shape {tuple(vectors.shape)}")


def _checked_owner(text_to_image: Tensor, *, texts: int, images: int) -> Tensor:
    if text_to_image.shape != (texts,):
        raise ValueError(f"text_to_image must be [{texts}], one per text, got {tuple(text_to_image.shape)}")
    if text_to_image.is_floating_point() or text_to_image.is_complex() or text_to_image.dtype == torch.bool:
        raise ValueError(f"text_to_image must hold integers, got {text_to_image.dtype}")
    owner = text_to_image.detach().to("cpu", torch.int64)  # [T]
    low, high = int(owner.min()), int(owner.max())
    if low < 0 or high >= images:
        raise ValueError(f"text_to_image must lie in [0, {images}), got values from {low} to {high}")
    missing = (owner.bincount(minlength=images) == 0).nonzero().squeeze(1)  # [m]
    if len(missing):
        raise ValueError(f"text_to_image gives no caption to {len(missing)} images, first {int(missing[0])}")
    return owner


def unit_vectors(name: str, vectors: Tensor) -> Tensor:
    """Divide every row by its length; a row without a finite, non-zero length has no cosine."""
    lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)  # [N, 1], NaN or inf if any entry is
    if not bool((lengths.isfinite() & (lengths > 0)).all()):
        raise ValueError(f"{name} has a row that is not finite or has no length")
    return vectors / lengths
