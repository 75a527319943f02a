"""The bootstrap against known distributions, closed forms and its own symmetries."""

from __future__ import annotations

import pytest
import torch

from hnclip.evaluate import bootstrap, bootstrap_interval, paired_bootstrap


def bernoulli(count: int, share: float, seed: int) -> torch.Tensor:
    return (torch.rand(count, generator=torch.Generator().manual_seed(seed)) < share).double()


def width(interval: bootstrap.Interval) -> float:
    return interval.high - interval.low


def test_interval_covers_the_true_mean_as_often_as_it_says():
    covered = 0
    for trial in range(400):
        low, high = bootstrap_interval(bernoulli(150, 0.3, trial), level=0.9, resamples=300, seed=trial)
        covered += low <= 0.3 <= high
    assert 0.86 <= covered / 400 <= 0.94


def test_interval_has_the_width_of_the_normal_approximation():
    values = bernoulli(2000, 0.4, 1)
    deviation = float(values.std(correction=0)) / 2000**0.5
    low, high = bootstrap_interval(values, resamples=4000)
    assert low == pytest.approx(float(values.mean()) - 1.96 * deviation, abs=0.1 * deviation)
    assert high == pytest.approx(float(values.mean()) + 1.96 * deviation, abs=0.1 * deviation)


def test_a_higher_level_is_wider():
    values = bernoulli(200, 0.5, 2)
    assert width(bootstrap_interval(values, level=0.99)) > 1.2 * width(bootstrap_interval(values, level=0.9))


@pytest.mark.parametrize("groups", [None, torch.tensor([0, 0, 1, 1, 1, 2, 3])])
def test_equal_values_have_no_width(groups):
    assert bootstrap_interval(torch.full((7,), 3.0), groups=groups) == (3.0, 3.0)


def test_groups_of_one_are_no_groups_whatever_their_labels():
    values = torch.randn(50, generator=torch.Generator().manual_seed(3))
    labels = torch.randperm(50, generator=torch.Generator().manual_seed(4)) * 7 - 100
    assert bootstrap_interval(values, groups=labels) == bootstrap_interval(values)


def test_only_the_partition_matters():
    values = torch.randn(40, generator=torch.Generator().manual_seed(5))
    groups = torch.arange(40) % 13
    names = torch.randperm(13, generator=torch.Generator().manual_seed(6))
    assert bootstrap_interval(values, groups=names[groups]) == bootstrap_interval(values, groups=groups)
    assert bootstrap_interval(values, groups=groups) != bootstrap_interval(values)


def test_correlated_groups_widen_by_the_root_of_their_size():
    values = bernoulli(400, 0.5, 7).repeat_interleave(9)
    groups = torch.arange(400).repeat_interleave(9)
    ratio = width(bootstrap_interval(values, groups=groups)) / width(bootstrap_interval(values))
    assert ratio == pytest.approx(3, rel=0.1)


def test_mean_of_a_resample_is_a_ratio_of_sums():
    """Group A: one value 0; group B: three values 1. A resample is AA, AB or BB: 0, 3/4 or 1, never 1/2."""
    values, groups = torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 1, 1, 1])
    sums, sizes = bootstrap._group_sums(values.double(), groups)
    means = bootstrap._resampled_means(sums, sizes, resamples=200, seed=0)
    assert sorted(set(means.tolist())) == [0.0, 0.75, 1.0]


def test_memory_is_bounded_by_blocks_that_use_every_resample(monkeypatch):
    shapes = []
    draw = torch.randint
    monkeypatch.setattr(bootstrap, "_DRAWS_AT_ONCE", 1000)
    monkeypatch.setattr(torch, "randint", lambda high, size, **kw: shapes.append(size) or draw(high, size, **kw))
    bootstrap_interval(bernoulli(300, 0.5, 8), resamples=10)
    assert shapes == [(3, 300), (3, 300), (3, 300), (1, 300)]


@pytest.mark.parametrize("call", [bootstrap_interval, lambda v, **kw: paired_bootstrap(v, 1 - v, **kw)])
def test_seed_decides_and_the_global_generator_is_left_alone(call):
    values = torch.randn(60, generator=torch.Generator().manual_seed(9))
    state = torch.get_rng_state()
    first = call(values, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1234)
    assert call(values, seed=5) == first
    assert call(values, seed=6) != first


def test_paired_difference_has_the_sign_of_the_better_model():
    better, worse = bernoulli(500, 0.7, 10), bernoulli(500, 0.5, 11)
    mean, low, high, p_value = paired_bootstrap(better, worse)
    assert mean == pytest.approx(float((better - worse).mean()))
    assert 0 < low < mean < high
    assert p_value == pytest.approx(2 / 2001)


def test_paired_difference_is_antisymmetric():
    a, b = bernoulli(80, 0.55, 12), bernoulli(80, 0.5, 13)
    groups = torch.arange(80) // 2
    forward, backward = paired_bootstrap(a, b, groups=groups), paired_bootstrap(b, a, groups=groups)
    assert 0.01 < forward.p_value == backward.p_value < 1
    assert backward[:3] == pytest.approx((-forward.mean, -forward.high, -forward.low))


def test_paired_interval_is_the_interval_of_the_difference():
    a, b = torch.randn(2, 70, generator=torch.Generator().manual_seed(14), dtype=torch.float64)
    groups = torch.arange(70) // 5
    assert paired_bootstrap(a, b, groups=groups)[1:3] == bootstrap_interval(a - b, groups=groups)


def test_models_that_agree_have_no_difference():
    hits = bernoulli(30, 0.5, 15)
    assert paired_bootstrap(hits, hits) == (0.0, 0.0, 0.0, 1.0)


def test_pairing_removes_what_the_queries_share():
    """Both models fail on the same hard queries; only the ten that differ make the interval."""
    b = bernoulli(1000, 0.5, 16)
    a = b.clone()
    a[(b == 0).nonzero()[:10, 0]] = 1
    assert paired_bootstrap(a, b).low > 0
    assert bootstrap_interval(a).low < bootstrap_interval(b).high


def test_p_value_is_uniform_without_a_difference():
    small = 0
    for trial in range(300):
        a, b = bernoulli(100, 0.5, 2 * trial), bernoulli(100, 0.5, 2 * trial + 1)
        small += paired_bootstrap(a, b, resamples=300, seed=trial).p_value < 0.2
    assert 0.12 <= small / 300 <= 0.28


@pytest.mark.parametrize(
    ("argument", "values", "options"),
    [
        ("values", torch.tensor([]), {}),
        ("values", torch.zeros(2, 2), {}),
        ("values", torch.zeros(1), {}),
        ("values", torch.tensor([0.0, float("nan")]), {}),
        ("groups", torch.zeros(4), {"groups": torch.arange(3)}),
        ("groups", torch.zeros(4), {"groups": torch.zeros(4)}),
        ("level", torch.zeros(4), {"level": 1.0}),
        ("level", torch.zeros(4), {"level": 95}),
        ("resamples", torch.zeros(4), {"resamples": 0}),
    ],
)
def test_errors_name_the_argument(argument, values, options):
    with pytest.raises(ValueError, match=rf"^{argument} "):
        bootstrap_interval(values, **options)


@pytest.mark.parametrize(
    ("argument", "a", "b"), [("a", torch.zeros(0), torch.zeros(3)), ("b", torch.zeros(4), torch.zeros(3))]
)
def test_paired_errors_name_the_argument(argument, a, b):
    with pytest.raises(ValueError, match=rf"^{argument} "):
        paired_bootstrap(a, b)
