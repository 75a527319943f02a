"""Recalls and rank statistics against numbers counted by hand."""

from __future__ import annotations

import json

import pytest
import torch

from hnclip.evaluate import Ranks, bootstrap_interval, recall_at, summarize

# Two images; captions 0, 1, 2 describe image 0, caption 3 describes image 1.
RANKS = Ranks(torch.tensor([1, 2, 6, 11]), torch.tensor([1, 3]), torch.tensor([0, 0, 0, 1]))


@pytest.mark.parametrize(("k", "recall"), [(1, 25.0), (2, 50.0), (5, 50.0), (6, 75.0), (11, 100.0), (999, 100.0)])
def test_recall_is_the_share_of_ranks_up_to_k(k, recall):
    assert recall_at(RANKS.text_to_image, k) == recall


def test_recall_is_exact_for_whole_numbers():
    assert recall_at(torch.tensor([1] * 29 + [2] * 71), 1) == 29.0


@pytest.mark.parametrize(("argument", "ranks", "k"), [("k", [1, 2], 0), ("ranks", [], 1), ("ranks", [[1]], 1)])
def test_recall_errors_name_the_argument(argument, ranks, k):
    with pytest.raises(ValueError, match=rf"^{argument} "):
        recall_at(torch.tensor(ranks), k)


def test_summary_as_dictionary():
    summary = summarize(RANKS, ks=(1, 10))
    expected = {
        "text_to_image": {"R@1": 25.0, "R@10": 75.0, "mean_rank": 5.0, "median_rank": 4.0, "queries": 4},
        "image_to_text": {"R@1": 50.0, "R@10": 100.0, "mean_rank": 2.0, "median_rank": 2.0, "queries": 2},
        "mean_R@1": 37.5,
        "mean_R@10": 87.5,
    }
    assert summary.to_dict() == expected
    assert json.loads(json.dumps(summary.to_dict())) == expected
    assert summary.text_to_image.recall == {1: 25.0, 10: 75.0}


def test_default_ks():
    assert list(summarize(RANKS).image_to_text.recall) == [1, 5, 10, 25, 50]


def many_ranks(images: int = 60, captions: int = 4) -> Ranks:
    """Captions of one image share their rank, so they are one observation, not four."""
    ranks = torch.randint(1, 4, (images,), generator=torch.Generator().manual_seed(0))  # [I]
    return Ranks(ranks.repeat_interleave(captions), ranks, torch.arange(images).repeat_interleave(captions))


def test_intervals_draw_the_captions_of_an_image_together():
    ranks = many_ranks()
    summary = summarize(ranks, ks=(1, 2), intervals=True, resamples=500, seed=3)
    hits = 100.0 * (ranks.image_to_text <= 1)  # [I]
    expected = bootstrap_interval(hits, resamples=500, seed=3)
    assert summary.image_to_text.intervals[1] == expected
    assert summary.text_to_image.intervals[1] == pytest.approx(expected)
    separate = bootstrap_interval(100.0 * (ranks.text_to_image <= 1), resamples=500, seed=3)
    assert expected.high - expected.low > 1.5 * (separate.high - separate.low)


def test_intervals_in_the_dictionary():
    values = json.loads(json.dumps(summarize(many_ranks(), ks=(1, 2, 3), intervals=True, resamples=200).to_dict()))
    for direction in ("text_to_image", "image_to_text"):
        for k in (1, 2):
            low, high = values[direction][f"R@{k}_interval"]
            assert 0 < low < values[direction][f"R@{k}"] < high < 100
        assert values[direction]["R@3_interval"] == [100.0, 100.0]


def test_families_of_images_are_drawn_with_all_their_captions():
    ranks = many_ranks()
    families = torch.arange(60) // 6  # [I]
    summary = summarize(ranks, ks=(1,), intervals=True, groups=families, resamples=300)
    hits = 100.0 * (ranks.text_to_image <= 1)  # [T]
    expected = bootstrap_interval(hits, groups=families[ranks.owner], resamples=300)
    assert summary.text_to_image.intervals[1] == expected
    assert summary.image_to_text.intervals[1] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("argument", "changed"),
    [("ks", {"ks": ()}), ("k", {"ks": (1, 0)}), ("groups", {"groups": torch.arange(3)})],
)
def test_summary_errors_name_the_argument(argument, changed):
    with pytest.raises(ValueError, match=rf"^{argument} "):
        summarize(RANKS, **changed)
