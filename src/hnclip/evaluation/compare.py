"""Two models on the same queries, from their ranks or from files that hold every query with its result list."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic
import torch
from torch import Tensor

from hnclip.evaluation.bootstrap import Estimate, paired_difference
from hnclip.evaluation.metrics import recall_at
from hnclip.evaluation.ranks import ARROWS, TIE_TOLERANCE, Ranks, top_candidates
from hnclip.util.files import replace_file

if TYPE_CHECKING:
    from hnclip.data.batching import PairData
    from hnclip.evaluation.retrieval import EvaluationResult

_DECIMALS = 6  # about what fp32 knows of a cosine
_STRICT = pydantic.ConfigDict(strict=True)


@dataclass(frozen=True)
class Comparison:
    """Model a against model b in one direction, counting the right answers among the first k.

    Attributes:
        recall_a, recall_b: R@k of each, in percent.
        difference: recall_a - recall_b in points, with its paired interval and p-value.
        both, only_a, only_b, neither: numbers of queries that both models answer, only a, only b, neither.
    """

    direction: str
    k: int
    recall_a: float
    recall_b: float
    difference: Estimate
    both: int
    only_a: int
    only_b: int
    neither: int

    @property
    def clear(self) -> bool:
        """A difference counts only if its interval excludes zero."""
        return self.difference.clear

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference._asdict(), "clear": self.clear}

    def sentence(self, a: str, b: str) -> str:
        """The result in words, with the models' names."""
        found = self.difference
        interval = f"{found.mean:+.1f} points of R@{self.k} [{found.low:+.1f}, {found.high:+.1f}]"
        verdict = f"{a if found.mean > 0 else b} is better" if self.clear else "no clear difference"
        return f"{self.direction.replace('_to_', '→')}: {a} minus {b} {interval}: {verdict}"


def compare_ranks(a: Ranks, b: Ranks, *, groups: Tensor | None = None, ks: Sequence[int] = (1,)) -> list[Comparison]:
    """Compare two models on one gallery, in both directions at every K; arguments as of `paired_difference`."""
    found = {k: paired_difference([a], [b], k, groups=groups) for k in ks}
    comparisons = []
    for direction in ARROWS:
        first, second = getattr(a, direction), getattr(b, direction)  # [n], [n]
        for k in ks:
            counts = Counter(zip((first <= k).tolist(), (second <= k).tolist()))
            comparisons.append(
                Comparison(
                    direction=direction,
                    k=k,
                    recall_a=recall_at(first, k),
                    recall_b=recall_at(second, k),
                    difference=found[k][direction],
                    both=counts[True, True],
                    only_a=counts[True, False],
                    only_b=counts[False, True],
                    neither=counts[False, False],
                )
            )
    return comparisons


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class Candidate:
    """An entry of a result list: an image, or a caption by its record and its number there. It is right if its record
    is the query's."""

    record: str
    caption: int | None
    score: float


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class Query:
    """A caption searching its image ("text_to_image") or an image searching one of its captions ("image_to_text").

    Attributes:
        record: the record of the query; `caption` is the caption's number there, None for an image.
        group: the record's group of near-duplicates, if it has one.
        rank, score: of the right answer, as in `Ranks`; from image to text the best of the own captions.
        top: the first candidates, best first.
    """

    direction: Literal["text_to_image", "image_to_text"]
    record: str
    caption: int | None
    group: str | None
    rank: int
    score: float
    top: tuple[Candidate, ...]

    def __post_init__(self) -> None:
        places = [place for place, candidate in enumerate(self.top, start=1) if candidate.record == self.record]
        agrees = places[0] == self.rank if places else self.rank > len(self.top)
        if not agrees or (self.caption is None) != (self.direction == "image_to_text"):
            raise ValueError("the rank does not agree with the list, or the caption with the direction")


