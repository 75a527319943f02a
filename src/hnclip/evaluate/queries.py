"""Every query with its rank and the top of its result list, for looking at errors and comparing models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hnclip.evaluate.ranks import TIE_TOLERANCE, TILE, right_scores, unit_vectors, wrong_scores
from hnclip.evaluate.table import ARROWS
from hnclip.util.files import replace_file

if TYPE_CHECKING:
    from hnclip.evaluate.retrieval import Evaluation, Gallery

_DECIMALS = 6  # about what fp32 knows of a cosine


@dataclass(frozen=True)
class Candidate:
    """An entry of a result list: a picture, or a caption by its record and its number there. It is right if its record
    is the query's."""

    record: str
    caption: int | None
    score: float


@dataclass(frozen=True)
class Query:
    """A caption that looks for its picture ("text_to_image") or a picture that looks for a caption ("image_to_text").

    Attributes:
        record: the record that the query is of; `caption` is the caption's number there, None for a picture.
        group: the record's family of near-duplicates, if it has one.
        rank, score: of the right answer, as in `Ranks`; from image to text the best of the own captions.
        top: the first candidates, best first.
    """

    direction: str
    record: str
    caption: int | None
    group: str | None
    rank: int
    score: float
    top: tuple[Candidate, ...]


def write_queries(path: Path, gallery: Gallery, evaluation: Evaluation, k: int = 10) -> None:
    """Write `query_results` as JSON, one query per line. The file appears whole or not at all."""
    found = query_results(gallery, evaluation, k)
    with replace_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for query in found:
            file.write(json.dumps(asdict(query)) + "\n")


def read_queries(path: Path) -> list[Query]:
    """What `write_queries` wrote. Further fields are left aside."""
    queries = []
    with path.open(encoding="utf-8") as file:
        try:
            for line in file:
                queries.append(_query(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}, line {len(queries) + 1} is not a query as hnclip writes them: {error!r}"
            ) from error
    if not queries:
        raise ValueError(f"{path} holds no queries")
    return queries


