"""Which words of a query match which parts of an image: late interaction, word by word; and re-ranking by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hnclip.core import InvalidImage
from hnclip.data.image_sources import decode_image
from hnclip.models.dual_encoder import DualEncoder
from hnclip.search.near_duplicates import Hit, Separation
from hnclip.search.query_encoder import QueryText, read_query
from hnclip.search.reader import IndexedImage, IndexReader
from hnclip.util.text import STOP_WORDS, comparison_key

BATCH = 16  # images at once: large ones have hundreds of patches
MOST = 100  # hits that are re-ranked
WEIGHT = 0.05
"""Of the token score in re-ranking, added to the cosine (hnclip docs performance says what it is worth)."""
SEPARATORS = 8
LEAST_SPREAD = 0.001  # of scores that separate images; equal images in two files differ by rounding


@dataclass(frozen=True)
class WordMatch:
    """A word at text[start:stop], and its cosine with every patch, row by row."""

    text: str
    start: int
    stop: int
    patches: tuple[float, ...]

    @property
    def score(self) -> float:
        """The cosine with the best patch."""
        return max(self.patches)

    @property
    def content(self) -> bool:
        """False for function words."""
        return comparison_key(self.text) not in STOP_WORDS

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "patches": list(self.patches), "score": self.score, "content": self.content}


@dataclass(frozen=True)
class Explanation:
    """How the words of a query match an image.

    Args:
        text: the query as the model reads it.
        words: those that it reads, in order; a word of several tokens has the mean of their cosines.
        rows, columns: of patches.
        box: the part of the upright image that the patches cover: left, top, right, bottom as shares of its size.
        approximate: the thumbnail was used, since the image cannot be read any more.
    """

    file: IndexedImage
    text: str
    words: tuple[WordMatch, ...]
    rows: int
    columns: int
    box: tuple[float, float, float, float]
    approximate: bool

    def to_dict(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "file"}
        return {"id": self.file.id, **own, "words": [word.to_dict() for word in self.words], "box": list(self.box)}


def explain(model: DualEncoder, reader: IndexReader, text: str, files: Sequence[IndexedImage]) -> list[Explanation]:
    """How the words of a text match each of some images. ValueError for a text without words, or a model whose patches
    form no square.

    Relations:
        Where each word is one token, the mean of the scores is the text → image score of `token_loss` over these words.
    """
    query = read_query(model.text_transform, text)
    words = word_vectors(model, query)  # [W, D]
    explained = []
    for some, patches, approximate in patch_batches(model, reader, files):
        side = patch_side(model, patches.shape[1])
        scores = (words @ patches.transpose(1, 2)).cpu()  # [n, W, P]
        for file, rows, by_thumbnail in zip(some, scores.tolist(), approximate):
            matches = [WordMatch(word.text, word.start, word.stop, tuple(row)) for word, row in zip(query.words, rows)]
            box = visible_box(model, file.width, file.height)
            explained.append(Explanation(file, query.text, tuple(matches), side, side, box, by_thumbnail))
    return explained


def separate(model: DualEncoder, reader: IndexReader, text: str, files: Sequence[IndexedImage]) -> Separation:
    """The words of a text that some images show most unequally, the most unequal first. Function words, and words that
    all images show equally, are left out; a word that occurs more than once counts where it separates best."""
    different = {file.image: file for file in files}  # equal images in several files are encoded once
    if len(different) < 2:
        return Separation()
    explained = {one.file.image: one for one in explain(model, reader, text, list(different.values()))}
    found = [
        (matches[0].text, tuple(word.score for word in matches))
        for matches in zip(*(explained[file.image].words for file in files))
        if matches[0].content
    ]
    best: dict[str, tuple[str, tuple[float, ...]]] = {}
    for word, scores in sorted(found, key=lambda pair: min(pair[1]) - max(pair[1])):
        if max(scores) - min(scores) >= LEAST_SPREAD:
            best.setdefault(comparison_key(word), (word, scores))
    approximate = any(one.approximate for one in explained.values())
    return Separation(tuple(file.id for file in files), tuple(best.values())[:SEPARATORS], approximate)


def rerank(
    model: DualEncoder, reader: IndexReader, text: str, hits: Sequence[Hit], *, weight: float = WEIGHT
) -> list[Hit]:
    """The best `MOST` hits in the order of cosine + weight · token score, equal ones by row; then the others."""
    words = token_vectors(model, read_query(model.text_transform, text).given)  # [T, D]
    files = {hit.row: hit.file for hit in hits[:MOST]}  # equal images in several files are encoded once
    scored: dict[int, dict[str, Any]] = {}
    for some, patches, approximate in patch_batches(model, reader, list(files.values())):
        for file, score, by_thumbnail in zip(some, token_scores(words, patches).tolist(), approximate):
            scored[file.image] = {"token_score": score, "approximate": by_thumbnail}
    best = [replace(hit, **scored[hit.file.image]) for hit in hits[:MOST]]
    best.sort(key=lambda hit: (-(hit.score + weight * (hit.token_score or 0)), hit.row))
    return [*best, *hits[MOST:]]


def token_scores(words: Tensor, patches: Tensor) -> Tensor:
    """The mean over a text's tokens of the best patch's cosine: the text → image score of FILIP (losses/tokens.py).

    Shape:
        words: [T, D]; patches: [n, P, D]; returns [n]
    """
    return (words @ patches.transpose(1, 2)).amax(dim=2).mean(dim=1)


def token_vectors(model: DualEncoder, text: str) -> Tensor:
    """[T, D], of length 1: the tokens that were read, without special ones, on the model's device."""
    with model.inference():
        encoded = model.encode_texts(model.tokenize([text]), tokens=True)
    assert encoded.tokens is not None
    assert encoded.mask is not None
    return encoded.tokens[0][encoded.mask[0]].float()


