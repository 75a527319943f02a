from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_records import components

from hnclip.data.check import linking
from hnclip.data.check.linking import link


def filed(keys_of):
    """Entries of things under their keys, sorted by key."""
    entries = sorted((key, thing) for thing, keys in enumerate(keys_of) for key in keys)
    return np.array([thing for _, thing in entries], int), np.array([key for key, _ in entries], int)


@given(
    keys_of=st.lists(st.sets(st.integers(0, 6), max_size=4), max_size=14),
    edges=st.sets(st.tuples(st.integers(0, 13), st.integers(0, 13))),
    chunk=st.integers(1, 5),
)
def test_groups_are_the_components_of_pairs_that_share_a_key_and_are_alike(keys_of, edges, chunk):
    things, keys = filed(keys_of)

    def alike(left, right):
        return np.array([bool({(a, b), (b, a)} & edges) for a, b in zip(things[left], things[right])], bool)

    def linked(one, other):
        return bool(keys_of[one] & keys_of[other]) and bool({(one, other), (other, one)} & edges)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linking, "CHUNK", chunk)
        found = link(len(keys_of), things, keys, alike)
    assert found.complete
    assert found.groups == components(len(keys_of), linked)


def test_only_leading_entries_begin_a_pair():
    asked = []

    def alike(left, right):
        asked.extend(zip(left.tolist(), right.tolist()))
        return np.zeros(len(left), bool)

    link(4, np.arange(4), np.zeros(4, int), alike, np.array([False, True, False, False]))
    assert sorted(asked) == [(1, 2), (1, 3)]


def test_copies_of_one_thing_take_as_many_steps_as_there_are():
    count = 20_000  # 200 million pairs under each of three keys
    asked = []

    def alike(left, right):
        asked.append(len(left))
        return np.ones(len(left), bool)

    found = link(count, np.tile(np.arange(count), 3), np.repeat([0, 1, 2], count), alike)
    assert found.groups == [list(range(count))]
    assert found.complete
    assert sum(asked) < 3 * count


def test_the_search_ends_where_everything_shares_a_key_and_nothing_is_alike(monkeypatch):
    monkeypatch.setattr(linking, "REACH", 10)
    asked = []

    def alike(left, right):
        asked.append(len(left))
        return (left == 0) & (right == 1)

    found = link(1000, np.arange(1000), np.zeros(1000, int), alike)
    assert not found.complete
    assert found.groups == [[0, 1]]
    assert sum(asked) <= 10 * 1000


def test_nothing_to_link():
    nothing = np.zeros(0, int)
    assert link(0, nothing, nothing, lambda left, right: left == right).groups == []
    assert link(3, nothing, nothing, lambda left, right: left == right).groups == []
