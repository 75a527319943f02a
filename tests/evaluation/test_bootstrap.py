"""The bootstrap against known distributions, closed forms, slow twins and its own symmetries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hnclip.evaluation import Ranks
from hnclip.evaluation.bootstrap import Estimate, bootstrap_intervals, crossed_bootstrap, mark_best, paired_difference


def interval(values: Tensor, **options: object) -> Estimate:
    return bootstrap_intervals(values[:, None], **options)[0]  # type: ignore[arg-type]


def bernoulli(count: int, share: float, seed: int) -> Tensor:
    return (torch.rand(count, generator=torch.Generator().manual_seed(seed)) < share).double()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_intervals_cover_the_true_mean_and_p_values_are_uniform():
    trials, covered, small = 300, 0, 0
    for trial in range(trials):
        found = interval(bernoulli(150, 0.3, trial), level=0.9, resamples=300, seed=trial)
        covered += found.low <= 0.3 <= found.high
        difference = bernoulli(100, 0.5, 2 * trial) - bernoulli(100, 0.5, 2 * trial + 1)
        small += interval(difference, resamples=300, seed=trial).p_value < 0.2
    assert 0.86 <= covered / trials <= 0.94
    assert 0.12 <= small / trials <= 0.28


def test_means_are_those_of_the_drawn_values():
    """The slow twin: draw groups, put their values together, take the mean; every column as if it were alone."""
    values, groups = normal(23, 2), torch.arange(23) // 4
    members = [values[groups == label] for label in groups.unique()]
    drawn = torch.randint(len(members), (50, len(members)), generator=torch.Generator().manual_seed(3))
    means = torch.stack([torch.cat([members[g] for g in row]).mean(0) for row in drawn])  # [50, 2]
    tails = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)  # [2, 2]
    found = bootstrap_intervals(values, groups=groups, resamples=50, seed=3)
    assert [estimate[1:3] for estimate in found] == [pytest.approx(column) for column in tails.T.tolist()]


def test_pairing_removes_what_the_queries_share():
    """Both models fail on the same hard queries; only the ten that differ make the interval."""
    b = bernoulli(1000, 0.5, 16)
    a = b.clone()
    a[(b == 0).nonzero()[:10, 0]] = 1
    found = interval(a - b)
    assert found.clear
    assert found.p_value == pytest.approx(2 / 2001)
    assert interval(a).low < interval(b).high
    assert interval(a - a) == (0.0, 0.0, 0.0, 1.0)


def test_parts_share_what_is_drawn():
    """The slow twin: put the drawn groups and runs together, average each part, then the parts."""
    values = [normal(23, 3, seed=4), normal(10, 3, seed=5)]
    groups = [torch.arange(23) % 5, torch.arange(10) % 5]
    drawn = torch.randint(5, (40, 5), generator=torch.Generator().manual_seed(6))
    runs = torch.randint(3, (40, 2), generator=torch.Generator().manual_seed((1 << 60) + 6))
    twin = torch.tensor(
        [
            [
                float(torch.cat([part[labels == group] for group in row])[:, chosen].mean())
                for part, labels in zip(values, groups)
            ]
            for row, chosen in zip(drawn, runs)
        ],
        dtype=torch.float64,
    )  # [40, 2]
    tails = torch.tensor([0.025, 0.975], dtype=torch.float64)
    found = crossed_bootstrap(values, groups, resamples=40, seed=6)
    for estimate, column in zip(found, [*twin.unbind(1), twin.mean(1)], strict=True):
        assert estimate[1:3] == pytest.approx(column.quantile(tails).tolist())
    single = [float(part.mean()) for part in values]
    assert [estimate.mean for estimate in found] == pytest.approx([*single, sum(single) / 2])


OWNER = torch.arange(40).repeat_interleave(2)


def ranks(seed: int) -> Ranks:
    generator = torch.Generator().manual_seed(seed)
    return Ranks(*(torch.randint(1, 4, (count,), generator=generator) for count in (80, 40)), OWNER)


@pytest.mark.parametrize("seeds", [1, 3])
def test_paired_difference_of_one_or_more_runs(seeds):
    a, b = ([ranks(start + seed) for seed in range(seeds)] for start in (0, 10))
    groups = torch.arange(40) // 3
    found = paired_difference(a, b, 2, groups=groups)
    for direction, labels in (("text_to_image", groups[OWNER]), ("image_to_text", groups)):
        hits = [torch.stack([getattr(run, direction) <= 2 for run in side], 1) for side in (a, b)]  # [n, S]
        expected = crossed_bootstrap([100 * (hits[0].double() - hits[1].double())], [labels])[0]
        assert found[direction] == pytest.approx(expected)
    assert found["mean"].mean == pytest.approx((found["text_to_image"].mean + found["image_to_text"].mean) / 2)
    for one, back in zip(found.values(), paired_difference(b, a, 2, groups=groups).values()):
        assert back == pytest.approx((-one.mean, -one.high, -one.low, one.p_value))


@pytest.mark.parametrize(
    ("above", "marks"),
    [
        ({"ab", "ac", "bc"}, {"a": "best", "b": "second"}),
        ({"ab", "ac"}, {"a": "best"}),
        ({"ab", "bc"}, {}),  # the best must be clear of every other and not only of the next
    ],
)
def test_a_mark_claims_no_difference_that_the_pairs_do_not_support(above, marks):
    assert mark_best({"c": 1.0, "a": 3.0, "b": 2.0}, lambda row, other: row + other in above) == marks


@pytest.mark.parametrize(
    ("argument", "values", "options"),
    [
        ("values", torch.tensor([[0.0], [torch.nan]]), {}),
        ("groups", torch.zeros(4, 1), {"groups": torch.arange(3)}),
    ],
)
def test_errors_name_the_argument(argument, values, options):
    with pytest.raises(ValueError, match=rf"^{argument} "):
        bootstrap_intervals(values, **options)
    moved = Ranks(ranks(1).text_to_image, ranks(1).image_to_text, OWNER.flip(0))
    with pytest.raises(ValueError, match="same gallery"):
        paired_difference([ranks(1)], [moved], 1)
