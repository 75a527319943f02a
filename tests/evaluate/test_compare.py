"""Two models on the same queries: counts by hand, the bootstrap's own identities, and pairs that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_galleries import gallery_of, model_on

from hnclip.evaluate import Ranks, compare_queries, compare_ranks, paired_bootstrap, read_queries, write_queries
from hnclip.evaluate.queries import Query
from hnclip.evaluate.retrieval import group_numbers

OWNER = torch.arange(60).repeat_interleave(2)  # 60 pictures with two captions
FAMILIES: list[str | None] = [f"family {i // 3}" if i < 30 else None for i in range(60)]
GALLERY = gallery_of(OWNER, FAMILIES)
GOOD, BAD = model_on(OWNER, 0.8, 1), model_on(OWNER, 2.0, 2)


def files(tmp_path: Path) -> tuple[list[Query], list[Query]]:
    for name, found in (("good", GOOD), ("bad", BAD)):
        write_queries(tmp_path / name, GALLERY, found)
    return read_queries(tmp_path / "good"), read_queries(tmp_path / "bad")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=20), st.integers(1, 9))
def test_counts_are_counts(pairs, k):
    a, b = (torch.tensor(column) for column in zip(*pairs))
    owner = torch.arange(len(pairs))
    for found in compare_ranks(Ranks(a, a, owner), Ranks(b, b, owner), ks=(k,), resamples=20):
        assert found.both == sum(x <= k and y <= k for x, y in pairs)
        assert found.only_a == sum(x <= k < y for x, y in pairs)
        assert found.only_b == sum(y <= k < x for x, y in pairs)
        assert found.both + found.only_a + found.only_b + found.neither == len(pairs)
        assert found.recall_a == pytest.approx(100 * (found.both + found.only_a) / len(pairs))
        assert found.difference.mean == pytest.approx(100 * (found.only_a - found.only_b) / len(pairs))
        assert found.recall_a - found.recall_b == pytest.approx(found.difference.mean)


def test_every_direction_at_every_k():
    found = compare_ranks(GOOD.ranks, BAD.ranks, ks=(1, 5))
    assert [(one.direction, one.k) for one in found] == [
        ("text_to_image", 1),
        ("text_to_image", 5),
        ("image_to_text", 1),
        ("image_to_text", 5),
    ]
    assert [one.recall_b for one in found] == [
        (BAD.metrics.text_to_image if one.direction == "text_to_image" else BAD.metrics.image_to_text).recall[one.k]
        for one in found
    ]


def test_families_are_resampled_with_all_their_captions():
    groups = group_numbers(GALLERY.records)
    forward, backward = compare_ranks(GOOD.ranks, BAD.ranks, groups=groups, resamples=300, seed=4)

    def expected(direction, labels):
        hits = [100.0 * (getattr(found.ranks, direction) <= 1) for found in (GOOD, BAD)]
        return paired_bootstrap(*hits, groups=labels, resamples=300, seed=4)

    assert forward.difference == expected("text_to_image", groups[OWNER])
    assert backward.difference == expected("image_to_text", groups)
    alone = compare_ranks(GOOD.ranks, BAD.ranks, resamples=300, seed=4)[0].difference
    assert alone == expected("text_to_image", OWNER)  # without families, the captions of a picture still go together


def test_swapping_the_models_flips_the_signs():
    there, back = compare_ranks(GOOD.ranks, BAD.ranks), compare_ranks(BAD.ranks, GOOD.ranks)
    for a, b in zip(there, back):
        assert (a.both, a.only_a, a.only_b, a.neither) == (b.both, b.only_b, b.only_a, b.neither)
        assert (a.difference.mean, a.difference.low) == pytest.approx((-b.difference.mean, -b.difference.high))
        assert a.clear == b.clear


def test_sentences_say_what_the_interval_supports():
    better = compare_ranks(GOOD.ranks, BAD.ranks)[0]
    mean, low, high, _ = better.difference
    assert better.clear
    assert low > 0
    head = f"text→image: good minus bad {mean:+.1f} points of R@1 [{low:+.1f}, {high:+.1f}]: "
    assert better.sentence("good", "bad") == head + "good is better"
    worse = compare_ranks(BAD.ranks, GOOD.ranks, ks=(5,))[1]
    assert worse.sentence("bad", "good").startswith("image→text: bad minus good -")
    assert "points of R@5" in worse.sentence("bad", "good")
    assert worse.sentence("bad", "good").endswith(": good is better")
    same = compare_ranks(GOOD.ranks, GOOD.ranks)[0]
    assert not same.clear
    assert same.sentence("a", "b") == "text→image: a minus b +0.0 points of R@1 [+0.0, +0.0]: no clear difference"


def test_a_lead_of_one_query_is_no_clear_difference():
    ranks = torch.ones(40, dtype=torch.int64)
    other = ranks.clone()
    other[3] = 2
    owner = torch.arange(40)
    found = compare_ranks(Ranks(ranks, ranks, owner), Ranks(other, other, owner))[0]
    assert found.difference.mean == 2.5
    assert not found.clear


def test_dictionary_is_plain():
    found = compare_ranks(GOOD.ranks, BAD.ranks)[0].to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["clear"] is True
    assert list(found["difference"]) == ["mean", "low", "high", "p_value"]


def test_query_files_say_the_same_as_ranks(tmp_path: Path):
    good, bad = files(tmp_path)
    expected = compare_ranks(GOOD.ranks, BAD.ranks, groups=group_numbers(GALLERY.records), ks=(1, 5))
    assert compare_queries(good, bad, ks=(1, 5)) == expected
    assert compare_queries(good, bad[::-1], ks=(1, 5)) == expected  # paired by name, not by place
    assert compare_queries(good, bad, ks=(1, 5), seed=1) != expected


def test_other_queries_are_refused_and_named(tmp_path: Path):
    good, bad = files(tmp_path)
    with pytest.raises(ValueError, match=r"1 queries are only in a, for example text_to_image of caption 1 of 'r2'"):
        compare_queries(good, [query for query in bad if (query.record, query.caption) != ("r2", 1)])
    renamed = [replace(query, record="new") if query.record == "r7" else query for query in good]
    with pytest.raises(ValueError, match=r"3 queries are only in a, for example image_to_text of picture 'new'"):
        compare_queries(renamed, bad)
    with pytest.raises(ValueError, match=r"3 queries are only in b"):
        compare_queries([query for query in good if query.record != "r7"], bad)


def test_repeated_queries_are_refused(tmp_path: Path):
    good, bad = files(tmp_path)
    with pytest.raises(ValueError, match=r"^a holds 180 queries more than once"):
        compare_queries(good + good, bad)
    with pytest.raises(ValueError, match=r"^b holds 1 queries more than once"):
        compare_queries(good, [*bad, bad[5]])


def test_other_families_are_refused(tmp_path: Path):
    good, bad = files(tmp_path)
    moved = [replace(query, group="elsewhere") if query.record == "r0" else query for query in bad]
    with pytest.raises(ValueError, match=r"'r0' is in group 'family 0' and 'elsewhere'"):
        compare_queries(good, moved)


@pytest.mark.parametrize(
    "keep",
    [
        lambda query: query.direction == "text_to_image",
        lambda query: query.direction == "image_to_text",
        lambda query: query.direction == "image_to_text" or query.record != "r3",
    ],
)
def test_half_a_gallery_is_refused(tmp_path: Path, keep):
    good, bad = files(tmp_path)
    with pytest.raises(ValueError, match="both directions of a whole gallery"):
        compare_queries(list(filter(keep, good)), list(filter(keep, bad)))


def test_errors_name_the_argument():
    other = Ranks(GOOD.ranks.text_to_image, GOOD.ranks.image_to_text, OWNER.flip(0))
    with pytest.raises(ValueError, match=r"^a and b are not of the same gallery: 120 captions of 60 pictures"):
        compare_ranks(GOOD.ranks, other)
    with pytest.raises(ValueError, match=r"^ks "):
        compare_ranks(GOOD.ranks, BAD.ranks, ks=())
    with pytest.raises(ValueError, match=r"^k "):
        compare_ranks(GOOD.ranks, BAD.ranks, ks=(0,))
    with pytest.raises(ValueError, match=r"^groups must have one label per image, \[60\]"):
        compare_ranks(GOOD.ranks, BAD.ranks, groups=OWNER)
