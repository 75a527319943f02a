"""Groups of things that are alike, without comparing everything with everything.

Things are filed under keys, so that any two that are alike share at least one; only things of one key are compared.
Groups are wanted, not pairs: of a hundred thousand copies of one thing every pair is alike, and one group says it all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

CHUNK = 2**20  # pairs that are looked at together
REACH = 5_000  # pairs that are looked at for each thing, on average: a bound for data where all share their keys


@dataclass(frozen=True)
class Linked:
    """Groups of two and more, members and groups in ascending order. Where `complete` is False the search ended at
    REACH: what it found is right, but there may be more."""

    groups: list[list[int]]
    complete: bool


def link(
    count: int,
    things: np.ndarray,
    keys: np.ndarray,
    alike: Callable[[np.ndarray, np.ndarray], np.ndarray],
    leads: np.ndarray | None = None,
) -> Linked:
    """The connected components of `count` things, where edges are pairs that share a key and are alike.

    A pair that is connected already, through others, is not compared any more. Pairs are looked at by their distance
    under the key, near ones first, so that the search has been everywhere when it ends at REACH.

    Args:
        things, keys: entry e files `things[e]` under `keys[e]`; the keys ascend.
        alike: says of pairs of entries whether their things are alike.
        leads: entries that may come first in a pair, all unless told.

    Shape:
        things, keys, leads [E]; `alike` takes two [P] and returns [P] booleans.
        Memory is O(E + count).
    """
    first = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]][: len(keys)])  # [K] where each key begins
    lengths = np.diff(np.r_[first, len(keys)])  # [K]
    end = np.repeat(first + lengths, lengths)  # [E] where the key of each entry ends
    number = np.repeat(np.arange(len(first)), lengths)  # [E] which key it is
    root = np.arange(count)  # the least member of each thing's group
    entries = np.arange(len(keys)) if leads is None else np.flatnonzero(leads)
    looked_at = 0
    step = 1
    while len(entries := entries[entries + step < end[entries]]):
        if step & (step - 1) == 0:  # ever more rarely: a key whose things are one group has nothing more to say
            members = root[things]  # [E]
            one = np.minimum.reduceat(members, first) == np.maximum.reduceat(members, first)  # [K]
            entries = entries[~one[number[entries]]]
        looked_at += len(entries)
        if looked_at > REACH * count:
            return Linked(_groups(root), complete=False)
        for start in range(0, len(entries), CHUNK):
            left = entries[start : start + CHUNK]
            left = left[root[things[left]] != root[things[left + step]]]
            left = left[alike(left, left + step)]
            root = _joined(root, things[left], things[left + step])
        step += 1
    return Linked(_groups(root), complete=True)


def _joined(root: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The least members after the groups of each pair became one."""
    parent: dict[int, int] = {}

    def find(member: int) -> int:
        while (above := parent.get(member, member)) != member:
            parent[member] = parent.get(above, above)
            member = above
        return member

    for one, other in zip(root[left].tolist(), root[right].tolist()):
        low, high = sorted((find(one), find(other)))
        parent[high] = low
    if not parent:
        return root
    moved = np.arange(len(root))
    moved[list(parent)] = [find(member) for member in parent]
    return moved[root]


def _groups(root: np.ndarray) -> list[list[int]]:
    order = np.argsort(root, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(root[order])) + 1)
    return [part.tolist() for part in parts if len(part) > 1]