def query_results(gallery: Gallery, evaluation: Evaluation, k: int = 10, *, chunk: int = TILE) -> Iterator[Query]:
    """Every caption as a query, then every picture, each with its k best candidates.

    The list is that of the rank: the first right answer stands at place `rank`, so wrong candidates that tie with it
    stand before it, and a query has rank 1 if and only if its list begins with a right answer. Other captions of the
    same picture come behind the best one, by the same rule. Wrong candidates are in the order of their scores, and of
    the gallery where these are equal; where the list ends within a tie, which of the tied ones are in it is open.

    Shape:
        Memory is O(chunk² + (I + T)·(D + k)); I × T is never built.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    owner = gallery.owner  # [T]
    if not torch.equal(owner, evaluation.ranks.owner):
        raise ValueError("gallery and evaluation do not belong together: their captions have different pictures")
    with torch.no_grad(), torch.autocast(evaluation.image.device.type, enabled=False):
        image = unit_vectors("image", evaluation.image.float())  # [I, D]
        text = unit_vectors("text", evaluation.text.float())  # [T, D]
        right = right_scores(image, text, owner, chunk).tolist()  # T scores
        images, texts = _Top(len(text), k), _Top(len(image), k)  # candidates of captions, and of pictures
        for rows, columns, scores in wrong_scores(image, text, owner, chunk):
            images.see(rows, columns.start, scores)
            texts.see(columns, rows.start, scores.T)
    return _queries(gallery, evaluation, right, images.lists(), texts.lists(), k)


class _Scored(NamedTuple):
    """A candidate by its row in the gallery: a picture or a caption."""

    score: float
    row: int


def _best_first(found: _Scored) -> tuple[float, int]:
    return -found.score, found.row


class _Top:
    """The k best wrong candidates of every query seen so far. Shape: scores, candidates [n, k]."""

    def __init__(self, queries: int, k: int) -> None:
        self._scores = torch.full((queries, k), -torch.inf)
        self._candidates = torch.zeros(queries, k, dtype=torch.int64)

    def see(self, queries: slice, first: int, scores: Tensor) -> None:
        """Take in a tile [q, c] whose candidates are numbered from `first`."""
        k = self._scores.shape[1]
        best, found = scores.topk(min(k, scores.shape[1]), dim=1)  # [q, ≤ k]
        merged, place = torch.cat([self._scores[queries], best], 1).topk(k, dim=1)  # [q, k]
        self._scores[queries] = merged
        self._candidates[queries] = torch.cat([self._candidates[queries], first + found], 1).gather(1, place)

    def lists(self) -> Iterator[list[_Scored]]:
        """For each query its candidates, best first."""
        for scores, rows in zip(self._scores.tolist(), self._candidates.tolist()):
            found = [_Scored(*pair) for pair in zip(scores, rows) if pair[0] > -torch.inf]  # own ones, empty places
            yield sorted(found, key=_best_first)


def _queries(
    gallery: Gallery,
    evaluation: Evaluation,
    right: Sequence[float],
    wrong_images: Iterator[list[_Scored]],
    wrong_texts: Iterator[list[_Scored]],
    k: int,
) -> Iterator[Query]:
    """The captions, then the pictures; `right` is each caption's score with its own picture."""
    records, owner = gallery.records, gallery.owner.tolist()
    own: list[list[int]] = [[] for _ in records]  # the captions of each picture
    numbers = []  # each caption's number in its record
    for row, record in enumerate(owner):
        numbers.append(len(own[record]))
        own[record].append(row)

    def picture(found: _Scored) -> Candidate:
        return Candidate(records[found.row].id, None, round(found.score, _DECIMALS))

    def caption(found: _Scored) -> Candidate:
        return Candidate(records[owner[found.row]].id, numbers[found.row], round(found.score, _DECIMALS))

    for row, (rank, wrong) in enumerate(zip(evaluation.ranks.text_to_image.tolist(), wrong_images)):
        of, score = records[owner[row]], round(right[row], _DECIMALS)
        top = tuple(map(picture, _listed(wrong, [_Scored(right[row], owner[row])], rank)[:k]))
        yield Query("text_to_image", of.id, numbers[row], of.group, rank, score, top)
    for row, (rank, wrong) in enumerate(zip(evaluation.ranks.image_to_text.tolist(), wrong_texts)):
        answers = sorted((_Scored(right[text], text) for text in own[row]), key=_best_first)
        of, score = records[row], round(answers[0].score, _DECIMALS)
        top = tuple(map(caption, _listed(wrong, answers, rank)[:k]))
        yield Query("image_to_text", of.id, None, of.group, rank, score, top)


def _listed(wrong: list[_Scored], answers: list[_Scored], rank: int) -> list[_Scored]:
    """Wrong candidates and right answers, both best first, as one list with the first answer at place `rank`."""
    tolerance = TIE_TOLERANCE[torch.float32]
    before = [rank - 1]  # how many wrong ones stand before each answer
    before += [max(rank - 1, sum(other.score >= answer.score - tolerance for other in wrong)) for answer in answers[1:]]
    placed = [((place, 0), answer) for place, answer in zip(before, answers)]
    placed += [((place, 1), candidate) for place, candidate in enumerate(wrong)]
    return [entry for _, entry in sorted(placed, key=lambda item: item[0])]


def _query(values: Any) -> Query:
    direction, caption, group, rank = values["direction"], values["caption"], values["group"], values["rank"]
    if direction not in ARROWS:
        raise ValueError(f"direction {direction!r}")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"rank {rank!r}")
    if not isinstance(values["record"], str) or not isinstance(group, str | None):
        raise ValueError(f"record {values['record']!r}, group {group!r}")
    if (type(caption) is int) != (direction == "text_to_image"):
        raise ValueError(f"caption {caption!r} of a query {direction}")
    top = tuple(Candidate(found["record"], found["caption"], float(found["score"])) for found in values["top"])
    return Query(direction, values["record"], caption, group, rank, float(values["score"]), top)
