"""Groups of near-duplicates among hits, and the words that differ in their captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hnclip.search.store import IndexedCaption, IndexedImage
from hnclip.search.vectors import unit_rows
from hnclip.util.text import Passage, highlight_different

CLOSE = 0.8
SAMPLE = 1024  # rows that show how similar any two are
LARGEST_MEAN = 0.9  # so that a cosine of 0.98 is always close: where all images are similar, all are near-duplicates
FEW, LARGEST_MEAN_OF_FEW = 24, 0.5  # fewer rows say little about the model
LETTERS = 2000  # of a caption that are shown


@dataclass(frozen=True)
class Hit:
    """A file that was found.

    Args:
        row: of its vector.
        score: cosine with the query.
        token_score: late interaction with the query, if the hits were re-ranked; `approximate` if it is that of the
            thumbnail.
    """

    file: IndexedImage
    row: int
    score: float
    token_score: float | None = None
    approximate: bool = False


@dataclass(frozen=True)
class CaptionHit:
    """A caption that was found, and the files that have it, with the cosines of their images."""

    caption: IndexedCaption
    row: int
    score: float
    images: tuple[Hit, ...]


@dataclass(frozen=True)
class Separator:
    """A word of a query, and the cosine of its best patch in each of several images."""

    word: str
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Separation:
    """The words of a query that images show most unequally, of the files with these ids. `approximate`: a thumbnail
    stood in for an image."""

    ids: tuple[int, ...] = ()
    separators: tuple[Separator, ...] = ()
    approximate: bool = False

    def to_dict(self) -> dict[str, Any]:
        words = [{"word": one.word, "scores": list(one.scores)} for one in self.separators]
        return {"separated": list(self.ids), "separators": words, "approximate": self.approximate}


@dataclass(frozen=True)
class Group:
    """Hits that are near-duplicates to the model.

    Args:
        places: of the members among the hits, from 0, best first.
        files: of the members; of captions the first file that has it.
        similarity: smallest cosine of a member with the first one.
        captions: by place, with those words highlighted that no other member has.
    """

    places: tuple[int, ...]
    files: tuple[IndexedImage, ...]
    similarity: float
    captions: dict[int, Passage]

    def to_dict(self) -> dict[str, Any]:
        ids = dict(zip(self.places, (file.id for file in self.files)))
        return {
            "ids": list(ids.values()),
            "similarity": self.similarity,
            "captions": [
                {"id": ids[place], "pieces": [list(piece) for piece in passage]}
                for place, passage in self.captions.items()
            ],
        }


def find_groups(vectors: np.ndarray, mean: float, hits: Sequence[Hit | CaptionHit]) -> list[Group]:
    """Groups of two or more hits that are near-duplicates, in the order of their best members.

    Hits are near-duplicates if (cos − m) / (1 − m) ≥ `CLOSE`, where m is the mean cosine of any two rows
    (`mean_cosine`): models differ in how similar all images are to them. A group is what is close to its best member,
    so members are never far from each other through others.

    Shape:
        vectors: [N, D], of the kind of the hits
    """
    rows = np.array([hit.row for hit in hits], np.int64)  # [n]
    unit = unit_rows(vectors, rows)  # [n, D]
    left, groups = list(range(len(hits))), []
    while left:
        first = left[0]
        cosines = np.where(rows[left] == rows[first], 1.0, unit[left] @ unit[first])  # [left]
        close = cosines - mean >= CLOSE * (1 - mean)  # the first is close to itself
        if close.sum() > 1:
            members = [place for place, near in zip(left, close) if near]
            groups.append(_group(hits, members, float(cosines[close].min())))
        left = [place for place, near in zip(left, close) if not near]
    return groups


def _group(hits: Sequence[Hit | CaptionHit], members: list[int], similarity: float) -> Group:
    texts = {place: text for place in members if (text := _caption(hits[place]))}
    passages = highlight_different(*texts.values(), limit=LETTERS)
    files = tuple(hit.file if isinstance(hit, Hit) else hit.caption.files[0] for hit in map(hits.__getitem__, members))
    return Group(tuple(members), files, similarity, dict(zip(texts, passages)))


def _caption(hit: Hit | CaptionHit) -> str:
    return next(iter(hit.file.captions), "") if isinstance(hit, Hit) else hit.caption.text


def mean_cosine(vectors: np.ndarray, deleted: np.ndarray) -> float:
    """The mean cosine of two different rows, over evenly spread ones, limited so that few or very similar rows do not
    make everything a near-duplicate; 0 for fewer than two rows."""
    living = np.setdiff1d(np.arange(len(vectors)), deleted)
    count = min(SAMPLE, len(living))
    if count < 2:
        return 0.0
    unit = unit_rows(vectors, living[np.linspace(0, len(living) - 1, count).astype(np.int64)])  # [n, D]
    total = unit.sum(axis=0)  # [D]; ‖Σx‖² is n ones and the cosines of all pairs, twice
    mean = float((total @ total - count) / (count * (count - 1)))
    return min(mean, LARGEST_MEAN if count >= FEW else LARGEST_MEAN_OF_FEW)
