"""Effect of re-ranking by words and patches on text → image R@1, for several ways to add the token score to the cosine.

The `most` nearest images of each caption are ordered by cosine + weight · score, or by the score alone. The score is
late interaction: "words" is the mean over the text's tokens of their best patch, "patches" the mean over the image's
patches of their best token. The order is chosen on the validation splits; the test splits give its change over the
order by cosine, with a 95 % interval over queries, where near-duplicates are drawn together. `hnclip search --rerank`
adds `hnclip.search.explain.WEIGHT` times the score of words.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hnclip.config import ReadConfig
from hnclip.core import Record
from hnclip.data.sources import open_data
from hnclip.evaluation.bootstrap import bootstrap_intervals
from hnclip.evaluation.retrieval import group_numbers
from hnclip.measure import Report, machine
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, models_of
from hnclip.search.explain import MOST, WEIGHT, token_scores
from hnclip.util.device import find_device

log = logging.getLogger("hnclip.bench")

BATCH = 32
BY_COSINE = "cosine"
COLUMNS = {
    "data": "data",
    "order": "order",
    "validation": "validation R@1",
    "test": "test R@1",
    "change": "change",
    "low": "from",
    "high": "to",
    "p_value": "p",
}

Hits = dict[str, Tensor]


@dataclass(frozen=True)
class Options:
    """What is re-ranked, and how."""

    model: str = "bundled"
    """As for `hnclip eval` (hnclip docs models); for a run directory, its best epoch."""
    data: tuple[str, ...] = ("scenes/park", "scenes/shelf")
    """As for `hnclip eval` (hnclip docs data); with a validation and a test split."""
    weights: tuple[float, ...] = (0.01, 0.02, WEIGHT, 0.1, 0.2, 0.5, 1.0, 2.0)
    """Of the score that is added to the cosine."""
    most: int = MOST
    """Images of each query that are ordered again."""
    limit: int | None = None
    """Only the first so many records of each split."""
    read: ReadConfig = field(default_factory=ReadConfig)
    device: str = "auto"


def run(options: Options) -> Report:
    rows: list[dict[str, Any]] = []
    device = find_device(options.device)
    model = load(models_of(options.model)[0][1]).eval().to(device)
    for data in options.data:
        opened = open_data(data, options.read)
        found = {}
        for split in ("validation", "test"):
            records = opened.part(split, validation_share=options.read.validation_share)[: options.limit]
            log.info(f"{len(records):,} {split} records of {data}")
            found[split] = hits_at_one(model, records, options), caption_groups(records)
        rows += compare(data, found)
    about = {**machine(device), "model": options.model}
    return Report("reranking", COLUMNS, rows, about, [best_order(rows)])


def hits_at_one(model: DualEncoder, records: Sequence[Record], options: Options) -> Hits:
    """For each order, whether the own image of each caption comes first: [Q]."""
    hits: dict[str, list[bool]] = {}
    with model.inference():
        encoded = [
            model.encode_images(model.preprocess_images([record.image.load() for record in part]), tokens=True)
            for part in (records[start : start + BATCH] for start in range(0, len(records), BATCH))
        ]
        vectors = torch.cat([one.vectors for one in encoded])  # [I, D]
        patches = torch.cat([one.tokens for one in encoded if one.tokens is not None])  # [I, P, D]
        for owner, record in enumerate(records):
            for text in record.captions:
                query = model.encode_texts(model.tokenize([text]), tokens=True)
                assert query.tokens is not None
                assert query.mask is not None
                cosines = vectors @ query.vectors[0]  # [I]
                near = cosines.sort(descending=True, stable=True).indices[: options.most]  # [n]
                words = query.tokens[0][query.mask[0]]  # [T, D]
                for name, scores in orders(cosines[near], words, patches[near], options.weights).items():
                    first = near[scores.sort(descending=True, stable=True).indices[0]]
                    hits.setdefault(name, []).append(int(first) == owner)
    return {name: torch.tensor(values).double() for name, values in hits.items()}


def orders(cosines: Tensor, words: Tensor, patches: Tensor, weights: Sequence[float]) -> dict[str, Tensor]:
    """The scores that images are ordered by, for each way.

    Shape:
        cosines [n]; words [T, D]; patches [n, P, D]; scores [n]
    """
    of_patches = (words @ patches.transpose(1, 2)).amax(dim=1).mean(dim=1)  # [n]
    found = {BY_COSINE: cosines}
    for name, score in (("words", token_scores(words, patches)), ("patches", of_patches)):
        found |= {f"{BY_COSINE} + {weight:g}·{name}": cosines + weight * score for weight in weights}
        found[name] = score
    return found


def caption_groups(records: Sequence[Record]) -> Tensor:
    """[Q]: the group of near-duplicates of each caption."""
    counts = torch.tensor([len(record.captions) for record in records])
    return group_numbers(records).repeat_interleave(counts)


def compare(data: str, found: dict[str, tuple[Hits, Tensor]]) -> list[dict[str, Any]]:
    """One row for each order, with its change over the order by cosine on the test split."""
    (validation, _), (test, groups) = found["validation"], found["test"]
    rows = []
    for name in test:
        row: dict[str, Any] = {"data": data, "order": name}
        row |= {split: 100 * float(hits[name].mean()) for split, hits in (("validation", validation), ("test", test))}
        if name != BY_COSINE:
            change = bootstrap_intervals(100 * (test[name] - test[BY_COSINE])[:, None], groups=groups)[0]
            row |= {"change": change.mean, "low": change.low, "high": change.high, "p_value": change.p_value}
        rows.append(row)
    return rows


def best_order(rows: Sequence[dict[str, Any]]) -> str:
    """The order that is best on the validation splits, and whether it helps on the test splits."""
    names = dict.fromkeys(row["order"] for row in rows)
    best = max(names, key=lambda name: sum(row["validation"] for row in rows if row["order"] == name))
    if best == BY_COSINE:  # also if others are equally good
        return "on the validation splits no re-ranking is better than the cosine alone"
    chosen = [row for row in rows if row["order"] == best]
    clear = sum(row["low"] > 0 for row in chosen)
    return (
        f"best on the validation splits: {best}; clearly better than the cosine on {clear} of {len(chosen)} test splits"
    )
