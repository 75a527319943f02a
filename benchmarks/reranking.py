"""What re-ranking by words and patches does to R@1 of text → image, for each way to add its score to the cosine.

Every description's `most` nearest pictures are put into another order: by cosine + weight · score, or by the score
alone. The score is late interaction: of words, the mean over the text's tokens of their best patch; of patches, the
mean over the picture's patches of their best word. The order is chosen on the validation splits; the test splits say
what it is worth beside the order by cosine, with a 95 % interval over queries, families whole. `hnclip search --rerank`
adds `hnclip.search.rerank.WEIGHT` times the score of words.
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
from hnclip.evaluate.bootstrap import bootstrap_intervals
from hnclip.evaluate.retrieval import group_numbers
from hnclip.measure import Report, machine
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, models_of
from hnclip.search.rerank import MOST, WEIGHT, token_score
from hnclip.util.device import find_device

log = logging.getLogger("hnclip.bench")

BATCH = 32
BY_COSINE = "cosine"
COLUMNS = {
    "model": "model",
    "data": "data",
    "order": "order",
    "validation": "validation R@1",
    "test": "test R@1",
    "change": "change",
    "low": "from",
    "high": "to",
    "p_value": "p",
}

Ways = dict[str, Tensor]


@dataclass(frozen=True)
class Options:
    """Whose pictures are put into another order, and how."""

    model: tuple[str, ...] = ("bundled",)
    """As for `hnclip eval` (docs/models.md); of a run its best epoch."""
    data: tuple[str, ...] = ("scenes/park", "scenes/shelf")
    """As for `hnclip eval` (docs/data.md); with a validation and a test split."""
    weights: tuple[float, ...] = (0.01, 0.02, WEIGHT, 0.1, 0.2, 0.5, 1.0, 2.0)
    """Of the score beside the cosine."""
    most: int = MOST
    """Pictures of each query that are put into another order."""
    limit: int | None = None
    """Only the first so many records of each split."""
    read: ReadConfig = field(default_factory=ReadConfig)
    device: str = "auto"


def run(options: Options) -> Report:
    rows: list[dict[str, Any]] = []
    device = find_device(options.device)
    for name in options.model:
        model = load(models_of(name)[0][1]).eval().to(device)
        for data in options.data:
            opened = open_data(data, options.read)
            found = {}
            for split in ("validation", "test"):
                records = opened.part(split, validation_share=options.read.validation_share)[: options.limit]
                log.info(f"{name} on {len(records):,} {split} records of {data}")
                found[split] = hits_at_one(model, records, options), families(records)
            rows += compared(name, data, found)
    return Report("reranking", COLUMNS, rows, machine(device), notes(rows))


@torch.no_grad()
def hits_at_one(model: DualEncoder, records: Sequence[Record], options: Options) -> Ways:
    """For each order, whether each description's own picture comes first: [Q]."""
    encoded = [
        model.encode_images(model.preprocess_images([record.image.load() for record in part]), tokens=True)
        for part in (records[start : start + BATCH] for start in range(0, len(records), BATCH))
    ]
    vectors = torch.cat([each.vectors for each in encoded])  # [I, D]
    patches = torch.cat([each.tokens for each in encoded if each.tokens is not None])  # [I, P, D]
    hits: dict[str, list[bool]] = {}
    for owner, record in enumerate(records):
        for text in record.captions:
            said = model.encode_texts(model.tokenize([text]), tokens=True)
            assert said.tokens is not None
            assert said.mask is not None
            cosine = vectors @ said.vectors[0]  # [I]
            near = cosine.sort(descending=True, stable=True).indices[: options.most]  # [n]
            words, some = said.tokens[0][said.mask[0]], patches[near]  # [T, D], [n, P, D]
            for name, scores in orders(cosine[near], words, some, options.weights).items():
                first = near[scores.sort(descending=True, stable=True).indices[0]]
                hits.setdefault(name, []).append(int(first) == owner)
    return {name: torch.tensor(values).double() for name, values in hits.items()}


def orders(cosine: Tensor, words: Tensor, patches: Tensor, weights: Sequence[float]) -> Ways:
    """What pictures [n] are ordered by, in each way.

    Shape:
        cosine [n]; words [T, D]; patches [n, P, D]
    """
    of_patches = (words @ patches.transpose(1, 2)).amax(dim=1).mean(dim=1)  # [n]
    found = {BY_COSINE: cosine}
    for name, score in (("words", token_score(words, patches)), ("patches", of_patches)):
        found |= {f"cosine + {weight:g}·{name}": cosine + weight * score for weight in weights}
        found[name] = score
    return found


def families(records: Sequence[Record]) -> Tensor:
    """[Q], the family of each description."""
    counts = torch.tensor([len(record.captions) for record in records])
    return group_numbers(records).repeat_interleave(counts)


def compared(model: str, data: str, found: dict[str, tuple[Ways, Tensor]]) -> list[dict[str, Any]]:
    """One row for each order, changes beside the order by cosine on the test split."""
    (validation, _), (test, groups) = found["validation"], found["test"]
    rows = []
    for name in test:
        row = {"model": model, "data": data, "order": name}
        row |= {split: 100 * float(hits[name].mean()) for split, hits in (("validation", validation), ("test", test))}
        if name != BY_COSINE:
            change = bootstrap_intervals(100 * (test[name] - test[BY_COSINE])[:, None], groups=groups)[0]
            row |= {"change": change.mean, "low": change.low, "high": change.high, "p_value": change.p_value}
        rows.append(row)
    return rows


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each model the order that is best on the validation splits, and what the test splits say of it."""
    said = []
    for model in dict.fromkeys(row["model"] for row in rows):
        means: dict[str, list[float]] = {}
        for row in rows:
            if row["model"] == model:
                means.setdefault(row["order"], []).append(row["validation"])
        best = max(means, key=lambda name: sum(means[name]))  # the first of equal ones, so the cosine alone
        if best == BY_COSINE:
            said.append(f"{model}: on the validation splits no re-ranking is better than the order by cosine")
            continue
        chosen = [row for row in rows if row["model"] == model and row["order"] == best]
        sure = sum(row["low"] > 0 for row in chosen)
        said.append(
            f"{model}: {best} is best on the validation splits; on the test splits it is better beyond chance on "
            f"{sure} of {len(chosen)}"
        )
    return said
