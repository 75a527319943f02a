"""Recalls and paired differences over seeds: identities, and no mark that intervals do not support."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations
from statistics import mean, stdev
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_studies import queries, result

from hnclip.evaluate import compare_ranks, recall_at
from hnclip.evaluate.bootstrap import crossed_bootstrap, mark_best, paired_difference
from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.studies.statistics import (
    MEAN,
    Difference,
    Spread,
    Standings,
    Weighted,
    common_seeds,
    level,
    paired_differences,
    queries_of,
    recalls,
    signed,
    weighted_sums,
)

DIRECTIONS = ("text_to_image", "image_to_text")


def runs(skill: float, *seeds: int, **shape: int) -> dict[int | None, EvaluationResult]:
    return {seed: queries(skill, 100 * seed + round(100 * skill), **shape) for seed in seeds}


def test_recalls_over_seeds_by_hand():
    found = runs(0.5, 1, 2, 3)
    hits = [100 * float((one.ranks.text_to_image <= 5).double().mean()) for one in found.values()]
    spread = recalls(found, "text_to_image", 5)
    assert spread is not None
    assert spread.mean == pytest.approx(mean(hits))
    assert spread.std == pytest.approx(stdev(hits))
    assert spread.cell() == f"{mean(hits):.2f} ± {stdev(hits):.2f}"
    both = recalls(found, MEAN, 1)
    sides = [recalls(found, direction, 1) for direction in DIRECTIONS]
    assert both is not None
    assert both.mean == pytest.approx(mean(side.mean for side in sides if side is not None))


def test_one_seed_has_no_deviation_and_no_run_no_recall():
    spread = recalls(runs(0.5, 1), MEAN, 1)
    assert spread is not None
    assert spread.std is None
    assert "±" not in spread.cell()
    assert recalls({}, MEAN, 1) is None
    assert Spread({None: 50.0}).to_dict() == {"mean": 50.0, "std": None, "seeds": {}}
    assert Spread({1: 50.0, 2: 52.0}).to_dict()["seeds"] == {"1": 50.0, "2": 52.0}


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_a_row_against_itself_is_nothing(seeds):
    found = paired_differences(runs(0.5, *seeds), runs(0.5, *seeds), 1)
    assert found is not None
    assert set(found.values()) == {Difference(0.0, 0.0, 0.0)}
    assert not any(one.clear for one in found.values())


@pytest.mark.parametrize("captions", [1, 3])
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("copies", [1, 3])
def test_equal_seeds_are_the_paired_bootstrap_of_one(captions, k, copies):
    ours, base = (queries(skill, seed, captions=captions) for seed, skill in ((1, 0.7), (2, 0.4)))
    found = paired_differences(dict.fromkeys(range(copies), ours), dict.fromkeys(range(copies), base), k)
    assert found is not None
    for one in compare_ranks(ours.ranks, base.ranks, groups=ours.groups, ks=(k,)):
        assert found[one.direction] == pytest.approx(tuple(one.difference[:3]))
        assert found[one.direction].clear == one.clear


def test_swapping_flips_signs():
    ours, base = runs(0.7, 1, 2, 3), runs(0.5, 1, 2, 3)
    there, back = paired_differences(ours, base, 1), paired_differences(base, ours, 1)
    assert there is not None
    assert back is not None
    for name, one in there.items():
        assert back[name] == pytest.approx(tuple(one.flipped()))
        assert one.flipped().flipped() == one


def test_differences_over_seeds_are_the_crossed_bootstrap():
    ours, base = runs(0.7, 1, 2, captions=2), runs(0.5, 1, 2, captions=2)
    values = [
        torch.stack(
            [
                100.0 * (getattr(ours[seed].ranks, way) <= 5) - 100.0 * (getattr(base[seed].ranks, way) <= 5)
                for seed in (1, 2)
            ],
            dim=1,
        )
        for way in DIRECTIONS
    ]
    groups = [torch.arange(60).repeat_interleave(2) // 2, torch.arange(60) // 2]
    found = paired_differences(ours, base, 5)
    assert found is not None
    expected = crossed_bootstrap(values, groups)
    assert [tuple(one) for one in found.values()] == [tuple(one[:3]) for one in expected]
    assert list(found) == [*DIRECTIONS, MEAN]


def test_only_common_seeds_count():
    ours, base = runs(0.7, 1, 2, 3), runs(0.5, 2, 3, 4)
    assert common_seeds(ours, base) == [2, 3]
    shared = paired_differences({2: ours[2], 3: ours[3]}, {2: base[2], 3: base[3]}, 1)
    assert paired_differences(ours, base, 1) == shared
    assert paired_differences(runs(0.7, 1), runs(0.5, 2), 1) is None
    assert paired_differences({}, base, 1) is None


def test_weighted_sums_are_the_crossed_bootstrap_of_the_sums():
    a, b, start = runs(0.7, 1, 2, 3, captions=2), runs(0.5, 3, 1, captions=2), queries(0.3, 9, captions=2)
    terms = [(1.0, a, 1), (-0.5, b, 1), (-0.5, {None: start}, 10), (0.25, b, 5)]
    values = [
        torch.stack(
            [
                sum(weight * 100 * (getattr(of.get(seed, start).ranks, way) <= k).double() for weight, of, k in terms)
                for seed in (1, 3)
            ],
            dim=1,
        )
        for way in DIRECTIONS
    ]
    groups = [torch.arange(60).repeat_interleave(2) // 2, torch.arange(60) // 2]
    found = weighted_sums([Weighted(*term) for term in terms])
    for one, expected in zip(found.values(), crossed_bootstrap(values, groups), strict=True):
        assert one == pytest.approx(tuple(expected[:3]))
    assert common_seeds(a, b, {None: start}) == [1, 3]
    assert weighted_sums([Weighted(1, a, 1), Weighted(1, b, 1), Weighted(1, runs(0.5, 2), 1)]) is None


def test_a_recall_is_level_with_itself_however_it_was_added_up():
    assert 0.1 + 0.2 != 0.3
    assert level(0.1 + 0.2) == level(0.3)
    assert level(50.0) > level(49.999)


def test_what_has_no_seed_pairs_with_every_seed():
    ours, start = runs(0.7, 1, 2), queries(0.5, 9)
    assert paired_differences(ours, {None: start}, 1) == paired_differences(ours, {1: start, 2: start}, 1)
    assert paired_differences({None: start}, ours, 1) == paired_differences({1: start, 2: start}, ours, 1)
    assert common_seeds({None: start}, {None: start}) == [None]
    found = paired_differences({None: start}, {None: start}, 1)
    assert found is not None
    assert found[MEAN] == Difference(0.0, 0.0, 0.0)


def test_seeds_that_disagree_widen_the_interval():
    """One seed 20 points above, one 20 below: a single seed would be sure of either."""
    base = queries(0.5, 3, pictures=200, family=1)

    def moved(points: int) -> EvaluationResult:
        ranks = base.ranks.text_to_image.clone()
        change = (ranks == 1 if points < 0 else ranks > 1).nonzero()[:, 0][: 2 * abs(points)]
        ranks[change] = 2 if points < 0 else 1
        return replace(base, ranks=Ranks(ranks, base.ranks.image_to_text, base.ranks.owner))

    sides = {1: moved(20), 2: moved(-20)}
    alone = paired_differences({1: sides[1]}, {1: base}, 1)
    both = paired_differences(sides, {1: base, 2: base}, 1)
    assert alone is not None
    assert both is not None
    assert alone["text_to_image"].clear
    assert not both["text_to_image"].clear
    assert both["text_to_image"].mean == pytest.approx(0.0)


@pytest.mark.parametrize(
    "other",
    [
        replace(queries(0.5, 1), ids=tuple(f"s{number}" for number in range(60))),
        queries(0.5, 1, pictures=58),
        queries(0.5, 1, captions=2),
        queries(0.5, 1, family=3),
    ],
)
def test_different_galleries_are_refused(other):
    with pytest.raises(ValueError, match=r"different galleries.*evaluate them again on the same data"):
        paired_differences(runs(0.5, 1), {1: other}, 1)
    with pytest.raises(ValueError, match="different galleries"):
        paired_differences({1: queries(0.5, 1), 2: other}, {1: queries(0.5, 1), 2: other}, 1)


def test_one_family_alone_has_no_interval():
    ours, base = (queries(skill, 1, pictures=10, family=10) for skill in (0.9, 0.1))
    found = paired_differences({1: ours}, {1: base}, 1)
    assert found is not None
    assert found[MEAN].mean > 0
    assert (found[MEAN].low, found[MEAN].clear) == (None, False)
    assert found[MEAN].sentence("a", "b") == f"a minus b {found[MEAN].mean:+.1f} points of average R@1: " + (
        "no clear difference"
    )
    assert Standings({"a": {1: ours}, "b": {1: base}}).marks(["a", "b"], MEAN, 1) == {}


def test_held_out_queries_are_their_own():
    whole, part = queries(0.5, 1), queries(0.5, 2, pictures=20)
    results = {1: result(whole, apart=part), 2: result(whole)}
    assert queries_of(results) == results
    assert {seed: found.ids for seed, found in queries_of(results, held_out=True).items()} == {1: part.ids}


def test_sentences_say_who_is_better():
    assert Difference(1.94, 0.4, 3.3).sentence("A", "B") == (
        "A minus B +1.9 points of average R@1 [+0.4, +3.3]: A is better"
    )
    assert Difference(-2.0, -3.0, -1.0).sentence("A", "B", "R@5") == (
        "A minus B -2.0 points of R@5 [-3.0, -1.0]: B is better"
    )
    assert Difference(0.5, 0.0, 1.0).sentence("A", "B").endswith("no clear difference")
    assert Difference(-0.5, -1.0, 0.0).flipped() == Difference(0.5, 0.0, 1.0)
    assert signed(-0.01) == "+0.0"
    assert Difference(0.9, 0.03, 1.8).cell() == "+0.9 [+0.03, +1.8]"
    assert Difference(-0.9, -1.8, -0.004).cell() == "-0.9 [-1.8, -0.004]"
    assert Difference(0.9, -0.03, 1.8).cell() == "+0.9 [+0.0, +1.8]"


skills = st.lists(st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9]), min_size=1, max_size=4)


@patch("hnclip.studies.statistics.crossed_bootstrap", partial(crossed_bootstrap, resamples=200))
@settings(max_examples=25, deadline=None)
@given(skills=skills, seeds=st.integers(1, 3), salt=st.integers(0, 1000), missing=st.integers(0, 5))
def test_marks_claim_nothing_that_pairs_do_not_support(skills, seeds, salt, missing):
    """The rule, spelled out. One seed of one row may be missing."""
    rows = {
        f"row {row}": {seed: queries(skill, salt + 10 * row + seed, pictures=30) for seed in range(seeds)}
        for row, skill in enumerate(skills)
    }
    if missing < len(skills):
        rows[f"row {missing}"].pop(seeds - 1)
    standings = Standings(rows)
    pairs = {(a, b): paired_differences(rows[a], rows[b], 1) for a, b in combinations(rows, 2)}
    for direction in (*DIRECTIONS, MEAN):
        marks = standings.marks(list(rows), direction, 1)

        def height(row, direction=direction):
            ways = DIRECTIONS if direction == MEAN else (direction,)
            hits = [(getattr(one.ranks, way) == 1).double().mean() for one in rows[row].values() for way in ways]
            return float(sum(hits) / len(hits))

        def above(row, other, direction=direction):
            found, back = pairs.get((row, other)), pairs.get((other, row))
            return (found is not None and found[direction].low > 0) or (back is not None and back[direction].high < 0)

        order = sorted((row for row in rows if rows[row]), key=height, reverse=True)
        for row, mark in marks.items():
            assert all(above(row, other) for other in order if other != row and marks.get(other) != "best")
            assert mark == ("best" if row == order[0] else "second")
        expected = {}
        if len(order) > 1 and all(above(order[0], other) for other in order[1:]):
            expected[order[0]] = "best"
            if len(order) > 2 and all(above(order[1], other) for other in order[2:]):
                expected[order[1]] = "second"
        assert marks == expected


def test_marks_of_one_seed_are_those_of_an_evaluation():
    found = {row: queries(skill, row, captions=2) for row, skill in enumerate((0.9, 0.5, 0.2, 0.3))}
    standings = Standings({str(row): {1: one} for row, one in found.items()})
    for direction in DIRECTIONS:
        marks = standings.marks(["0", "1", "2", "3"], direction, 1)
        expected = mark_best(
            {row: recall_at(getattr(one.ranks, direction), 1) for row, one in found.items()},
            lambda a, b, way=direction: (
                paired_difference([found[a].ranks], [found[b].ranks], 1, groups=found[a].groups)[way].low > 0
            ),
        )
        assert marks == {str(row): mark for row, mark in expected.items()}
        assert "best" in marks.values()


def by_hits(*spans: range) -> list[EvaluationResult]:
    """Rows that answer these of 200 queries, in both directions."""
    found = []
    for span in spans:
        ranks = torch.full((200,), 2)
        ranks[list(span)] = 1
        names = tuple(map(str, range(200)))
        found.append(EvaluationResult(Ranks(ranks, ranks, torch.arange(200)), torch.arange(200), names))
    return found


def test_the_best_must_be_clear_of_every_other_and_not_only_of_the_next():
    """The second misses eight of the best's hits and nothing else; the third hits others, so its distance is noise."""
    first, second, third = by_hits(range(100), range(92), range(100, 191))
    standings = Standings({"a": {1: first}, "b": {1: second}, "c": {1: third}})
    assert standings.marks(["a", "b"], MEAN, 1) == {"a": "best"}
    assert standings.marks(["a", "b", "c"], MEAN, 1) == {}


def test_a_higher_mean_of_other_seeds_is_no_lead():
    """On the one seed that both have, the row with the lower mean is clearly ahead."""
    low, middle, high = by_hits(range(60), range(100), range(200))
    standings = Standings({"a": {1: low, 2: high, 3: high}, "b": {1: middle}})
    assert standings.recall("a", MEAN, 1).mean > standings.recall("b", MEAN, 1).mean
    assert standings.difference("b", "a", MEAN, 1).clear
    assert standings.marks(["a", "b"], MEAN, 1) == {}


def test_a_difference_is_found_once_whichever_way_it_is_asked(monkeypatch):
    calls = []

    def counted(ours, base, k):
        calls.append(k)
        return paired_differences(ours, base, k)

    monkeypatch.setattr("hnclip.studies.statistics.paired_differences", counted)
    standings = Standings({"a": runs(0.7, 1), "b": runs(0.4, 1)})
    there, back = standings.difference("a", "b", MEAN, 1), standings.difference("b", "a", MEAN, 1)
    assert there is not None
    assert back == there.flipped()
    assert calls == [1]
