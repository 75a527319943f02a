from __future__ import annotations

import pytest
import torch

from hnclip.models.long_context import stretch_positions, stretched_length


@pytest.fixture
def table():
    return torch.randn(77, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def twin(P, keep=20, ratio=4):
    """The definition, position by position."""
    last = len(P) - 1
    rows = [P[p] for p in range(keep)]
    for i in range(last - keep):
        rows += [((ratio - r) / ratio) * P[keep + i] + (r / ratio) * P[keep + i + 1] for r in range(ratio)]
    rows += [P[last] + (r / ratio) * (P[last] - P[last - 1]) for r in range(ratio)]
    return torch.stack(rows)


def test_equals_the_definition(table):
    stretched = stretch_positions(table)
    assert stretched.shape == (248, 5)
    torch.testing.assert_close(stretched, twin(table), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("length", "keep", "ratio"), [(77, 0, 4), (77, 75, 4), (32, 8, 2), (9, 3, 3), (9, 3, 1)])
def test_equals_the_definition_with_other_numbers(length, keep, ratio):
    table = torch.randn(length, 3, dtype=torch.float64)
    stretched = stretch_positions(table, keep=keep, ratio=ratio)
    assert len(stretched) == stretched_length(length, keep=keep, ratio=ratio)
    torch.testing.assert_close(stretched, twin(table, keep, ratio), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_twenty_rows_stay_bit_for_bit(table, dtype):
    table = table.to(dtype)
    stretched = stretch_positions(table)
    assert stretched.dtype == dtype
    assert torch.equal(stretched[:20], table[:20])


def test_examples_of_the_definition(table):
    P, Q = table, stretch_positions(table)
    torch.testing.assert_close(Q[20], P[20])
    torch.testing.assert_close(Q[21], 0.75 * P[20] + 0.25 * P[21])
    torch.testing.assert_close(Q[24], P[21])
    torch.testing.assert_close(Q[243], 0.25 * P[75] + 0.75 * P[76])
    torch.testing.assert_close(Q[244], P[76])


def test_the_last_three_rows_continue_the_last_step(table):
    step = (table[76] - table[75]) / 4
    torch.testing.assert_close(stretch_positions(table)[244:].diff(dim=0), step.expand(3, 5))


def test_a_straight_line_stays_straight():
    line = torch.arange(77.0, dtype=torch.float64)[:, None]
    expected = torch.cat([torch.arange(20.0), 20 + torch.arange(228.0) / 4]).double()
    torch.testing.assert_close(stretch_positions(line)[:, 0], expected)


def test_a_stretched_table_is_refused(table):
    with pytest.raises(ValueError, match="table has 248 positions"):
        stretch_positions(stretch_positions(table))


def test_a_long_table_can_be_declared_unstretched():
    assert stretch_positions(torch.zeros(100, 2), trained=100).shape == (340, 2)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((77,), {}, r"got shape \(77,\)"),
        ((1, 77, 5), {}, r"got shape \(1, 77, 5\)"),
        ((77, 5), {"keep": -1}, "keep must be between 0 and 75 .* got -1"),
        ((77, 5), {"keep": 76}, "keep must be between 0 and 75 .* got 76"),
        ((77, 5), {"ratio": 0}, "ratio must be at least 1, got 0"),
        ((16, 5), {}, "keep must be between 0 and 14 .* got 20"),
    ],
)
def test_bad_arguments_are_named(shape, options, message):
    with pytest.raises(ValueError, match=message):
        stretch_positions(torch.zeros(shape), **options)
