"""One model on one data set, with all that a table and a paired comparison need of it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hnclip.evaluate.held_out import restrict
from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.retrieval import group_numbers

if TYPE_CHECKING:
    from hnclip.evaluate.retrieval import Evaluation, Gallery


class PerQuery(NamedTuple):
    """What a paired comparison needs: ranks, and the family and record id of every image [I]; without ids nobody can
    tell whether two of these are about the same images."""

    ranks: Ranks
    groups: Tensor
    ids: tuple[str, ...] = ()

    def groups_of(self, direction: str) -> Tensor:
        """The family of every query of a direction: [T] captions or [I] images."""
        return self.groups[self.ranks.owner] if direction == "text_to_image" else self.groups


@dataclass(frozen=True)
class Result:
    """One model on one split of one data set.

    Attributes:
        truncated: captions cut at the model's context.
        skipped: records left out because they cannot be used.
        unread: rows of the source, of whichever split, that no record could be made of.
        metrics: `RetrievalMetrics.to_dict()` of the whole gallery.
        held_out: the same among the held-out records alone, where training pairs are in the gallery.
        caption_similarity: `CaptionSimilarity` as a dictionary.
        queries, held_out_queries: for paired comparisons; without them a table cannot tell which differences count.
    """

    model: str
    data: str
    split: str
    images: int
    captions: int
    truncated: int
    skipped: int
    metrics: Mapping[str, Any]
    held_out: Mapping[str, Any] | None = None
    caption_similarity: Mapping[str, float] | None = None
    unread: int = 0
    queries: PerQuery | None = field(default=None, repr=False, compare=False)
    held_out_queries: PerQuery | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """All but the queries, ready for JSON."""
        values: dict[str, Any] = {
            "model": self.model,
            "data": self.data,
            "split": self.split,
            "images": self.images,
            "captions": self.captions,
            "truncated_captions": self.truncated,
            "skipped_records": self.skipped,
            "unread_rows": self.unread,
            **self.metrics,
        }
        if self.held_out is not None:
            values["held_out"] = dict(self.held_out)
        if self.caption_similarity is not None:
            values["caption_similarity"] = dict(self.caption_similarity)
        return values


def result_of(
    model: str,
    data: str,
    split: str,
    gallery: Gallery,
    evaluation: Evaluation,
    *,
    skipped: int = 0,
    unread: int = 0,
    held_out: Set[str] | None = None,
    caption_similarity: Mapping[str, float] | None = None,
) -> Result:
    """The result of an evaluation, by the names of its model and data.

    Args:
        held_out: ids of the records that no model was trained on, for a gallery that also holds training pairs.
    """
    part, part_queries = None, None
    if held_out is not None:
        part = restrict(evaluation, gallery, held_out)
        kept = [record for record in gallery.records if record.id in held_out]
        part_queries = PerQuery(part.ranks, group_numbers(kept), tuple(record.id for record in kept))
    return Result(
        model=model,
        data=data,
        split=split,
        images=len(gallery.records),
        captions=len(gallery.captions),
        truncated=gallery.truncated,
        skipped=skipped,
        metrics=evaluation.metrics.to_dict(),
        held_out=None if part is None else part.metrics.to_dict(),
        caption_similarity=caption_similarity,
        unread=unread,
        queries=PerQuery(
            evaluation.ranks, group_numbers(gallery.records), tuple(record.id for record in gallery.records)
        ),
        held_out_queries=part_queries,
    )
