"""Pictures ready for a model: decoded and resized once, kept as bytes on disk (data/store.py) or in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from threading import Lock
from typing import TypeAlias

import PIL
import torch
from torch import Tensor

from hnclip.core import ImageSource, InvalidImage, Problem
from hnclip.data import image_sources
from hnclip.data import images as image_code
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.store import LAYOUT, Entry, MappedPixels, Store, open_store
from hnclip.data.threads import decoding_threads, in_order, processors

# Both have a length and a shape [N, 3, S, S], and give uint8 tensors for a slice or a list of indices.
Pixels: TypeAlias = Tensor | MappedPixels

CHUNK = 128  # pictures that enter the store together, and that threads may run ahead: 20 MB for a side of 224

Progress = Callable[[range], Iterator[int]]


@dataclass(frozen=True)
class LoadedPictures:
    """Those of N images that could be loaded, and what is wrong with the others.

    Shape:
        pixels: [K, 3, S, S] uint8
        kept: K indices into the images, in order
        problems: by index, of the N - K others
    """

    pixels: Pixels
    kept: tuple[int, ...]
    problems: Mapping[int, Problem]


def cache_directory(given: str | None) -> Path:
    """Where decoded pictures are kept: the directory given, else $HNCLIP_CACHE, else ~/.cache/hnclip."""
    return Path(given or os.environ.get("HNCLIP_CACHE") or "~/.cache/hnclip").expanduser()


def load_pictures(
    images: Sequence[ImageSource],
    transform: ImageTransform,
    *,
    cache: Path | None,
    workers: int | None = None,
    progress: Progress = iter,
) -> LoadedPictures:
    """Every image through `preprocess_image`; with a cache, only if that was never done before.

    An image is known in the cache by its key and stamp, so an unchanged file is neither read nor decoded. One with a
    new stamp is read, and decoded if its content is new. Images that cannot be used are tried again every time.

    Args:
        cache: directory of the cache; with None all pictures are decoded, and held in memory.
        workers: threads that decode; as many as processors, but at most 16, when left out.
        progress: walks through the range of images that have to be read.

    Raises:
        OSError: the cache's disk is full, or would be, or its directory cannot be used.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    count = workers or processors()
    if cache is None:
        return _load_into_memory(images, transform, count, progress)
    with open_store(cache / "images" / _fingerprint(transform), transform.size) as store:
        return _load_through(store, images, transform, count, progress)


def _fingerprint(transform: ImageTransform) -> str:
    """What a picture's bytes depend on beside the picture: the transform's geometry, and the code that applies it."""
    parts = [str(LAYOUT), PIL.__version__, str(torch.__version__)]
    parts += [repr((transform.size, transform.shortest, transform.squash, transform.resample))]
    parts += [Path(file).read_text(encoding="utf-8") for file in (image_code.__file__, image_sources.__file__)]
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _load_into_memory(
    images: Sequence[ImageSource], transform: ImageTransform, workers: int, progress: Progress
) -> LoadedPictures:
    pixels = torch.empty((len(images), 3, transform.size, transform.size), dtype=torch.uint8, device="cpu")
    kept: list[int] = []
    problems: dict[int, Problem] = {}

    def load(image: ImageSource) -> Tensor | Problem:
        try:
            return _resized(image, image.read(), transform)
        except InvalidImage as error:
            return _problem(image, error)

    with decoding_threads(workers) as pool:
        for index, made in zip(progress(range(len(images))), in_order(pool, load, images, CHUNK)):
            if isinstance(made, Problem):
                problems[index] = made
            else:
                pixels.numpy()[len(kept)] = made.numpy()  # torch's threads would wait for processors that are busy
                kept.append(index)
    return LoadedPictures(pixels[: len(kept)], tuple(kept), problems)


