"""The encoder loop that evaluation, analysis, search and studies share: images and token ids into vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from hnclip.core import ImageSource, Problem, TextBatch, ViewEmbeddings
from hnclip.data.batching import pad_texts
from hnclip.data.decoding import decode_all
from hnclip.data.image_cache import CachedPixels
from hnclip.data.texts import Tokens
from hnclip.util.console import Iterate

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

Key = TypeVar("Key")
Inputs = TypeVar("Inputs", Tensor, TextBatch)
Rows = Sequence[int]


def encode_batches(
    model: DualEncoder, encode: Callable[[Inputs], ViewEmbeddings], batches: Iterable[tuple[Key, Inputs]]
) -> Iterator[tuple[Key, ViewEmbeddings]]:
    """Every batch encoded, with its key.

    A batch is yielded after the next one was started, so an accelerator works while its vectors are fetched.

    Args:
        encode: `model.encode_images`, `model.encode_texts`, or a function that calls one of them.
        batches: keys of any kind, and pixels [B, 3, S, S] or token ids in the host's memory.
    """
    before = None
    for key, inputs in batches:
        with model.inference():
            encoded = encode(inputs.to(model.device))
        if before is not None:
            yield before
        before = key, encoded
    if before is not None:
        yield before


def caption_batches(
    model: DualEncoder, captions: Sequence[Tokens], *, batch: int, progress: Iterate = iter
) -> Iterator[tuple[Rows, TextBatch]]:
    """Batches of captions with their rows, in order of length: short ones are not padded to long ones."""
    order = sorted(range(len(captions)), key=lambda row: len(captions[row]))
    for start in progress(range(0, len(order), batch)):
        rows = order[start : start + batch]
        yield rows, pad_texts([captions[row] for row in rows], model.text_transform.pad)


@dataclass(frozen=True)
class EncodedImages:
    """The K of N images that could be decoded.

    Shape:
        vectors: [K, D] in fp32, on the model's device
        kept: their indices among the N, in order
        problems: by index, what is wrong with the others
    """

    vectors: Tensor
    kept: tuple[int, ...]
    problems: Mapping[int, Problem]


def encode_images(
    model: DualEncoder,
    sources: Sequence[ImageSource],
    *,
    batch: int = 128,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> EncodedImages:
    """Global vectors of images as they are stored. Threads decode the next images while the model encodes.

    Args:
        workers: decoding threads; the number of CPUs, at most 16, if not given.
        advance: called with the number of images that are done.
    """
    problems: dict[int, Problem] = {}
    names = {str(index).encode(): source for index, source in enumerate(sources)}

    def batches() -> Iterator[tuple[Rows, Tensor]]:
        rows: list[int] = []
        pixels: list[Tensor] = []
        for name, found in decode_all(names, model.image_transform, workers):  # images of the same file come together
            advance(1)
            if isinstance(found, Problem):
                problems[int(name)] = found
                continue
            rows.append(int(name))
            pixels.append(torch.from_numpy(found.pixels))
            if len(rows) == batch:
                yield rows, torch.stack(pixels)
                rows, pixels = [], []
        if rows:
            yield rows, torch.stack(pixels)

    kept, vectors = _in_order(model, encode_batches(model, model.encode_images, batches()))
    return EncodedImages(vectors, kept, dict(sorted(problems.items())))


def encode_pixels(
    model: DualEncoder, pixels: CachedPixels | Tensor, *, batch: int = 128, progress: Iterate = iter
) -> Tensor:
    """Global vectors [I, D] of preprocessed images, in fp32 on the model's device."""
    count = len(pixels)
    batches = (
        (range(start, min(start + batch, count)), pixels[start : start + batch])
        for start in progress(range(0, count, batch))
    )
    return _in_order(model, encode_batches(model, model.encode_images, batches))[1]


def encode_captions(
    model: DualEncoder, captions: Sequence[Tokens], *, batch: int = 128, progress: Iterate = iter
) -> Tensor:
    """Global vectors [T, D] of captions given as token ids, in fp32 on the model's device."""
    batches = caption_batches(model, captions, batch=batch, progress=progress)
    return _in_order(model, encode_batches(model, model.encode_texts, batches))[1]


def _in_order(model: DualEncoder, encoded: Iterable[tuple[Rows, ViewEmbeddings]]) -> tuple[tuple[int, ...], Tensor]:
    """The rows of all batches in order, and their vectors [K, D]."""
    rows: list[int] = []
    parts = [torch.empty(0, model.width, device=model.device)]
    for some, found in encoded:
        rows += some
        parts.append(found.vectors.float())
    order = sorted(range(len(rows)), key=rows.__getitem__)
    vectors = torch.cat(parts)[torch.tensor(order, dtype=torch.long, device=model.device)]
    return tuple(rows[place] for place in order), vectors
