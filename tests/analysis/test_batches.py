"""The negatives of a run's first epoch: those of the losses themselves."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.analysis.batches import (
    QueryGroup,
    batch_losses,
    batch_negatives,
    batch_similarity,
    buckets,
    clustered_epoch,
    first_epoch,
    hardest_weight,
    quantile_edges,
)
from hnclip.analysis.captions import caption_geometry
from hnclip.data.batching import PairData, prepare
from hnclip.data.scenes import scene_records
from hnclip.losses import clip_loss, hard_negative_loss
from hnclip.losses.hard_negative import check_pairs, negative_margins
from hnclip.models.load import load
from hnclip.recipes import tiny
from hnclip.training.data import RunData


def vectors(count: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)), dim=1)


IMAGE, TEXT = vectors(40, 1), vectors(40, 2)
IDS = torch.stack([torch.arange(40), torch.arange(40) % 13], dim=1)  # captions 0, 13, 26 and 39 are equal, and so on
GROUPS = [
    QueryGroup(torch.arange(0, 16), 16),
    QueryGroup(torch.arange(16, 40), 8),
    QueryGroup(torch.tensor([5, 18]), 2),
]


def real_negatives(group: QueryGroup) -> list[list[float]]:
    """Cosines of each query with its negatives, by a plain loop."""
    return [
        [float(TEXT[a] @ TEXT[b]) for b in group.rows.tolist() if not (IDS[a] == IDS[b]).any()]
        for a in group.rows[: group.queries].tolist()
    ]


def test_negatives_are_those_of_a_loop() -> None:
    found = batch_negatives(TEXT, GROUPS, IDS)
    rows = [row for group in GROUPS for row in real_negatives(group) if row]
    every = [value for row in rows for value in row]
    assert found.similarities.total == len(every)
    assert found.similarities.mean == pytest.approx(sum(every) / len(every))
    assert found.hardest == pytest.approx(sum(map(max, rows)) / len(rows))
    assert found.count == pytest.approx(len(every) / len(rows))
    variances = [torch.tensor(row, dtype=torch.float64).var(correction=0).item() for row in rows]
    assert found.spread == pytest.approx(math.sqrt(sum(variances) / len(variances)), abs=1e-6)
    strengths = [0.0, 7.0]
    expected = [
        sum(float(torch.tensor(row).mul(strength).softmax(0).max()) for row in rows) / len(rows)
        for strength in strengths
    ]
    assert hardest_weight(TEXT, GROUPS, IDS, strengths) == pytest.approx(expected)


def test_buckets_count_the_margins_of_the_loss_itself() -> None:
    """L_HN's own γ·Ḡ, with γ 1, of the pairs that are negatives."""
    part = GROUPS[0].rows
    pairs = check_pairs(IMAGE[part], TEXT[part], 1.0, ids=IDS[part])
    negative = pairs.negatives(TEXT.device)
    values = negative_margins(pairs, 1.0)[negative]
    edges = (-0.3, 0.2, 0.5)
    found = buckets(batch_negatives(TEXT, GROUPS[:1], IDS).similarities, edges)
    expected = [((values >= a) & (values < b)).double().mean().item() for a, b in pairwise([-2, *edges, 2])]
    assert found.shares == pytest.approx(expected)
    assert torch.allclose(batch_similarity(TEXT, part.tolist())[negative], values)
    every = caption_geometry(vectors(300), torch.arange(300)).pairwise
    assert buckets(every, quantile_edges(every)).shares == pytest.approx((0.5, 0.4, 0.09, 0.01), abs=0.001)


def test_losses_are_those_of_training() -> None:
    found = batch_losses(IMAGE, TEXT, IDS, GROUPS, scale=30.0, gamma=0.7)
    assert found.evaluations == 2  # the two pairs of the last group have the same caption
    for loss, quartiles in (
        (clip_loss, found.infonce_quartiles),
        (partial(hard_negative_loss, gamma=0.7), found.hn_quartiles),
    ):
        values = [loss(IMAGE[rows], TEXT[rows], 30.0, ids=IDS[rows], rows=own).item() for rows, own in GROUPS[:2]]
        assert quartiles == pytest.approx(np.quantile(values, (0.25, 0.5, 0.75)).tolist(), abs=1e-5)
    assert found.negatives == batch_negatives(TEXT, GROUPS[:2], IDS).count
    assert batch_losses(TEXT, TEXT, IDS, GROUPS, scale=1000.0, gamma=0.5).infonce_saturated == 1
    with pytest.raises(ValueError, match="no negatives"):
        batch_losses(IMAGE, TEXT, IDS, scale=1.0, gamma=0.5, groups=GROUPS[2:])


@pytest.fixture(scope="module")
def pairs() -> PairData:
    model = load()
    records = scene_records("park", "train", families=35)
    return prepare(records, model.text_transform, model.image_transform, image_views=())


def test_an_epoch_has_the_batches_of_a_run(pairs: PairData) -> None:
    config = replace(tiny(), seed=7)
    epoch = first_epoch(pairs, config)
    drawn, batches = RunData(pairs, validation=None).batches(config, 0)  # type: ignore[arg-type]
    assert epoch.batches == batches
    assert torch.equal(epoch.ids, drawn.ids)
    assert torch.equal(epoch.chosen, drawn.chosen)
    micro = epoch.groups("micro")
    assert [row for group in micro for row in group.rows.tolist()] == [row for rows in batches for row in rows]
    assert max(group.queries for group in micro) == config.optim.micro_batch
    assert [group.rows.tolist() for group in epoch.groups("batch")] == batches
    text = vectors(-(-len(pairs) // 4), 3).repeat_interleave(4, dim=0)[: len(pairs)]
    clustered = clustered_epoch(epoch, text, seed=0)
    assert sorted(row for rows in clustered.batches for row in rows) == list(range(len(pairs)))
    hardest = [batch_negatives(text, one.groups("batch"), epoch.ids).hardest for one in (epoch, clustered)]
    assert hardest[0] < hardest[1]