def word_vectors(model: DualEncoder, query: QueryText) -> Tensor:
    """[W, D]: the mean of each word's token vectors; its product with a patch is the mean of their cosines."""
    tokens = token_vectors(model, query.given)  # [T, D]
    words = [tokens[list(word.tokens)].mean(dim=0) for word in query.words]
    return torch.stack(words) if words else tokens[:0]


def patch_batches(
    model: DualEncoder, reader: IndexReader, files: Sequence[IndexedImage]
) -> Iterator[tuple[Sequence[IndexedImage], Tensor, tuple[bool, ...]]]:
    """Files, their patch vectors [n, P, D], and whether each is that of the thumbnail, a few at a time, in order."""
    for start in range(0, len(files), BATCH):
        some = files[start : start + BATCH]
        images, approximate = zip(*(_load(reader, file) for file in some))
        with model.inference():
            encoded = model.encode_images(model.preprocess_images(images), tokens=True)
        assert encoded.tokens is not None
        yield some, encoded.tokens.float(), approximate


def _load(reader: IndexReader, file: IndexedImage) -> tuple[Image.Image, bool]:
    """The image of a file, or its thumbnail and True if it is gone, has changed, or is not a file of its own."""
    try:
        return decode_image(reader.content(file), file.name), False
    except InvalidImage:
        return decode_image(reader.thumbnail(file.image), f"the thumbnail of {file.name}"), True


def patch_side(model: DualEncoder, patches: int) -> int:
    """Patches along each side of the square that a model sees."""
    side = model.family.grid(model.backbone, model.image_size) or isqrt(patches)
    if side**2 != patches:
        name = model.source or "this model"
        raise ValueError(f"{name} has {patches} vectors for an image, which form no square: their places are not known")
    return side


def visible_box(model: DualEncoder, width: int, height: int) -> tuple[float, float, float, float]:
    """The part of an upright image of this size that patches cover: the centre crop of `ImageTransform`, without a
    margin at the right and the bottom where the patches do not fill the square."""
    transform = model.image_transform
    columns, rows = transform.resized(width, height)
    left, top = (columns - transform.size) // 2, (rows - transform.size) // 2
    side = model.family.grid(model.backbone, transform.size)
    covered = transform.size if side is None else side * model.backbone.config.vision_config.patch_size
    return left / columns, top / rows, (left + covered) / columns, (top + covered) / rows
