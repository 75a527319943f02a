"""Queries and runs resampled at once: against the bootstrap of queries alone, closed forms, and a slow twin."""

from __future__ import annotations

import pytest
import torch

from hnclip.evaluate import bootstrap_interval
from hnclip.evaluate.bootstrap import _drawn_runs, crossed_bootstrap


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_equal_runs_leave_the_bootstrap_of_queries(runs):
    values, groups = normal(60), torch.arange(60) // 4
    found = crossed_bootstrap([values[:, None].expand(60, runs)], [groups], resamples=300, seed=3)
    low, high = bootstrap_interval(values, groups=groups, resamples=300, seed=3)
    assert len(found) == 2
    for estimate in found:  # of one part, the mean of the parts is the part
        assert estimate == pytest.approx((float(values.mean()), low, high), abs=1e-12)


@pytest.mark.parametrize("runs", [2, 3, 8])
def test_equal_queries_leave_the_spread_of_runs(runs):
    """The variance of a resample is s²/S; with so few runs the interval ends at single ones."""
    run = normal(runs, seed=runs)
    shares = _drawn_runs(runs, 20_000, 0)
    assert shares.sum(1).tolist() == pytest.approx([1.0] * 20_000)
    assert float((shares @ run).var()) == pytest.approx(float(run.var(correction=1)) / runs, rel=0.05)
    (found, _) = crossed_bootstrap([run.expand(30, runs)], [torch.arange(30)])
    assert found.mean == pytest.approx(float(run.mean()))
    if runs <= 3:
        assert (found.low, found.high) == pytest.approx((float(run.min()), float(run.max())))
    else:
        deviation = (float(run.var()) / runs) ** 0.5
        assert found.high - found.low == pytest.approx(2 * 1.96 * deviation, rel=0.15)


def test_queries_and_runs_add_their_variances():
    query, run = normal(400, seed=1), 0.1 * normal(12, seed=2)
    (found, _) = crossed_bootstrap([query[:, None] + run], [torch.arange(400)], resamples=4000)
    deviation = (float(query.var()) / 400 + float(run.var()) / 12) ** 0.5
    assert found.high - found.low == pytest.approx(2 * 1.96 * deviation, rel=0.06)


def test_parts_share_what_is_drawn():
    """The slow twin: put the drawn groups and runs together, average each part, then the parts."""
    values = [normal(23, 3, seed=4), normal(10, 3, seed=5)]
    groups = [torch.arange(23) % 5, torch.arange(10) % 5]
    drawn = torch.randint(5, (40, 5), generator=torch.Generator().manual_seed(6))
    shares = _drawn_runs(3, 40, 6)
    means = []
    for row, share in zip(drawn, shares):
        picked = [torch.cat([part[labels == group] for group in row]) for part, labels in zip(values, groups)]
        means.append([float((part @ share).mean()) for part in picked])
    twin = torch.tensor(means, dtype=torch.float64)  # [40, 2]
    tails = torch.tensor([0.025, 0.975], dtype=torch.float64)
    found = crossed_bootstrap(values, groups, resamples=40, seed=6)
    for estimate, column in zip(found, [*twin.unbind(1), twin.mean(1)], strict=True):
        assert estimate[1:] == pytest.approx(column.quantile(tails).tolist())
    single = [float(part.mean()) for part in values]
    assert [estimate.mean for estimate in found] == pytest.approx([*single, sum(single) / 2])


def test_labels_do_not_matter_and_the_global_generator_is_left_alone():
    values = [normal(30, 3, seed=7), normal(12, 3, seed=8)]
    groups = [torch.arange(30) % 6, torch.arange(12) % 6]
    names = torch.tensor([40, -3, 7, 0, 12, 5])
    state = torch.get_rng_state()
    first = crossed_bootstrap(values, groups, seed=1)
    assert crossed_bootstrap(values, [names[labels] for labels in groups], seed=1) == first
    assert crossed_bootstrap(values, groups, seed=2) != first
    assert torch.equal(torch.get_rng_state(), state)


def test_hits_of_any_dtype():
    hits = normal(20, 2, seed=9) > 0
    groups = [torch.arange(20)]
    expected = crossed_bootstrap([hits.double()], groups)
    for dtype in (torch.float32, torch.int64, torch.bool):
        assert crossed_bootstrap([hits.to(dtype)], groups) == expected


@pytest.mark.parametrize(
    ("message", "values", "groups"),
    [
        ("values and groups must have the same parts", [], []),
        ("values and groups must have the same parts", [torch.zeros(4, 2)], []),
        (r"values must be \[n, S\]", [torch.zeros(4)], [torch.arange(4)]),
        (r"values must be \[n, S\]", [torch.zeros(4, 0)], [torch.arange(4)]),
        (r"values must be \[n, S\]", [torch.zeros(4, 2), torch.zeros(4, 3)], [torch.arange(4)] * 2),
        ("values must be finite", [torch.full((4, 2), torch.nan)], [torch.arange(4)]),
        (r"groups must be \[4\]", [torch.zeros(4, 2)], [torch.arange(3)]),
        ("groups must hold at least two", [torch.zeros(4, 2)], [torch.zeros(4)]),
        ("groups must have queries in every part", [torch.zeros(2, 1)] * 2, [torch.arange(2), torch.arange(1, 3)]),
    ],
)
def test_errors_say_what_is_wrong(message, values, groups):
    with pytest.raises(ValueError, match=message):
        crossed_bootstrap(values, groups)
