"""Retrieval among a part of the gallery, from vectors that are there already."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

import torch

from hnclip.evaluate.metrics import summarize
from hnclip.evaluate.ranks import retrieval_ranks
from hnclip.evaluate.retrieval import Evaluation, group_numbers

if TYPE_CHECKING:
    from hnclip.evaluate.retrieval import Gallery


def restrict(evaluation: Evaluation, gallery: Gallery, ids: Set[str], *, intervals: bool = True) -> Evaluation:
    """The evaluation as if the gallery held only the records of these ids: both queries and candidates are theirs.

    A gallery that holds training pairs, such as Long-DCI with its 7,444 pictures, rewards a model for remembering
    them; among the 1,999 that were held out it cannot.

    Relations:
        With all ids nothing changes. With fewer candidates no rank becomes worse.
    """
    missing = ids - {record.id for record in gallery.records}
    if missing or not ids:
        first = f", for example {min(missing)!r}" if missing else ""
        raise ValueError(f"ids must name records of the gallery, and at least one; {len(missing)} are not in it{first}")
    kept = torch.tensor([record.id in ids for record in gallery.records])  # [I]
    number = kept.cumsum(0) - 1  # [I] the place of each kept picture among the kept
    captions = kept[gallery.owner]  # [T]
    image, text = evaluation.image[kept], evaluation.text[captions]  # [i, D], [t, D]
    ranks = retrieval_ranks(image, text, number[gallery.owner[captions]])
    groups = group_numbers([record for record in gallery.records if record.id in ids])  # [i]
    metrics = summarize(ranks, intervals=intervals, groups=groups)
    return Evaluation(image=image, text=text, ranks=ranks, metrics=metrics)
