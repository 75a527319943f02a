"""Another order for the best results: by words and patches beside the vectors of whole texts and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from hnclip.search.description import read_description, token_vectors
from hnclip.search.patches import patch_batches

if TYPE_CHECKING:
    from hnclip.search.find import Finder, Hit

MOST = 100
WEIGHT = 0.05
"""Of the token score beside the cosine. `hnclip bench reranking` says which weight is best on a model's validation
splits, smaller and larger ones than this among them, and what the best is worth on the test splits."""


def rerank(finder: Finder, text: str, hits: Sequence[Hit], *, most: int = MOST) -> list[Hit]:
    """The first `most` hits in the order of cosine + `WEIGHT` · token score, of equal ones the first row first; the
    others behind them as they are.

    Raises:
        ValueError: the text has no word.
    """
    read_description(finder.model, text)
    words = token_vectors(finder.model, text)  # [T, D]
    chosen, rest = hits[:most], hits[most:]
    items = {hit.item.row: hit.item for hit in chosen}  # files of the same content are looked at once
    looked: dict[int, tuple[float, bool]] = {}  # the score, and whether it is approximate
    for patches in patch_batches(finder, list(items.values())):
        found = token_score(words, patches.vectors)
        looked.update(zip((item.row for item in patches.items), zip(found.tolist(), patches.approximate)))
    scored = [
        replace(hit, tokens=tokens, approximate=approximate)
        for hit, (tokens, approximate) in ((hit, looked[hit.item.row]) for hit in chosen)
    ]
    scored.sort(key=lambda hit: (-(hit.score + WEIGHT * looked[hit.item.row][0]), hit.item.row))
    return [*scored, *rest]


def token_score(words: Tensor, patches: Tensor) -> Tensor:
    """The mean over a text's tokens of the best patch's cosine: the text → image score of FILIP (losses/token.py).

    Shape:
        words [T, D]; patches [n, P, D]; returns [n]
    """
    return (words @ patches.transpose(1, 2)).amax(dim=2).mean(dim=1)