def query_results(gallery: PairData, result: EvaluationResult, k: int = 10) -> Iterator[Query]:
    """Every caption as a query, then every image, each with its k best candidates.

    The list agrees with the rank: wrong candidates that tie with a right answer stand before it, so the first right
    answer stands at place `rank`. Other captions of the same image come after the best one, by the same rule. Wrong
    candidates are in the order of their scores, and of the gallery where these are equal; where the list ends within a
    tie, it holds any of the tied candidates.
    """
    if result.image is None or result.text is None:
        raise ValueError("result has no vectors: lists need those of `evaluate`")
    top = top_candidates(result.image, result.text, gallery.owner, k)
    right = top.right.tolist()  # T scores
    bars = (top.right - TIE_TOLERANCE[top.right.dtype]).tolist()  # a wrong candidate from this score on comes first
    records, owner = gallery.records, gallery.owner.tolist()
    images = [(record.id, None) for record in records]
    captions: list[tuple[str, int]] = []  # of each caption: its record, and its number there
    own: list[list[int]] = [[] for _ in records]  # the captions of each image
    for row, image in enumerate(owner):
        captions.append((records[image].id, len(own[image])))
        own[image].append(row)

    def listed(
        wrong: tuple[Tensor, Tensor], query: int, answers: Sequence[int], names: Sequence[tuple[str, int | None]]
    ) -> tuple[Candidate, ...]:
        """The first k of the wrong candidates of a query and its answers, given as captions."""
        rows = answers if names is captions else [owner[row] for row in answers]
        found = [(-bars[caption], True, row, right[caption]) for caption, row in zip(answers, rows)]
        scores = zip(*(column[query].tolist() for column in wrong))
        found += [(-score, False, row, score) for score, row in scores if score > -torch.inf]
        return tuple(Candidate(*names[row], round(score, _DECIMALS)) for _, _, row, score in sorted(found)[:k])

    for row, rank in enumerate(result.ranks.text_to_image.tolist()):
        score, group = round(right[row], _DECIMALS), records[owner[row]].group
        yield Query("text_to_image", *captions[row], group, rank, score, listed(top.images, row, [row], images))
    for row, rank in enumerate(result.ranks.image_to_text.tolist()):
        score, group = round(max(right[caption] for caption in own[row]), _DECIMALS), records[row].group
        yield Query("image_to_text", *images[row], group, rank, score, listed(top.texts, row, own[row], captions))


def write_queries(path: Path, gallery: PairData, result: EvaluationResult, k: int = 10) -> None:
    """Write `query_results` as JSON, one query per line. The file appears whole or not at all."""
    with replace_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for query in query_results(gallery, result, k):
            file.write(json.dumps(asdict(query)) + "\n")


def read_queries(path: Path) -> list[Query]:
    """Read a file of `write_queries`; it must hold both directions of a whole gallery. Other fields are ignored.

    Raises:
        ValueError: the file is truncated, was changed, or is no query file. The message names it.
    """
    read = pydantic.TypeAdapter(Query).validate_json
    try:
        with path.open("rb") as file:
            queries = [read(line) for line in file]
        keys = {(query.direction, query.record, query.caption) for query in queries}
        captions, images = ({query.record for query in queries if query.direction == way} for way in ARROWS)
        if len(keys) < len(queries) or images != captions or max(query.rank for query in queries) > len(queries):
            raise ValueError("queries are missing or repeated")
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged, or not written by hnclip eval --queries: evaluate the model again"
        ) from error
    return queries


def compare_queries(a: Sequence[Query], b: Sequence[Query], *, ks: Sequence[int] = (1,)) -> list[Comparison]:
    """Compare two models by the queries of `read_queries`; their order may differ, the queries may not.

    Relations:
        The same as `compare_ranks` of the evaluations that were written, with the groups of the records.
    """

    def keyed(queries: Sequence[Query]) -> dict[tuple[Any, ...], Query]:
        return {(query.direction, query.record, query.caption, query.group): query for query in queries}

    first, second = keyed(a), keyed(b)
    if differing := sorted(first.keys() ^ second.keys(), key=str):
        direction, record, *_ = differing[0]
        raise ValueError(
            f"a and b hold different queries, {len(differing)} of them, for example {direction} of {record!r}: "
            "evaluate both models on the same data"
        )
    captions, images = ([key for key in first if key[0] == direction] for direction in ARROWS)
    numbers = {record: number for number, (_, record, *_) in enumerate(images)}
    owner = torch.tensor([numbers[record] for _, record, *_ in captions])  # [T]
    labels: dict[str, int] = {}
    groups = [labels.setdefault(group or f"\0{record}", len(labels)) for _, record, _, group in images]

    def ranks(queries: dict[tuple[Any, ...], Query]) -> Ranks:
        forward, backward = (torch.tensor([queries[key].rank for key in keys]) for keys in (captions, images))
        return Ranks(forward, backward, owner)

    return compare_ranks(ranks(first), ranks(second), groups=torch.tensor(groups), ks=ks)
