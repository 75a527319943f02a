"""Two models on the same queries: counts by hand, result lists sorted by hand, and query files that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_galleries import gallery_of, model_on, tied_vectors
from torch import Tensor

from hnclip.evaluation import Ranks, compare_queries, compare_ranks, read_queries
from hnclip.evaluation.bootstrap import paired_difference
from hnclip.evaluation.compare import query_results, write_queries
from hnclip.evaluation.retrieval import rank_gallery

OWNER = torch.arange(60).repeat_interleave(2)  # 60 images with two captions
GALLERY = gallery_of(OWNER, [f"group {i // 3}" if i < 30 else None for i in range(60)])
GOOD, BAD = model_on(GALLERY, 0.8, 1), model_on(GALLERY, 2.0, 2)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=20), st.integers(1, 9))
def test_counts_are_counts(pairs, k):
    owner = torch.arange(len(pairs))
    a, b = (Ranks(torch.tensor(column), torch.tensor(column), owner) for column in zip(*pairs))
    for found in compare_ranks(a, b, ks=(k,)):
        assert found.difference == paired_difference([a], [b], k)[found.direction]
        assert found.both == sum(x <= k and y <= k for x, y in pairs)
        assert found.only_a == sum(x <= k < y for x, y in pairs)
        assert found.only_b == sum(y <= k < x for x, y in pairs)
        assert found.both + found.only_a + found.only_b + found.neither == len(pairs)
        assert found.recall_a - found.recall_b == pytest.approx(found.difference.mean)


def literal_lists(image: Tensor, text: Tensor, owner: Tensor) -> list[tuple[str, str, int | None, list]]:
    """For every query the whole list of (score, is right, record, caption), by looking at every pair in fp64."""
    scores = F.normalize(text.double(), dim=1) @ F.normalize(image.double(), dim=1).T  # [T, I]
    numbers = [int((owner[:t] == owner[t]).sum()) for t in range(len(owner))]
    found = []
    for t, own in enumerate(owner.tolist()):
        entries = [(float(scores[t, i]), i == own, f"r{i}", None) for i in range(len(image))]
        found.append(("text_to_image", f"r{own}", numbers[t], ordered(entries)))
    for i in range(len(image)):
        entries = [
            (float(scores[t, i]), bool(owner[t] == i), f"r{int(owner[t])}", numbers[t]) for t in range(len(text))
        ]
        found.append(("image_to_text", f"r{i}", None, ordered(entries)))
    return found


def ordered(entries: list) -> list:
    """By falling score; of equal ones the wrong before the right."""
    return sorted(entries, key=lambda entry: (-round(entry[0], 9), entry[1]))


@settings(max_examples=80, deadline=None)
@given(tied_vectors(), st.sampled_from([1, 2, 5, 40]))
def test_lists_equal_sorting_every_pair_with_ties(vectors, k):
    image, text, owner = vectors
    gallery = gallery_of(owner)
    queries = list(query_results(gallery, rank_gallery(image, text, gallery), k))
    literal = literal_lists(image, text, owner)
    assert len(queries) == len(literal) == len(text) + len(image)
    for query, (direction, record, caption, entries) in zip(queries, literal):
        assert (query.direction, query.record, query.caption) == (direction, record, caption)
        place = [right for _, right, *_ in entries].index(True)
        assert query.rank == 1 + place
        assert query.score == pytest.approx(entries[place][0], abs=2e-6)
        assert len(query.top) == min(k, len(entries))
        # Scores and which are right are fixed place by place; which of several tied wrong ones stands there is not.
        known = {(name, number): score for score, _, name, number in entries}
        for found, (score, right, *_) in zip(query.top, entries):
            assert found.score == pytest.approx(score, abs=2e-6)
            assert (found.record == record) == right
            assert found.score == pytest.approx(known[found.record, found.caption], abs=2e-6)
        assert len({(found.record, found.caption) for found in query.top}) == len(query.top)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    write_queries(tmp_path / "new" / "good.jsonl", GALLERY, GOOD, 3)
    return tmp_path / "new" / "good.jsonl"


def test_files_hold_what_ranks_hold(good: Path, tmp_path: Path):
    a = read_queries(good)
    assert a == list(query_results(GALLERY, GOOD, 3))
    write_queries(tmp_path / "bad.jsonl", GALLERY, BAD)
    b = read_queries(tmp_path / "bad.jsonl")
    expected = compare_ranks(GOOD.ranks, BAD.ranks, groups=GOOD.groups, ks=(1, 5))
    assert compare_queries(a, b, ks=(1, 5)) == expected
    assert expected[0].sentence("good", "bad").endswith("good is better")
    assert compare_queries(a, b[::-1], ks=(1, 5)) == expected  # paired by name, not by place


def test_other_queries_cannot_be_compared():
    a, b = (list(query_results(GALLERY, result)) for result in (GOOD, BAD))
    moved = [replace(query, group="elsewhere") if query.record == "r0" else query for query in b]
    for other in (b[1:], moved):
        with pytest.raises(ValueError, match="different queries"):
            compare_queries(a, other)


def test_truncated_and_changed_files_are_refused(good: Path):
    """And those with a query twice."""
    content = good.read_bytes()
    first, *others = content.splitlines(keepends=True)
    damaged = [b"", content[: len(first) - 1], content[:-9], content + first]
    for change in ({"direction": "x"}, {"rank": 3}, {"caption": None}):
        damaged.append(b"".join([json.dumps(json.loads(first) | change).encode() + b"\n", *others]))
    for changed in damaged:
        good.write_bytes(changed)
        with pytest.raises(ValueError, match=r"good\.jsonl is damaged"):
            read_queries(good)
