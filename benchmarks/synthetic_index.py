"""Indexes of made-up vectors, of any size: what benchmarks of search share.

Vectors lie around a common direction, as those of CLIP do, in clusters of families of near-twins.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hnclip.config import Opening
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.models.load import load
from hnclip.search.index.catalogue import State, write_state
from hnclip.search.index.generations import begin_generation
from hnclip.search.index.layout import THUMBNAILS, About, Storage, generation_directory, write_header
from hnclip.search.index.vectors import append, row_files, write_at
from hnclip.util.files import transaction

FAMILY = 8  # near-twins
CLUSTER = 500  # rows, on average
BLOCK = 65_536  # rows at a time, whole families
# How much of a vector is common to all, to its cluster, to its family, and its own: cosines of about 0.97 between
# near-twins, 0.7 within a cluster, 0.4 between any two.
PARTS = (0.6, 0.5, 0.5, 0.15)


def synthetic_index(
    path: Path, rows: int, width: int, *, seed: int = 0, storage: Storage = "bf16", model: str = "bundled"
) -> None:
    """Write a whole index: an item for every row, all of them with the same small thumbnail, no captions.

    Args:
        model: that the index says it was made with; only one of this width can search it by words.
    """
    opened = load(model)
    about = About(
        model=model,
        source=opened.source,
        fingerprint=model_fingerprint(opened),
        opening=vars(Opening()),
        width=width,
        storage=storage,
        patches=0,
        data="made-up vectors",
        root=None,
    )
    path.mkdir(parents=True)
    database = begin_generation(path, 1, about)
    directory = generation_directory(path, 1)
    files = row_files(directory, "images", width, storage)
    done, slack = 0, 0.0
    for block in synthetic_vectors(rows, width, seed=seed):
        slack = max(slack, append(files, done, block))
        done += len(block)
    thumbnail = _thumbnail()
    write_at(directory / THUMBNAILS, 0, thumbnail)
    with transaction(database):
        database.executemany(
            "INSERT INTO pictures VALUES (?, ?, 64, 48, 0, ?)",
            ((row, row.to_bytes(32, "big"), len(thumbnail)) for row in range(rows)),  # in order, that is quicker
        )
        database.executemany(
            "INSERT INTO items (name, row, place, stamp, born) VALUES (?, ?, '{}', '', 1)",
            ((f"{row:09d}.jpg", row) for row in range(rows)),
        )
        write_state(database, State(version=1, images=rows, images_slack=slack))
    database.close()
    write_header(path, 1)


def synthetic_vectors(rows: int, width: int, *, seed: int = 0) -> Iterator[np.ndarray]:
    """Blocks [n, D] float32 of vectors of length 1, always the same for a seed; a row does not depend on how many there
    are but for the number of clusters."""
    mean, centres = _common(rows, width, seed)
    whole, cluster, family, own = PARTS
    for start in range(0, rows, BLOCK):
        generator = np.random.default_rng([seed, 1, start])
        families = _directions(generator, BLOCK // FAMILY, width)
        of_family = generator.integers(len(centres), size=len(families))
        shared = whole * mean + cluster * centres[of_family] + family * families  # [F, D]
        count = min(BLOCK, rows - start)
        vectors = own * _directions(generator, BLOCK, width)[:count]
        vectors += np.repeat(shared, FAMILY, 0)[:count]
        yield _unit(vectors)


def picture_queries(vectors: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Queries near given vectors [Q, D], as of other pictures of the same."""
    noise = _directions(np.random.default_rng([seed, 2]), *vectors.shape)
    return _unit(vectors + 0.3 * noise)


def text_queries(vectors: np.ndarray, rows: int, *, seed: int = 0) -> np.ndarray:
    """Queries as of descriptions of given vectors [Q, D]: far from all of them, around a direction of their own, and a
    little nearer to what they describe."""
    mean, _ = _common(rows, vectors.shape[1], seed)
    generator = np.random.default_rng([seed, 3])
    other = _directions(generator, 1, vectors.shape[1])[0]
    noise = _directions(generator, *vectors.shape)
    described = _unit(vectors - (vectors @ mean)[:, None] * mean)
    return _unit(0.7 * other + 0.5 * described + 0.4 * noise)


def _common(rows: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The direction of all vectors [D], and those of the clusters [C, D]."""
    generator = np.random.default_rng([seed, 0])
    return _directions(generator, 1, width)[0], _directions(generator, max(1, rows // CLUSTER), width)


def _directions(generator: np.random.Generator, count: int, width: int) -> np.ndarray:
    """[n, D] of about length 1."""
    return generator.standard_normal((count, width), np.float32) / np.float32(width**0.5)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _thumbnail() -> bytes:
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (32, 24), (120, 150, 90)).save(content, "JPEG")
    return content.getvalue()
