"""Captions on which two models differ: how many there are, and a fair choice of them to look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from PIL.Image import Image
from torch import Tensor

from hnclip.core import Record
from hnclip.evaluate.retrieval import EvaluationResult, group_numbers
from hnclip.report.caption_figures import Example


def count_differences(evaluations: Mapping[str, EvaluationResult]) -> dict[str, int]:
    """In how many captions both models, only the one, only the other, or neither put the right picture first.

    Relations:
        (both + only a) / all captions is the text-to-image R@1 of model a.
    """
    (a, first), (b, second) = _hits(evaluations).items()
    return {
        "both": int((first & second).sum()),
        f"only {a}": int((first & ~second).sum()),
        f"only {b}": int((second & ~first).sum()),
        "neither": int((~first & ~second).sum()),
    }


def differing_examples(
    evaluations: Mapping[str, EvaluationResult], records: Sequence[Record], *, limit: int = 6
) -> list[Example]:
    """Captions whose picture one model puts first and the other does not.

    Both kinds take turns, each in gallery order, until one runs out; then the other goes on alone. The rarer kind
    begins, so that it is shown even if it exists only once. No family (`group`) appears twice.

    Args:
        evaluations: two models on the gallery of `records`, by name.
        records: the records of that gallery, in its order.
        limit: the highest number of examples.
    """
    (_, first), (_, second) = _hits(evaluations).items()
    owner = next(iter(evaluations.values())).ranks.owner  # [T]
    captions = [caption for record in records for caption in record.captions]
    expected = [index for index, record in enumerate(records) for _ in record.captions]
    if owner.tolist() != expected:
        raise ValueError(
            f"records ({len(records)} pictures, {len(captions)} captions) are not the gallery of the evaluations"
        )
    family = group_numbers(records)[owner].tolist()  # T numbers
    kinds = [mask.nonzero().squeeze(1).tolist() for mask in (first & ~second, second & ~first)]
    return [
        Example(
            caption=captions[row],
            right=records[expected[row]].image.load(),
            answers={name: _answer(evaluation, records, row) for name, evaluation in evaluations.items()},
        )
        for row in _take_turns(sorted(kinds, key=len), family, limit)
    ]


def _take_turns(kinds: Iterable[Sequence[int]], family: Sequence[int], limit: int) -> list[int]:
    chosen: list[int] = []
    seen: set[int] = set()
    waiting = [iter(kind) for kind in kinds]
    while waiting and len(chosen) < limit:
        kind = waiting.pop(0)
        row = next((row for row in kind if family[row] not in seen), None)
        if row is not None:
            chosen.append(row)
            seen.add(family[row])
            waiting.append(kind)
    return chosen


def _answer(evaluation: EvaluationResult, records: Sequence[Record], row: int) -> tuple[Image, bool]:
    """The picture on top for caption `row`, and whether it is the right one. As in the ranks, a tie counts against the
    model: then the tied wrong picture is its answer."""
    own = int(evaluation.ranks.owner[row])
    if evaluation.ranks.text_to_image[row] == 1:
        return records[own].image.load(), True
    assert evaluation.image is not None
    assert evaluation.text is not None
    scores = torch.nn.functional.normalize(evaluation.image, dim=1) @ evaluation.text[row]  # [I]
    scores[own] = -torch.inf
    return records[int(scores.argmax())].image.load(), False


def _hits(evaluations: Mapping[str, EvaluationResult]) -> dict[str, Tensor]:
    """[T] booleans by model: the right picture comes first."""
    if len(evaluations) != 2:
        raise ValueError(f"evaluations must be of exactly two models, got {len(evaluations)}: {list(evaluations)}")
    first, second = (evaluation.ranks.owner for evaluation in evaluations.values())
    if not torch.equal(first, second):
        raise ValueError("evaluations must be on the same gallery: their captions belong to different pictures")
    return {name: evaluation.ranks.text_to_image == 1 for name, evaluation in evaluations.items()}
