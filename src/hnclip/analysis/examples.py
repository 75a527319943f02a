"""Captions on which two models differ: how many there are, and a fair choice of them to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from PIL.Image import Image
from torch import Tensor

from hnclip.core import Record
from hnclip.evaluation.retrieval import EvaluationResult, group_numbers
from hnclip.report.caption_figures import Example


def count_differences(evaluations: Mapping[str, EvaluationResult]) -> dict[str, int]:
    """For how many captions both models, only one, or neither rank the right image first.

    Relations:
        (both + only a) / all captions is the text-to-image R@1 of model a.
    """
    (a, first), (b, second) = _right(evaluations).items()
    found = {"both": first & second, f"only {a}": first & ~second, f"only {b}": second & ~first}
    return {name: int(mask.sum()) for name, mask in (found | {"neither": ~first & ~second}).items()}


def differing_examples(
    evaluations: Mapping[str, EvaluationResult], records: Sequence[Record], *, limit: int = 6
) -> list[Example]:
    """Captions whose image one model ranks first and the other does not.

    Both kinds in turn, each in gallery order, until one runs out; then the other alone. The rarer kind begins, so that
    it is shown even if it exists only once. No group of near-duplicates appears twice.

    Args:
        evaluations: two models on the gallery of `records`, by name, with their vectors.
    """
    first, second = _right(evaluations).values()
    owner = [number for number, record in enumerate(records) for _ in record.captions]
    captions = [caption for record in records for caption in record.captions]
    groups = group_numbers(records).tolist()
    kinds = [mask.nonzero().squeeze(1).tolist() for mask in (first & ~second, second & ~first)]
    waiting = [iter(kind) for kind in sorted(kinds, key=len)]
    chosen, seen = list[int](), set[int]()
    while waiting and len(chosen) < limit:
        kind = waiting.pop(0)
        row = next((row for row in kind if groups[owner[row]] not in seen), None)
        if row is not None:
            chosen.append(row)
            seen.add(groups[owner[row]])
            waiting.append(kind)
    return [
        Example(
            caption=captions[row],
            right=records[owner[row]].image.load(),
            answers={name: _answer(evaluation, records, row) for name, evaluation in evaluations.items()},
        )
        for row in chosen
    ]


def _answer(evaluation: EvaluationResult, records: Sequence[Record], row: int) -> tuple[Image, bool]:
    """The first image for caption `row`, and whether it is the right one. As in the ranks, a tie counts against the
    model: then the tied wrong image is its answer."""
    own = int(evaluation.ranks.owner[row])
    if evaluation.ranks.text_to_image[row] == 1:
        return records[own].image.load(), True
    assert evaluation.image is not None
    assert evaluation.text is not None
    scores = torch.nn.functional.normalize(evaluation.image, dim=1) @ evaluation.text[row]  # [I]
    scores[own] = -torch.inf
    return records[int(scores.argmax())].image.load(), False


def _right(evaluations: Mapping[str, EvaluationResult]) -> dict[str, Tensor]:
    """[T] booleans by model: the right image comes first."""
    return {name: evaluation.ranks.text_to_image == 1 for name, evaluation in evaluations.items()}
