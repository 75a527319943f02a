"""Terms of the pairs that have a view: means and contrastive losses, whole and in uneven shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_twins import assert_equal, make_pairs, value_and_grads

from hnclip.losses import GLOBAL_LOSSES, clip_loss, hard_negative_loss
from hnclip.losses.consistency import cosine_gap, squared_gap
from hnclip.losses.present import loss_of_present, mean_of_present, present_in_all

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 0], [4, 4], [5, 5]])
PRESENT = [
    [1, 0, 1, 1, 0, 1, 1],
    [0, 0, 0, 1, 1, 0, 1],
    [1, 1, 0, 0, 0, 0, 0],
    [0, 0, 1, 0, 0, 0, 1],
    [1, 1, 1, 1, 1, 1, 1],
]
SHARDS = [[3, 4], [1, 2, 4], [5, 1, 1], [1] * 7, [7]]


def over_processes(term, shards):
    """The mean over processes of (W·R/N) times the term of each."""

    def total(*leaves):
        start, n, found = 0, sum(shards), []
        for rows in shards:
            found.append(len(shards) * rows / n * term(*leaves, offset=start, rows=rows))
            start += rows
        return torch.stack(found).mean()

    return total


def bools(values):
    return torch.tensor(values, dtype=torch.bool)


def test_present_in_all():
    a, b = bools([1, 1, 0]), bools([1, 0, 0])
    assert present_in_all(None, None) is None
    assert torch.equal(present_in_all(a, None), a)
    assert torch.equal(present_in_all(None, a, b), b)
    assert torch.equal(present_in_all(a, bools([0, 1, 1])), bools([0, 1, 0]))


@pytest.mark.parametrize("present", PRESENT)
def test_a_mean_of_present_is_the_mean_over_them(present):
    values = torch.randn(7, dtype=torch.float64, requires_grad=True)
    expected = value_and_grads(lambda v: v[bools(present)].mean(), [values])
    assert_equal(value_and_grads(lambda v: mean_of_present(v, bools(present)), [values]), expected)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("present", [None, *PRESENT])
def test_shards_of_a_mean_average_to_the_whole(present, shards):
    mask = None if present is None else bools(present)
    values = torch.randn(7, dtype=torch.float64, requires_grad=True)

    def term(v, offset=0, rows=None):
        own = v if rows is None else v[offset : offset + rows]
        return mean_of_present(own, mask, offset, rows)

    assert_equal(value_and_grads(over_processes(term, shards), [values]), value_and_grads(term, [values]))


def test_absent_rows_are_not_read():
    values = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    mean = mean_of_present(values, bools([1, 0, 1]))
    mean.backward()
    assert mean == 2
    assert values.grad.tolist() == [0.5, 0, 0.5]


@pytest.mark.parametrize("rows", [None, 2])
def test_nobody_present_is_zero_with_zero_gradients(rows):
    image, text, scale = make_pairs(7, 5)
    nobody = torch.zeros(7, dtype=torch.bool)
    for got in (
        value_and_grads(lambda i, t, s: loss_of_present(clip_loss, i, t, s, nobody, rows=rows), [image, text, scale]),
        value_and_grads(lambda i: mean_of_present(i[:rows, 0], nobody, rows=rows), [image]),
    ):
        for tensor in got:
            assert torch.equal(tensor, torch.zeros_like(tensor))


def test_one_present_has_nothing_to_learn_from():
    leaves = make_pairs(7, 5)
    one = bools([0, 0, 1, 0, 0, 0, 0])
    for tensor in value_and_grads(lambda *x: loss_of_present(clip_loss, *x, one), leaves):
        assert torch.equal(tensor, torch.zeros_like(tensor))


def test_a_process_without_a_present_row_adds_nothing():
    leaves = make_pairs(7, 5)
    present = bools([1, 1, 1, 0, 0, 1, 1])
    for tensor in value_and_grads(lambda *x: loss_of_present(clip_loss, *x, present, offset=3, rows=2), leaves):
        assert torch.equal(tensor, torch.zeros_like(tensor))


@pytest.mark.parametrize("ids", [None, IDS], ids=["no ids", "ids"])
@pytest.mark.parametrize("present", PRESENT)
def test_the_loss_of_present_is_that_of_a_batch_of_them(present, ids):
    leaves, mask = make_pairs(7, 5), bools(present)

    def subset(image, text, scale):
        return hard_negative_loss(image[mask], text[mask], scale, ids=None if ids is None else ids[mask])

    got = value_and_grads(lambda *x: loss_of_present(hard_negative_loss, *x, mask, ids=ids), leaves)
    assert_equal(got, value_and_grads(subset, leaves))


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("present", [None, *PRESENT])
@pytest.mark.parametrize("ids", [None, IDS], ids=["no ids", "ids"])
def test_shards_of_a_loss_average_to_the_whole(present, ids, shards):
    leaves, mask = make_pairs(7, 5), None if present is None else bools(present)

    def term(*x, **shard):
        return loss_of_present(clip_loss, *x, mask, ids=ids, **shard)

    assert_equal(value_and_grads(over_processes(term, shards), leaves), value_and_grads(term, leaves))


@given(st.lists(st.booleans(), min_size=7, max_size=7), st.sampled_from(SHARDS), st.sampled_from(sorted(GLOBAL_LOSSES)))
def test_any_loss_and_any_absence_shard(present, shards, name):
    leaves, mask = make_pairs(7, 5), bools(present)

    def term(*x, **shard):
        return loss_of_present(GLOBAL_LOSSES[name], *x, mask, check_values=False, **shard)

    assert_equal(value_and_grads(over_processes(term, shards), leaves), value_and_grads(term, leaves), 1e-10)


def test_everybody_present_changes_no_bit():
    leaves = make_pairs(7, 5, dtype=torch.float32)
    for shard in ({}, {"offset": 2, "rows": 3}):
        got = value_and_grads(lambda *x, s=shard: loss_of_present(clip_loss, *x, bools([1] * 7), **s), leaves)
        expected = value_and_grads(lambda *x, s=shard: clip_loss(*x, **s), leaves)
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_options_reach_the_loss():
    leaves, mask = make_pairs(7, 5), bools(PRESENT[0])
    got = loss_of_present(hard_negative_loss, *leaves, mask, gamma=0.3)
    assert got == hard_negative_loss(leaves[0][mask], leaves[1][mask], leaves[2], gamma=0.3)


@pytest.mark.parametrize(("offset", "rows"), [(3, None), (0, 9), (7, 1)])
def test_wrong_rows_are_an_error(offset, rows):
    image, text, scale = make_pairs(7, 5)
    with pytest.raises(ValueError, match=r"rows|offset"):
        mean_of_present(image[:, 0], bools([1] * 7), offset, rows)
    with pytest.raises(ValueError, match=r"rows|offset"):
        loss_of_present(clip_loss, image, text, scale, bools([1] * 7), offset=offset, rows=rows)


def test_gaps_are_one_minus_the_cosine_and_its_square():
    a, b, _ = make_pairs(7, 5)
    expected = torch.stack([1 - sum(x * y for x, y in zip(p, q)) for p, q in zip(a, b)])
    assert_equal([cosine_gap(a, b), squared_gap(a, b)], [expected, (-expected) ** 2])
    assert_equal([squared_gap(a, a), cosine_gap(a, -a)], [torch.zeros(7).double(), torch.full((7,), 2.0).double()])


def test_gaps_of_half_precision_are_computed_in_float32():
    a, b, _ = make_pairs(7, 300, dtype=torch.bfloat16)
    for gap in (cosine_gap, squared_gap):
        assert gap(a, b).dtype == torch.float32
        assert_equal([gap(a, b).double()], [gap(a.double(), b.double())], 1e-5)