def _load_through(
    store: Store,
    images: Sequence[ImageSource],
    transform: ImageTransform,
    workers: int,
    progress: Progress,
) -> LoadedPictures:
    problems: dict[int, Problem] = {}
    names: dict[int, bytes] = {}
    for index, image in enumerate(images):
        try:
            names[index] = _name(image)
        except InvalidImage as error:
            problems[index] = _problem(image, error)
    wanted = {name: images[index] for index, name in names.items()}
    found: dict[bytes, int | Problem] = dict(store.rows(list(wanted)))
    if len(wanted) - len(found) > CHUNK:  # a few may be bad ones, which take no room
        store.require_room(len(wanted) - len(found))
    # A second turn only for copies of pictures that another thread was busy with.
    while missing := {name: image for name, image in wanted.items() if name not in found}:
        found |= _fill(store, missing, transform, workers, progress)
        progress = iter
    rows: dict[int, int] = {}
    for index, name in names.items():
        result = found[name]
        if isinstance(result, Problem):
            problems[index] = result
        else:
            rows[index] = result
    return LoadedPictures(store.mapped(list(rows.values())), tuple(rows), dict(sorted(problems.items())))


def _fill(
    store: Store,
    wanted: Mapping[bytes, ImageSource],
    transform: ImageTransform,
    workers: int,
    progress: Progress,
) -> dict[bytes, int | Problem]:
    """Bring images into the store by chunks. Returns, by name, their rows, or what is wrong with them.

    A process begins at a chunk of its own choice and goes on in order, as most sources are best read; where it meets
    the work of another process it goes on elsewhere, so that several of them share the work. Images of the same bytes
    are decoded once: those that meet a thread busy with the same bytes may be missing from the answer.
    """
    names = list(wanted)
    chunks = [names[start : start + CHUNK] for start in range(0, len(names), CHUNK)]
    found: dict[bytes, int | Problem] = {}
    taken = store.contents()  # in the store, or some thread is busy with it
    lock = Lock()
    met = False  # another process's work, since the last chunk was begun

    def prepare(name: bytes) -> tuple[bytes, Entry | Problem | None]:
        if name in found:
            return name, None
        image = wanted[name]
        try:
            content = image.read()
            mark = _hash(content)
            with lock:
                if mark in taken:
                    return name, Entry(name, mark, None)
                taken.add(mark)
            try:
                return name, Entry(name, mark, _resized(image, content, transform))
            except InvalidImage:
                with lock:
                    taken.remove(mark)
                raise
        except InvalidImage as error:
            return name, _problem(image, error)

    def begun() -> Iterator[bytes]:
        """All names; but before a chunk is begun, `found` learns what another process brought in meanwhile."""
        nonlocal met
        random = Random()  # not by the seed of the run
        left = dict.fromkeys(range(len(chunks)))
        number = random.randrange(len(chunks))
        while left:
            if met:
                number = random.choice(list(left))
            elif number not in left:
                number = next(iter(left))
            known = store.rows(chunks[number])
            found.update(known)
            met = bool(known)
            yield from chunks[number]
            del left[number]
            number += 1

    def commit() -> None:
        nonlocal met
        met = met or bool(store.rows([entry.name for entry in ready]))
        found.update(store.add(ready))
        ready.clear()

    ready: list[Entry] = []
    with decoding_threads(workers) as pool:
        for _, (name, made) in zip(progress(range(len(names))), in_order(pool, prepare, begun(), CHUNK)):
            if isinstance(made, Problem):
                found[name] = made
            elif made is not None:
                ready.append(made)
            if len(ready) == CHUNK:
                commit()
    commit()
    return found


def _resized(image: ImageSource, content: bytes, transform: ImageTransform) -> Tensor:
    """[3, S, S], or InvalidImage."""
    picture = image.decode(content)
    try:
        return preprocess_image(picture, transform)
    except ValueError as error:
        raise InvalidImage("unusual image", f"{image.key}: {error}") from error


def _problem(image: ImageSource, error: InvalidImage) -> Problem:
    return Problem(error.kind, image.key, str(error))


def _name(image: ImageSource) -> bytes:
    """The image as it is now. Taken before it is read: if it changes in between, it is read again next time."""
    return _hash(f"{image.key}\0{image.stamp()}".encode("utf-8", "surrogatepass"))


def _hash(content: bytes) -> bytes:
    return blake2b(content, digest_size=32).digest()
