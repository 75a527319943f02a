"""Decoding images in threads: Pillow leaves the interpreter free while it works."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image

from hnclip.core import ImageSource, InvalidImage, Problem, upright_shape
from hnclip.data.image_sources import render, root
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.util.console import Iterate

AHEAD = 64  # files that threads may decode ahead of the consumer
WORKERS = 16  # beyond it, threads mostly wait for the interpreter

Name = TypeVar("Name")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Decoded(NamedTuple):
    """A preprocessed image: the hash of its bytes, its pixels [3, S, S], and the size of the upright image."""

    content: bytes
    pixels: np.ndarray
    size: tuple[int, int]


def decode_all(
    wanted: Mapping[Name, ImageSource],
    transform: ImageTransform,
    workers: int | None = None,
    *,
    known: Container[bytes] = (),
    progress: Iterate = iter,
) -> Generator[tuple[Name, Decoded | Problem], None, None]:
    """Decode images, given by name, in threads, one decode for all that are derived from the same file. Of contents
    with a `known` hash there are no pixels."""
    files: dict[str, list[tuple[Name, ImageSource]]] = {}
    for name, source in wanted.items():
        files.setdefault(root(source).key, []).append((name, source))

    def decode(group: list[tuple[Name, ImageSource]]) -> list[tuple[Name, Decoded | Problem]]:
        base, content, done = root(group[0][1]), None, dict[str, Image.Image]()
        results: list[tuple[Name, Decoded | Problem]] = []
        for name, source in group:
            try:
                content = base.read() if content is None else content
                digest = hash_bytes(content + source.key.removeprefix(base.key).encode())
                result = Decoded(digest, np.empty(0, np.uint8), (0, 0))
                if digest not in known:
                    image = render(source, content, done)
                    result = Decoded(digest, preprocess_image(image, transform).numpy(), upright_shape(image))
                results.append((name, result))
            except InvalidImage as error:
                results.append((name, Problem(error.kind, source.key, str(error))))
        return results

    with decoding_threads(workers or cpu_count()) as pool:
        for _, results in zip(progress(range(len(files))), in_order(pool, decode, files.values(), AHEAD)):
            yield from results


@contextmanager
def decoding_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that decode images; work that has not begun when the block ends is cancelled."""
    Image.init()  # Pillow loads its decoders lazily, which is not safe in threads
    pool = ThreadPoolExecutor(count)
    with warnings.catch_warnings():
        # Threads that each change the filters for a moment would undo each other's changes.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def in_order(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """`map(work, items)` in threads, at most `ahead` items before the consumer."""
    waiting: deque[Future[Result]] = deque()
    for item in items:
        if len(waiting) == ahead:
            yield waiting.popleft().result()
        waiting.append(pool.submit(work, item))
    while waiting:
        yield waiting.popleft().result()


def cpu_count() -> int:
    """CPUs that this process may use, at most as many as decoding makes use of."""
    return min(WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def source_hash(source: ImageSource) -> bytes:
    """A hash of an image's key and stamp, found without reading the image. InvalidImage if there is none."""
    return hash_bytes(f"{source.key}\0{source.stamp()}".encode("utf-8", "surrogatepass"))


def hash_bytes(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()
