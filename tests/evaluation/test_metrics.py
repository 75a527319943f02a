"""Recalls and rank statistics against numbers counted by hand."""

from __future__ import annotations

import json

import pytest
import torch

from hnclip.evaluation import Ranks, recall_at, summarize
from hnclip.evaluation.bootstrap import bootstrap_intervals

# Two images; captions 0, 1, 2 describe image 0, caption 3 describes image 1.
RANKS = Ranks(torch.tensor([1, 2, 6, 11]), torch.tensor([1, 3]), torch.tensor([0, 0, 0, 1]))


def test_recalls_and_statistics_by_hand():
    assert [recall_at(RANKS.text_to_image, k) for k in (1, 2, 5, 6, 999)] == [25.0, 50.0, 50.0, 75.0, 100.0]
    assert recall_at(torch.tensor([1] * 29 + [2] * 71), 1) == 29.0  # exact for whole numbers
    with pytest.raises(ValueError, match="k"):
        recall_at(RANKS.text_to_image, 0)
    expected = {
        "text_to_image": {"R@1": 25.0, "R@10": 75.0, "mean_rank": 5.0, "median_rank": 4.0, "queries": 4},
        "image_to_text": {"R@1": 50.0, "R@10": 100.0, "mean_rank": 2.0, "median_rank": 2.0, "queries": 2},
        "mean_R@1": 37.5,
        "mean_R@10": 87.5,
    }
    assert json.loads(json.dumps(summarize(RANKS, ks=(1, 10)))) == expected
    assert list(summarize(RANKS))[2:] == [f"mean_R@{k}" for k in (1, 5, 10, 25, 50)]


def test_intervals_draw_groups_of_images_with_all_their_captions():
    """Captions of one image share their rank, so they are one observation, not four."""
    rank = torch.randint(1, 4, (60,), generator=torch.Generator().manual_seed(0))  # [I]
    ranks = Ranks(rank.repeat_interleave(4), rank, torch.arange(60).repeat_interleave(4))
    for groups in (None, torch.arange(60) // 6):
        summary = summarize(ranks, ks=(1, 3), intervals=True, groups=groups)
        (expected,) = bootstrap_intervals(100.0 * (rank <= 1)[:, None], groups=groups)
        assert summary["image_to_text"]["R@1_interval"] == [expected.low, expected.high]
        values = summary["text_to_image"]
        assert values["R@1_interval"] == pytest.approx([expected.low, expected.high])
        assert 0 < expected.low < values["R@1"] < expected.high < 100
        assert values["R@3_interval"] == [100.0, 100.0]
    assert summarize(ranks, intervals=True, groups=torch.zeros(60)) == summarize(ranks)  # no spread to measure
