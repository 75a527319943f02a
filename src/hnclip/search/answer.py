"""What `hnclip search` found, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hnclip.data.image_sources import FileImage
from hnclip.search.answer_text import answer_text
from hnclip.search.explain import Explanation
from hnclip.search.find import CaptionHit, Hit
from hnclip.search.index.reader import Index, Item
from hnclip.search.twins import Separator, TwinGroup

DIGITS = 5  # of cosines in JSON


@dataclass(frozen=True)
class Separated:
    """A group of near-twins, and which words of the description separate some of its members; none if a picture asked.
    `places` are those of these members among the results, in the order of the separators' scores."""

    group: TwinGroup
    separators: tuple[Separator, ...] = ()
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Results, best first.

    Args:
        engine: the one that searched, `exact` where all rows were looked at.
        query: the description, or the path of the picture that was searched by.
        asked: whether it was a text or a picture.
        total: pictures or captions of the index that could be found.
        hits: pictures; none if captions were to be found.
        captions: captions; none if pictures were to be found.
        twins: groups of near-twins, if explanations were asked for.
        explanations: of the best results, if they were asked for.
        places: what names each item's picture, a path if it has one, by the item's id; `files` those that are files.
        notes: what the person who asks should know.
    """

    index: Path
    engine: str
    query: str
    asked: Literal["text", "image"]
    find: Literal["images", "captions"]
    total: int
    cut: bool
    hits: tuple[Hit, ...]
    captions: tuple[CaptionHit, ...]
    twins: tuple[Separated, ...]
    explanations: tuple[Explanation, ...]
    places: dict[int, str]
    files: dict[int, str]
    notes: tuple[str, ...]

    def group_of(self) -> dict[int, int]:
        """The number of its group for the place of each result in one."""
        return {place: number for number, twins in enumerate(self.twins) for place in twins.group.places}

    def to_dict(self) -> dict[str, Any]:
        groups = self.group_of()

        def picture(item: Item) -> dict[str, Any]:
            return {
                "id": item.id,
                "name": item.name,
                "path": self.files.get(item.id),
                "captions": list(item.captions),
                "width": item.shape[0],
                "height": item.shape[1],
            }

        return {
            "index": str(self.index),
            "engine": self.engine,
            self.asked: self.query,
            "find": self.find,
            "total": self.total,
            "cut": self.cut,
            "results": [
                {
                    **picture(hit.item),
                    "score": round(hit.score, DIGITS),
                    "tokens": None if hit.tokens is None else round(hit.tokens, DIGITS),
                    "group": groups.get(place),
                }
                for place, hit in enumerate(self.hits)
            ],
            "captions": [
                {
                    "text": hit.caption.text,
                    "score": round(hit.score, DIGITS),
                    "group": groups.get(place),
                    "pictures": [picture(item) for item in hit.caption.items],
                }
                for place, hit in enumerate(self.captions)
            ],
            "groups": [_group(twins) for twins in self.twins],
            "explanations": [_explanation(explanation) for explanation in self.explanations],
            "notes": list(self.notes),
        }

    def to_text(self) -> str:
        return answer_text(self)


def item_places(index: Index, items: list[Item]) -> tuple[dict[int, str], dict[int, str]]:
    """What names the picture of each item, a path wherever it has one; and the paths of those that are files."""
    sources = {item.id: (item, index.source(item)) for item in items}
    places = {number: item.name if source is None else source.key for number, (item, source) in sources.items()}
    files = {number: source.key for number, (_, source) in sources.items() if isinstance(source, FileImage)}
    return places, files


def _group(twins: Separated) -> dict[str, Any]:
    group = twins.group
    return {
        "ids": [item.id for item in group.items],
        "similarity": round(group.similarity, DIGITS),
        "captions": [
            {"id": said.item.id, "pieces": [list(piece) for piece in said.passage]} for said in group.captions
        ],
        "separated": [item.id for place, item in zip(group.places, group.items) if place in twins.places],
        "separators": [
            {"word": found.word, "scores": [round(score, DIGITS) for score in found.scores]}
            for found in twins.separators
        ],
    }


def _explanation(explanation: Explanation) -> dict[str, Any]:
    return {
        "id": explanation.item.id,
        "text": explanation.text,
        "words": [
            {
                "text": word.text,
                "start": word.start,
                "stop": word.stop,
                "score": round(word.score, DIGITS),
                "patches": [round(score, DIGITS) for score in word.patches],
            }
            for word in explanation.words
        ],
        "rows": explanation.rows,
        "columns": explanation.columns,
        "box": list(explanation.box),
        "approximate": explanation.approximate,
    }
