"""The encoder loop that evaluation, analysis, search and studies share: images and token ids into vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hnclip.core import ImageSource, Problem
from hnclip.data.batching import pad_texts
from hnclip.data.decoding import decode_all
from hnclip.data.image_cache import CachedPixels, load_images
from hnclip.data.images import ImageTransform
from hnclip.data.texts import Tokens
from hnclip.util.console import Iterate

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder


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
    cache: Path | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> EncodedImages:
    """Global vectors of images as they are stored. Threads decode the next images while the model encodes.

    Args:
        workers: decoding threads; the number of CPUs, at most 16, if not given.
        cache: directory of all image caches, where the decoded images are stored; None decodes and forgets them.
        advance: called with the number of images that are done.
    """
    problems: dict[int, Problem] = {}
    pending: list[tuple[int, Tensor]] = []
    order: list[int] = []
    parts = [torch.empty(0, model.width, device=model.device)]

    def encode_pending() -> None:
        if pending:
            pixels = torch.stack([pixels for _, pixels in pending]).to(model.device)  # [B, 3, S, S]
            parts.append(model.encode_images(pixels).vectors.float())
            order.extend(index for index, _ in pending)
            advance(len(pending))
            pending.clear()

    with model.inference():
        for index, found in _decode(sources, model.image_transform, workers, cache):
            if isinstance(found, Problem):
                problems[index] = found
                advance(1)
                continue
            pending.append((index, found))
            if len(pending) == batch:
                encode_pending()
        encode_pending()
    rows = sorted(range(len(order)), key=order.__getitem__)  # images of the same file are decoded together
    vectors = torch.cat(parts)[torch.tensor(rows, dtype=torch.long, device=model.device)]
    return EncodedImages(vectors, tuple(order[row] for row in rows), dict(sorted(problems.items())))


def _decode(
    sources: Sequence[ImageSource], transform: ImageTransform, workers: int | None, cache: Path | None
) -> Iterator[tuple[int, Tensor | Problem]]:
    """Index and pixels [3, S, S] of every image, or what is wrong with it."""
    if cache is None:
        names = {str(index).encode(): source for index, source in enumerate(sources)}
        for name, result in decode_all(names, transform, workers):
            yield int(name), result if isinstance(result, Problem) else torch.from_numpy(result.pixels)
        return
    loaded = load_images(sources, transform, cache=cache, workers=workers)
    yield from loaded.problems.items()
    for row, index in enumerate(loaded.kept):
        yield index, loaded.pixels[[row]][0]


def encode_pixels(
    model: DualEncoder, pixels: CachedPixels | Tensor, *, batch: int = 128, progress: Iterate = iter
) -> Tensor:
    """Global vectors [I, D] of preprocessed images, in fp32 on the model's device."""
    with model.inference():
        parts = [
            model.encode_images(pixels[start : start + batch].to(model.device)).vectors.float()
            for start in progress(range(0, len(pixels), batch))
        ]
    return torch.cat([torch.empty(0, model.width, device=model.device), *parts])


def encode_captions(
    model: DualEncoder, captions: Sequence[Tokens], *, batch: int = 128, progress: Iterate = iter
) -> Tensor:
    """Global vectors [T, D] of captions given as token ids, in fp32 on the model's device.

    They are encoded in order of length, so that short ones are not padded to long ones.
    """
    order = sorted(range(len(captions)), key=lambda row: len(captions[row]))
    parts = [torch.empty(0, model.width, device=model.device)]
    with model.inference():
        for start in progress(range(0, len(order), batch)):
            rows = [captions[row] for row in order[start : start + batch]]
            padded = pad_texts(rows, model.text_transform.pad).to(model.device)
            parts.append(model.encode_texts(padded).vectors.float())
    encoded = torch.cat(parts)  # [T, D], shortest first
    text = torch.empty_like(encoded)
    text[torch.tensor(order, dtype=torch.long, device=text.device)] = encoded
    return text
