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
from hnclip.evaluation.retrieval import group_numbers, rank_gallery

OWNER = torch.arange(60).repeat_interleave(2)  # 60 images with two captions
GALLERY = gallery_of(OWNER, [f"group {i // 3}" if i < 30 else None for i in range(60)])
GOOD, BAD = model_on(GALLERY, 0.8, 1), model_on(GALLERY, 2.0, 2)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=20), st.integers(1, 9))
def test_counts_are_counts(pairs, k):
    a, b = (torch.tensor(column) for column in zip(*pairs))
    owner = torch.arange(len(pairs))
    for found in compare_ranks(Ranks(a, a, owner), Ranks(b, b, owner), ks=(k,)):
        assert found.both == sum(x <= k and y <= k for x, y in pairs)
        assert found.only_a == sum(x <= k < y for x, y in pairs)
        assert found.only_b == sum(y <= k < x for x, y in pairs)
        assert found.both + found.only_a + found.only_b + found.neither == len(pairs)
        assert found.recall_a - found.recall_b == pytest.approx(found.difference.mean)


def test_every_direction_at_every_k_with_its_paired_difference():
    found = compare_ranks(GOOD.ranks, BAD.ranks, groups=GOOD.groups, ks=(1, 5))
    assert [(one.direction, one.k) for one in found] == [
        (direction, k) for direction in ("text_to_image", "image_to_text") for k in (1, 5)
    ]
    for one in found:
        assert one.recall_b == BAD.metrics[one.direction][f"R@{one.k}"]
        expected = paired_difference([GOOD.ranks], [BAD.ranks], one.k, groups=group_numbers(GALLERY.records))
        assert one.difference == expected[one.direction]
    values = found[0].to_dict()
    assert json.loads(json.dumps(values)) == values
    assert (values["clear"], list(values["difference"])) == (True, ["mean", "low", "high", "p_value"])


def test_sentences_say_what_the_interval_supports():
    better = compare_ranks(GOOD.ranks, BAD.ranks)[0]
    mean, low, high, _ = better.difference
    head = f"text→image: good minus bad {mean:+.1f} points of R@1 [{low:+.1f}, {high:+.1f}]: "
    assert better.sentence("good", "bad") == head + "good is better"
    worse = compare_ranks(BAD.ranks, GOOD.ranks, ks=(5,))[1]
    assert worse.sentence("bad", "good").endswith(": good is better")
    same = compare_ranks(GOOD.ranks, GOOD.ranks)[0]
    assert same.sentence("a", "b") == "text→image: a minus b +0.0 points of R@1 [+0.0, +0.0]: no clear difference"


def test_a_lead_of_one_query_is_no_clear_difference():
    ranks, other, owner = torch.ones(40, dtype=torch.int64), torch.ones(40, dtype=torch.int64), torch.arange(40)
    other[3] = 2
    found = compare_ranks(Ranks(ranks, ranks, owner), Ranks(other, other, owner))[0]
    assert (found.difference.mean, found.clear) == (2.5, False)


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


def test_equal_wrong_candidates_stand_in_the_order_of_the_gallery():
    image = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    gallery = gallery_of(torch.arange(4))
    lists = [
        [found.record for found in query.top] for query in query_results(gallery, rank_gallery(image, image, gallery))
    ]
    assert lists == 2 * [
        ["r0", "r1", "r2", "r3"],
        ["r2", "r3", "r1", "r0"],
        ["r1", "r3", "r2", "r0"],
        ["r1", "r2", "r3", "r0"],
    ]


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


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    write_queries(tmp_path / "bad.jsonl", GALLERY, BAD)
    return tmp_path / "bad.jsonl"


def test_files_say_the_same_as_ranks(good: Path, bad: Path):
    a, b = read_queries(good), read_queries(bad)
    assert a == list(query_results(GALLERY, GOOD, 3))
    expected = compare_ranks(GOOD.ranks, BAD.ranks, groups=GOOD.groups, ks=(1, 5))
    assert compare_queries(a, b, ks=(1, 5)) == expected
    assert compare_queries(a, b[::-1], ks=(1, 5)) == expected  # paired by name, not by place
    first = json.loads(good.read_text().splitlines()[0])
    assert list(first) == ["direction", "record", "caption", "group", "rank", "score", "top"]
    assert list(first["top"][0]) == ["record", "caption", "score"]


@pytest.mark.parametrize(
    "change",
    [
        lambda queries: [query for query in queries if (query.record, query.caption) != ("r2", 1)],
        lambda queries: [replace(query, record="new", top=()) if query.record == "r7" else query for query in queries],
        lambda queries: [replace(query, group="elsewhere") if query.record == "r0" else query for query in queries],
    ],
)
def test_other_queries_cannot_be_compared(good: Path, bad: Path, change):
    a, b = read_queries(good), read_queries(bad)
    for one, other in ((a, change(b)), (change(a), b)):
        with pytest.raises(ValueError, match="different queries"):
            compare_queries(one, other)


def test_truncated_files_are_refused(good: Path):
    """And those with a query twice."""
    content = good.read_bytes()
    lines = content.splitlines(keepends=True)
    some = [b"", content[: len(lines[0]) - 1], lines[0], content[:-9], content[: -len(lines[-1])], content + lines[0]]
    for changed in some:
        good.write_bytes(changed)
        with pytest.raises(ValueError, match=r"good\.jsonl is damaged.*evaluate the model again"):
            read_queries(good)


@pytest.mark.parametrize(
    "changed",
    [
        {"direction": "sideways"},
        {"rank": 0},
        {"rank": 3},
        {"rank": "1"},
        {"caption": None},
        {"score": None},
        {"top": 1},
    ],
    ids=str,
)
def test_changed_files_are_refused(good: Path, changed: dict[str, object]):
    first, *others = good.read_text().splitlines()
    assert json.loads(first)["rank"] == 1
    good.write_text("\n".join([json.dumps(json.loads(first) | changed), *others]))
    with pytest.raises(ValueError, match=r"good\.jsonl is damaged"):
        read_queries(good)


def test_other_fields_are_ignored(good: Path):
    queries = read_queries(good)
    good.write_text("".join(json.dumps({**asdict(query), "note": "a mirror"}) + "\n" for query in queries))
    assert read_queries(good) == queries
