"""Several numbers per query from one set of resamples: each as if it were alone."""

from __future__ import annotations

import pytest
import torch

from hnclip.evaluate import Ranks, bootstrap_interval, bootstrap_intervals, summarize
from hnclip.evaluate.bootstrap import _group_sums, _resampled_means


def gathered_means(values: torch.Tensor, groups: torch.Tensor, *, resamples: int, seed: int) -> list[float]:
    """The slow twin: draw groups, put their values together, take the mean."""
    members = [values[groups == label] for label in groups.unique()]  # labels are in the order of first appearance here
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(members), (resamples, len(members)), generator=generator)
    return [float(torch.cat([members[g] for g in row]).mean()) for row in drawn]


def test_means_are_those_of_the_drawn_values():
    values = torch.randn(23, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(23) // 4
    means = _resampled_means(*_group_sums(values, groups), resamples=50, seed=3)
    assert means.tolist() == pytest.approx(gathered_means(values, groups, resamples=50, seed=3))


@pytest.mark.parametrize("groups", [None, torch.arange(90) // 4])
def test_every_column_is_as_if_alone(groups):
    values = torch.randn(90, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together = bootstrap_intervals(values, groups=groups, resamples=200, seed=2)
    alone = [bootstrap_interval(column, groups=groups, resamples=200, seed=2) for column in values.T]
    assert len(together) == 3
    for one, other in zip(together, alone):
        assert one == pytest.approx(other, abs=1e-12)


def test_hits_are_bit_identical_whatever_stands_beside_them():
    """Sums of hits are whole numbers, so quoted intervals do not depend on how many K are asked for."""
    ranks = torch.randint(1, 60, (300,), generator=torch.Generator().manual_seed(3))
    found = summarize(Ranks(ranks, ranks, torch.arange(300)), intervals=True).text_to_image.intervals
    for k, interval in found.items():
        assert interval == bootstrap_interval(100.0 * (ranks <= k))


@pytest.mark.parametrize(
    "values", [torch.zeros(3), torch.zeros(0, 2), torch.zeros(3, 0), torch.full((3, 2), torch.nan)]
)
def test_errors_name_the_argument(values):
    with pytest.raises(ValueError, match=r"^values "):
        bootstrap_intervals(values)
