"""Which words of a description matched which patches of a picture: late interaction, word by word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from hnclip.search.description import read_description, word_vectors
from hnclip.search.index.reader import Item
from hnclip.search.patches import patch_batches

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.search.find import Finder

Shares = tuple[float, float, float, float]  # left, top, right, bottom as shares of a picture's width and height


@dataclass(frozen=True)
class WordMatch:
    """A word at text[start:stop], its cosine with every patch, row by row, and that with its best patch, the score."""

    text: str
    start: int
    stop: int
    score: float
    patches: tuple[float, ...]


@dataclass(frozen=True)
class Explanation:
    """How the words of a description match a picture.

    Args:
        text: the description as the model reads it.
        words: those that it read, in order; a word of several tokens has the mean of their cosines.
        rows, columns: of patches.
        box: the part of the upright picture that the patches cover.
        approximate: the thumbnail was looked at, since the picture itself cannot be read any more.
    """

    item: Item
    text: str
    words: tuple[WordMatch, ...]
    rows: int
    columns: int
    box: Shares
    approximate: bool = False


def explain(finder: Finder, text: str, items: Sequence[Item]) -> list[Explanation]:
    """How the words of a text match each of some pictures.

    Raises:
        ValueError: the text has no word, or the patches of this model do not form a rectangle.

    Relations:
        Where each word is one token, the mean of the scores is the text → image score of `token_loss` (losses/token.py)
        over these words.
    """
    description = read_description(finder.model, text)
    words = word_vectors(finder.model, description)  # [W, D]
    explained = []
    for patches in patch_batches(finder, items):
        side = patch_side(finder.model, patches.vectors.shape[1])
        scores = (words @ patches.vectors.transpose(1, 2)).cpu()  # [n, W, P]
        for item, found, approximate in zip(patches.items, scores, patches.approximate):
            matches = tuple(
                WordMatch(word.text, word.start, word.stop, float(row.max()), tuple(row.tolist()))
                for word, row in zip(description.words, found)
            )
            box = seen_box(finder.model, item.shape, side)
            explained.append(Explanation(item, description.text, matches, side, side, box, approximate))
    return explained


def patch_side(model: DualEncoder, patches: int) -> int:
    """Patches along each side of the square that a model sees."""
    side = model.family.grid(model.backbone, model.image_size) or isqrt(patches)
    if side**2 != patches:
        raise ValueError(
            f"{model.source or 'this model'} makes {patches} vectors of a picture, which form no rectangle: it cannot "
            "be said where in the picture they lie"
        )
    return side


def seen_box(model: DualEncoder, shape: tuple[int, int], side: int) -> Shares:
    """The part of an upright picture of this width and height that `side` × `side` patches cover.

    That is the centre crop of `ImageTransform`, without a margin at the right and the bottom where the patches do not
    fill the square.
    """
    transform = model.image_transform
    columns, rows = transform.resized(*shape)
    left, top = (columns - transform.size) // 2, (rows - transform.size) // 2
    patch = getattr(model.backbone.config.vision_config, "patch_size", None)
    named = isinstance(patch, int) and model.family.grid(model.backbone, transform.size) == side
    covered = side * int(patch or 0) if named else transform.size
    return left / columns, top / rows, (left + covered) / columns, (top + covered) / rows
