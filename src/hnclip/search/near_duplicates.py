"""Hits, groups of near-duplicates among them, and the words that differ in their captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hnclip.search.reader import IndexedCaption, IndexedImage
from hnclip.search.vectors import invalid_rows, unit_rows
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

    @property
    def text(self) -> str:
        """The file's first caption, or "" if it has none."""
        return next(iter(self.file.captions), "")


@dataclass(frozen=True)
class CaptionHit:
    """A caption that was found, and files that have it, at least one, with the cosines of their images."""

    caption: IndexedCaption
    row: int
    score: float
    images: tuple[Hit, ...]

    @property
    def file(self) -> IndexedImage:
        """The first file that has it."""
        return self.images[0].file

    @property
    def text(self) -> str:
        return self.caption.text


@dataclass(frozen=True)
class Separation:
    """The words of a query that some images show most unequally.

    Args:
        ids: of the files.
        words: each with the cosine of its best patch in each image.
        approximate: a thumbnail stood in for an image.
    """

    ids: tuple[int, ...] = ()
    words: tuple[tuple[str, tuple[float, ...]], ...] = ()
    approximate: bool = False

    def to_dict(self) -> dict[str, Any]:
        words = [{"word": word, "scores": list(scores)} for word, scores in self.words]
        return {"separated": list(self.ids), "separators": words, "approximate": self.approximate}


@dataclass(frozen=True)
class NearDuplicates:
    """Hits that are near-duplicates to the model.

    Args:
        places: of the members among the hits, from 0, best first.
        files: of the members.
        similarity: smallest cosine of a member with the first one.
        captions: by place, with those words highlighted that no other member has.
        separation: by words of the query, if the hits were explained.
    """

    places: tuple[int, ...]
    files: tuple[IndexedImage, ...]
    similarity: float
    captions: dict[int, Passage]
    separation: Separation | None = None

    def to_dict(self) -> dict[str, Any]:
        ids = {place: file.id for place, file in zip(self.places, self.files)}
        return {
            "ids": list(ids.values()),
            "similarity": self.similarity,
            "captions": [
                {"id": ids[place], "pieces": [list(piece) for piece in passage]}
                for place, passage in self.captions.items()
            ],
            **(self.separation.to_dict() if self.separation else {}),
        }


def find_near_duplicates(vectors: np.ndarray, mean: float, hits: Sequence[Hit | CaptionHit]) -> list[NearDuplicates]:
    """Groups of two or more hits that are near-duplicates, in the order of their best members.

    Hits are near-duplicates if (cos − m) / (1 − m) ≥ `CLOSE`, where m is the mean cosine of any two rows
    (`mean_cosine`): models differ in how similar all images are to them. A group is what is close to its best member,
    so members are never far from each other through others.

    Shape:
        vectors: [N, D], of the kind of the hits
    """
    rows = np.array([hit.row for hit in hits], np.int64)  # [n]
    unit = unit_rows(vectors, rows)  # [n, D]
    left, groups = np.arange(len(hits)), []
    while len(left):
        cosines = np.where(rows[left] == rows[left[0]], 1.0, unit[left] @ unit[left[0]])  # [left]
        close = cosines - mean >= CLOSE * (1 - mean)  # the first is close to itself
        members = left[close].tolist()
        if len(members) > 1:
            captions = {place: hits[place].text for place in members if hits[place].text}
            passages = highlight_different(*captions.values(), limit=LETTERS)
            files = tuple(hits[place].file for place in members)
            similarity = float(cosines[close].min())
            groups.append(NearDuplicates(tuple(members), files, similarity, dict(zip(captions, passages))))
        left = left[~close]
    return groups


def mean_cosine(vectors: np.ndarray, deleted: np.ndarray) -> float:
    """The mean cosine of two different rows, over evenly spread ones, limited so that few or very similar rows do not
    make everything a near-duplicate; 0 for fewer than two rows."""
    living = np.setdiff1d(np.arange(len(vectors)), deleted)
    rows = living[np.linspace(0, len(living) - 1, min(SAMPLE, len(living))).astype(np.int64)]
    rows = np.delete(rows, invalid_rows(vectors[rows]))  # damaged: a search that finds one of them is refused
    count = len(rows)
    if count < 2:
        return 0.0
    unit = unit_rows(vectors, rows)  # [n, D]
    total = unit.sum(axis=0)  # [D]; ‖Σx‖² is n ones and the cosines of all pairs, twice
    mean = float((total @ total - count) / (count * (count - 1)))
    return min(mean, LARGEST_MEAN if count >= FEW else LARGEST_MEAN_OF_FEW)
