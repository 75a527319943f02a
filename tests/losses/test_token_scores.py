from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hnclip.losses import token_scores
from hnclip.losses.token_scores import (
    Layout,
    best_of_columns,
    best_of_rows,
    best_row,
    groups,
    packed_layout,
    padded_layout,
    sum_by_choice,
    sum_rows,
)

MASK = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]]) > 0


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), most=st.integers(1, 30), cut=st.integers(0, 11),
    rows=st.integers(1, 12),
)  # fmt: skip
def test_groups_hold_every_pair_once_and_keep_queries_apart(lengths, most, cut, rows):
    offset = min(cut, len(lengths) - 1)
    rows = min(rows, len(lengths) - offset)
    found = groups(lengths, most, offset, rows)
    assert [i for group in found for i in range(len(lengths))[group.pairs]] == list(range(len(lengths)))
    assert [i for group in found for i in range(sum(lengths))[group.tokens]] == list(range(sum(lengths)))
    for group in found:
        inside = [offset <= i < offset + rows for i in range(len(lengths))[group.pairs]]
        assert inside == [group.queries] * len(inside)
        own = lengths[group.pairs]
        assert group.tokens.stop - group.tokens.start == sum(own)
        assert sum(own) <= most or len(own) == 1


def test_groups_are_no_smaller_than_they_must_be():
    assert [group.pairs for group in groups([3, 3, 3, 3, 3], 6, 0, 5)] == [slice(0, 2), slice(2, 4), slice(4, 5)]


@pytest.mark.parametrize("run", [4, 16])
@pytest.mark.parametrize("count", [1, 7, 8, 31, 32, 33, 47, 48, 65])
def test_best_row_is_the_first_maximum(monkeypatch, count, run):
    monkeypatch.setattr(token_scores, "RUN", run)
    block = torch.randint(0, 6, (count, 200), generator=torch.Generator().manual_seed(count)).float()  # many ties
    values, positions = best_row(block)
    assert torch.equal(values, block.max(0).values)
    assert torch.equal(positions, (block == values).int().argmax(0))
    for position in range(count):
        alone = torch.zeros(count, 3)
        alone[position] = 1
        assert best_row(alone)[1].tolist() == [position] * 3


def test_best_row_keeps_nan():
    block = torch.zeros(50, 2)
    block[37, 1] = torch.nan
    values, positions = best_row(block)
    assert values[1].isnan()
    assert positions.tolist() == [0, 37]


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [3, 40, 1, 6]], ids=str)
def test_blocks(lengths):
    tile = torch.randint(0, 9, (sum(lengths), 11), generator=torch.Generator().manual_seed(0)).float()
    expected = [block.max(0) for block in tile.split(lengths)]
    values, positions = best_of_rows(tile, lengths)
    assert torch.equal(values, torch.stack([e.values for e in expected]))
    assert torch.equal(positions, torch.stack([e.indices for e in expected]))
    values, positions = best_of_columns(tile.T, lengths)
    assert torch.equal(values, torch.stack([e.values for e in expected], 1))
    assert torch.equal(positions, torch.stack([e.indices for e in expected], 1))
    assert torch.equal(sum_rows(tile, lengths), torch.stack([block.sum(0) for block in tile.split(lengths)]))


def test_sum_by_choice_adds_the_vectors_that_chose_a_token():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    chosen = torch.randint(0, 4, (9, 5), generator=generator) * 2  # odd tokens, and the last, are chosen by nobody
    weights = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    expected = torch.zeros(9, 3, dtype=torch.float64)
    for voter in range(9):
        for column in range(5):
            expected[chosen[voter, column]] += weights[voter, column] * vectors[voter]
    torch.testing.assert_close(sum_by_choice(vectors, chosen, weights, 9), expected)


def test_packed_tokens_are_those_that_count():
    layout = packed_layout(MASK, torch.float64)
    assert layout.lengths == [2, 4, 1]
    assert layout.rows.tolist() == [1, 2, 4, 5, 6, 7, 11]
    assert layout.starts.tolist() == [0, 2, 6]
    assert layout.owners.tolist() == [0, 0, 1, 1, 1, 1, 2]
    assert layout.weights.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 1]


def test_padded_tokens_are_copies_of_the_first():
    layout = padded_layout(MASK, torch.float64)
    assert layout.lengths == [4, 4, 4]
    assert layout.rows.tolist() == [1, 1, 2, 1, 4, 5, 6, 7, 11, 11, 11, 11]
    assert layout.starts.tolist() == [0, 4, 8]
    assert layout.weights.tolist() == [0, 0.5, 0.5, 0, 0.25, 0.25, 0.25, 0.25, 0, 0, 0, 1]
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]])
    assert layout.originals(slice(0, 3), positions).tolist() == [[1, 1, 2, 1], [0, 1, 2, 3], [3, 3, 3, 3]]
    assert layout.originals(slice(2, 3), positions[:1]).tolist() == [[3, 3, 3, 3]]


def test_a_table_without_pads_is_not_copied():
    table = torch.randn(12, 2)
    layout = packed_layout(torch.ones(3, 4, dtype=torch.bool), torch.float32)
    assert layout.rows is None
    assert layout.read(table, slice(4, 8), torch.float32).data_ptr() == table[4].data_ptr()
    assert layout.read(table, slice(4, 8), torch.float64).dtype == torch.float64


@pytest.mark.parametrize("make", [packed_layout, padded_layout])
def test_a_pair_without_tokens_weighs_nan(make):
    mask = MASK.clone()
    mask[1] = False
    layout = make(mask, torch.float32)
    assert layout.weights[layout.owners == 1].isnan().all()
    assert not layout.weights[layout.owners != 1].isnan().any()


@pytest.mark.parametrize(("longest", "dtype"), [(2**15, torch.int16), (2**15 + 1, torch.int32)])
def test_positions_are_as_small_as_they_can_be(longest, dtype):
    empty = torch.empty(0)
    others = Layout([3, longest], None, False, empty, empty, empty)
    found = token_scores._positions([4, 5], others, empty)
    assert found.dtype == dtype
    assert found.shape == (9, 2)
