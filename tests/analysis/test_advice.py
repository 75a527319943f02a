"""Findings follow from numbers: each threshold from both sides."""

from __future__ import annotations

import pytest
import torch

from hnclip.analysis import advice
from hnclip.analysis.batches import BatchLosses, BatchNegatives
from hnclip.analysis.captions import Histogram, count_values
from hnclip.report.document import Finding


def losses(saturated: float, negatives: float = 15, scale: float = 100.0) -> BatchLosses:
    return BatchLosses(1000, negatives, 0.5, scale, [1.0] * 3, [1.0] * 3, saturated, saturated)


def batch(mean: float = 0.4, spread: float = 0.1, hardest: float = 0.8) -> BatchNegatives:
    return BatchNegatives(Histogram(count_values(torch.tensor([mean])).numpy(), mean), hardest, spread, 15)


def negatives(micro: float, whole: float, memory: float, planned: str = "micro") -> Finding:
    found = {"micro": losses(micro), "batch": losses(whole, 127), "memory": losses(memory, 2000)}
    return advice.negatives(found, planned)


def gamma(planned: float, *, spread: float = 0.1, decides: float | None = 0.4) -> Finding:
    return advice.gamma(planned, batch(spread=spread), 100.0, decides, 0.3)


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (advice.too_few(99), "act"),
        (advice.retrieval(0.19, 0.1, 10_000), "act"),
        (advice.retrieval(0.21, 0.1, 50), "act"),  # within three deviations of chance
        (advice.duplicates({"captions": 0, "images": 1}, 0, 0.98, 100)[0], "act"),
        (negatives(0.4, 0.0, 0.0), "good"),
        (gamma(0.11), "good"),
        (advice.scale([losses(0.4), losses(0.1, scale=50)]), "good"),
    ],
)
def test_levels_follow_from_numbers(finding: Finding | None, level: str) -> None:
    assert finding is not None
    assert finding.level == level


@pytest.mark.parametrize(
    ("finding", "option"),
    [
        (negatives(0.6, 0.4, 0.0), "--optim.negatives batch"),
        (negatives(0.6, 0.6, 0.6), "--global-loss hn"),
        (advice.clusters(batch(), 0.86, 0.95), "--cluster 4"),
        (advice.scale([losses(0.9), losses(0.6, scale=50), losses(0.1, scale=20)]), "--optim.scale 20"),
        (gamma(0.41), "γ 0.2 "),  # the middle of 0.1, where two negatives differ by one nat, and 0.4
        (advice.duplicates({}, 101, 0.98, 100)[0], "--threshold"),  # more pairs than captions: it is too low
    ],
)
def test_advice_names_the_option_that_its_number_asks_for(finding: Finding, option: str) -> None:
    assert option in finding.advice
    assert gamma(0.5, spread=0.0).level == "note"  # no γ tells equal captions apart
