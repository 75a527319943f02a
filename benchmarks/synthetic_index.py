"""Made-up indexes, images and models of any size: what benchmarks of search share.

Vectors lie around a common direction, as those of CLIP do, in clusters of families of near-duplicates.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hnclip.encode.fingerprint import model_fingerprint
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import save, wrap
from hnclip.search.database import About
from hnclip.search.query_encoder import update_text_encoder
from hnclip.search.writer import Change, NewFile, NewImage, open_writer

FAMILY = 8  # near-duplicates
CLUSTER = 500  # rows, on average
BLOCK = 16_384  # rows at a time, whole families
# Shares of a vector that are common to all, to its cluster, to its family, and its own: cosines of about 0.97 between
# near-duplicates, 0.7 within a cluster, 0.4 between any two.
SHARES = (0.6, 0.5, 0.5, 0.15)


def synthetic_index(
    path: Path, rows: int, width: int, *, seed: int = 0, model: DualEncoder | None = None, captions: Sequence[str] = ()
) -> None:
    """Write an index: for each row a file with an image of its own, all with the same thumbnail.

    Args:
        model: the bundled one, which has this width; without one the index answers no query by text.
        captions: that the files have in turn, one each.
    """
    about = About(
        model="bundled",
        source="made-up vectors" if model is None else model.source,
        fingerprint="none" if model is None else model_fingerprint(model, model.name),
        opening={},
        width=width,
        data="made-up vectors",
        root=None,
    )
    thumbnail = io.BytesIO()
    Image.new("RGB", (32, 24), (120, 150, 90)).save(thumbnail, "JPEG")
    texts = [vector for block in synthetic_vectors(len(captions), width, seed=seed + 1) for vector in block]
    with open_writer(path, about) as writer:
        writer.commit(Change(captions=dict(zip(captions, texts))))
        done = 0
        for block in synthetic_vectors(rows, width, seed=seed):
            images, files = [], []
            for number, vector in enumerate(block, done):
                digest = number.to_bytes(32, "big")
                said = (captions[number % len(captions)],) if captions else ()
                images.append(NewImage(digest, vector, (64, 48), thumbnail.getvalue()))
                files.append(NewFile(f"{number:09d}.jpg", digest, "{}", "", said))
            writer.commit(Change(images=images, files=files))
            done += len(block)
        update_text_encoder(writer, model)
        writer.publish()


def synthetic_vectors(rows: int, width: int, *, seed: int = 0) -> Iterator[np.ndarray]:
    """Blocks [n, D] float32 of vectors of length 1, the same for the same arguments."""
    mean, centres = _common(rows, width, seed)
    to_all, to_cluster, to_family, own = SHARES
    for start in range(0, rows, BLOCK):
        generator = np.random.default_rng([seed, 1, start])
        families = _directions(generator, BLOCK // FAMILY, width)  # [F, D]
        clusters = generator.integers(len(centres), size=len(families))  # [F]
        shared = to_all * mean + to_cluster * centres[clusters] + to_family * families  # [F, D]
        vectors = np.repeat(shared, FAMILY, 0) + own * _directions(generator, BLOCK, width)  # [BLOCK, D]
        yield _unit(vectors[: rows - start])


def image_queries(vectors: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Queries near given vectors [Q, D], as of other images of the same."""
    noise = _directions(np.random.default_rng([seed, 2]), *vectors.shape)
    return _unit(vectors + 0.3 * noise)


def text_queries(vectors: np.ndarray, rows: int, *, seed: int = 0) -> np.ndarray:
    """Queries as of descriptions of given vectors [Q, D]: far from all of them, around a direction of their own, and a
    little nearer to what they describe."""
    mean, _ = _common(rows, vectors.shape[1], seed)
    generator = np.random.default_rng([seed, 3])
    other = _directions(generator, 1, vectors.shape[1])[0]  # [D]
    noise = _directions(generator, *vectors.shape)  # [Q, D]
    described = _unit(vectors - (vectors @ mean)[:, None] * mean)  # [Q, D]
    return _unit(0.7 * other + 0.5 * described + 0.4 * noise)


def write_photos(folder: Path, count: int) -> list[Path]:
    """Smooth noise, as JPEG files of 640 × 480 pixels."""
    random = np.random.default_rng(0)
    folder.mkdir()
    files = [folder / f"{number:06}.jpg" for number in range(count)]
    for file in files:
        coarse = Image.fromarray(random.integers(0, 256, (60, 80, 3), dtype=np.uint8))
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(file, quality=90)
    return files


def write_model(
    directory: Path, tokenizer: Any, *, text: dict[str, int], vision: dict[str, int], width: int = 512
) -> str:
    """Write a CLIP of random weights; returns its path.

    Args:
        text: `layers`, `width` and `context` of the text tower.
        vision: `layers`, `width` and `patch` of the image tower.
    """
    from transformers import CLIPConfig, CLIPModel

    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    vocabulary = {**special, "vocab_size": len(tokenizer), "max_position_embeddings": text["context"]}
    config = CLIPConfig(
        projection_dim=width,
        text_config={**_tower(text), **vocabulary},
        vision_config={**_tower(vision), "image_size": 224, "patch_size": vision["patch"]},
    )
    torch.manual_seed(0)
    save(wrap(CLIPModel(config), tokenizer), directory)
    return str(directory)


def _tower(of: dict[str, int]) -> dict[str, int]:
    return {
        "hidden_size": of["width"],
        "intermediate_size": 4 * of["width"],
        "num_hidden_layers": of["layers"],
        "num_attention_heads": max(1, of["width"] // 64),
    }


def _common(rows: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The direction of all vectors [D], and those of the clusters [C, D]."""
    generator = np.random.default_rng([seed, 0])
    return _directions(generator, 1, width)[0], _directions(generator, max(1, rows // CLUSTER), width)


def _directions(generator: np.random.Generator, count: int, width: int) -> np.ndarray:
    """[n, D] of about length 1."""
    return generator.standard_normal((count, width), np.float32) / np.float32(width**0.5)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
