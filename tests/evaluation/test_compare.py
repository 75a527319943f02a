"""Two models on the same queries: counts by hand, result lists sorted by hand, and query files that are refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
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


def test_a_sentence_claims_only_what_the_interval_supports():
    assert compare_ranks(GOOD.ranks, BAD.ranks)[0].sentence("good", "bad").endswith("good is better")
    assert compare_ranks(BAD.ranks, GOOD.ranks, ks=(5,))[1].sentence("bad", "good").endswith("good is better")
    ranks, other, owner = torch.ones(40, dtype=torch.int64), torch.ones(40, dtype=torch.int64), torch.arange(40)
    other[3] = 2
    found = compare_ranks(Ranks(ranks, ranks, owner), Ranks(other, other, owner))[0]
    assert (found.difference.mean, found.clear) == (2.5, False)  # a lead of one query
    assert found.sentence("a", "b").endswith("no clear difference")


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


def test_further_right_answers_come_after_ties_as_well():
    """The wrong caption is worse than the second own one, but by rounding alone."""
    image, gallery = torch.eye(2), gallery_of(torch.tensor([0, 0, 1]))
    text = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6 - 1e-6, 0.8]])
    query = list(query_results(gallery, rank_gallery(image, text, gallery)))[3]
    assert (query.direction, query.record, query.rank) == ("image_to_text", "r0", 1)
    assert [(found.record, found.caption) for found in query.top] == [("r0", 0), ("r1", 0), ("r0", 1)]


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
    assert compare_queries(a, b[::-1], ks=(1, 5)) == expected  # paired by name, not by place
    good.write_text("".join(json.dumps({**asdict(query), "note": "another field"}) + "\n" for query in a))
    assert read_queries(good) == a


@pytest.mark.parametrize(
    "change",
    [
        lambda queries: [query for query in queries if (query.record, query.caption) != ("r2", 1)],
        lambda queries: [replace(query, record="new", top=()) if query.record == "r7" else query for query in queries],
        lambda queries: [replace(query, group="elsewhere") if query.record == "r0" else query for query in queries],
    ],
)
def test_other_queries_cannot_be_compared(change):
    a, b = (list(query_results(GALLERY, result)) for result in (GOOD, BAD))
    for one, other in ((a, change(b)), (change(a), b)):
        with pytest.raises(ValueError, match="different queries"):
            compare_queries(one, other)


CHANGED = ({"direction": "x"}, {"rank": 0}, {"rank": 3}, {"rank": "1"}, {"caption": None}, {"score": None}, {"top": 1})


def test_truncated_and_changed_files_are_refused(good: Path):
    """And those with a query twice."""
    content = good.read_bytes()
    first, *others = lines = content.splitlines(keepends=True)
    damaged = [b"", content[: len(first) - 1], first, content[:-9], content[: -len(lines[-1])], content + first]
    for change in CHANGED:
        line = json.dumps(json.loads(first) | change).encode() + b"\n"
        damaged.append(b"".join([line, *others]))
    for changed in damaged:
        good.write_bytes(changed)
        with pytest.raises(ValueError, match=r"good\.jsonl is damaged"):
            read_queries(good)
