"""Recalls, paired differences and marks of stored results: identities, and no mark that intervals do not support."""

from __future__ import annotations

from statistics import mean, stdev

import pytest
import torch
from small_studies import queries, study_results

from hnclip.evaluation.bootstrap import crossed_bootstrap, paired_difference
from hnclip.evaluation.retrieval import EvaluationResult
from hnclip.studies.results import MEAN, Column, Term
from hnclip.studies.spec import Domain, GallerySpec, Study, Variant

DIRECTIONS = ("text_to_image", "image_to_text")
STUDY = Study(
    "duel",
    "Duel",
    "Which is better?",
    (Variant("start", trained=False), Variant("a"), Variant("b", against=("a", "start"))),
    parts=("recalls",),
    ks=(1, 5),
)


def column(**rows: dict[int | None, EvaluationResult]) -> Column:
    return Column(Domain("a", ("a",)), GallerySpec("a"), rows)


def runs(skill: float, *seeds: int, **shape: int) -> dict[int | None, EvaluationResult]:
    return {seed: queries(skill, 100 * seed + round(100 * skill), **shape) for seed in seeds}


def test_recalls_over_seeds_by_hand() -> None:
    rows = column(a=runs(0.5, 1, 2, 3), b={1: queries(0.5, 1)}, c={})
    hits = [100 * float((one.ranks.text_to_image <= 5).double().mean()) for one in rows.rows["a"].values()]
    found = rows.recall("a", "text_to_image", 5)
    assert (found.mean, found.std) == (pytest.approx(mean(hits)), pytest.approx(stdev(hits)))
    sides = [rows.recall("a", direction, 1).mean for direction in DIRECTIONS]
    assert rows.recall("a", MEAN, 1).mean == pytest.approx(mean(sides))
    assert rows.recall("b", MEAN, 1).std is None
    assert rows.recall("c", MEAN, 1) is None


@pytest.mark.parametrize(("captions", "seeds", "k"), [(1, (1,), 1), (3, (1,), 5), (3, (1, 2, 3), 1)])
def test_a_difference_is_the_paired_difference_of_the_ranks(captions: int, seeds: tuple[int, ...], k: int) -> None:
    rows = column(a=runs(0.7, *seeds, captions=captions), b=runs(0.5, *seeds, captions=captions))
    ours, theirs = ([one.ranks for one in by_seed.values()] for by_seed in rows.rows.values())
    expected = paired_difference(ours, theirs, k, groups=next(rows.results).groups)
    for direction in (*DIRECTIONS, MEAN):
        assert rows.difference("a", "b", direction, k) == expected[direction]
        back, there = rows.difference("b", "a", direction, k), expected[direction]
        assert (back.mean, back.low, back.high) == (-there.mean, -there.high, -there.low)
        assert (rows.marks(["a", "b"], direction, k) == {"a": "best"}) == (there.low > 0)


def test_only_common_seeds_count_and_an_untrained_model_has_all() -> None:
    found = {"a": runs(0.7, 1, 2, 3), "b": runs(0.5, 2, 3, 4), "start": {None: queries(0.3, 9)}}
    shared = column(a={seed: found["a"][seed] for seed in (2, 3)}, b={seed: found["b"][seed] for seed in (2, 3)})
    assert column(**found).difference("a", "b", MEAN, 1) == shared.difference("a", "b", MEAN, 1)
    copies = column(a=found["a"], start=dict.fromkeys((1, 2, 3), found["start"][None]))
    assert column(**found).difference("a", "start", MEAN, 1) == copies.difference("a", "start", MEAN, 1)
    assert column(a=runs(0.7, 1), b=runs(0.5, 2)).difference("a", "b", MEAN, 1) is None


def test_weighted_sums_are_the_crossed_bootstrap_of_the_sums() -> None:
    rows = column(a=runs(0.7, 1, 3, captions=2), b=runs(0.5, 1, 3, captions=2))
    terms = [Term(1.0, "a", 1), Term(-0.5, "b", 1), Term(0.25, "b", 5)]

    def hits(direction: str, seed: int) -> torch.Tensor:
        return sum(w * 100 * (getattr(rows.rows[row][seed].ranks, direction) <= k).double() for w, row, k in terms)

    values = [torch.stack([hits(direction, seed) for seed in (1, 3)], dim=1) for direction in DIRECTIONS]
    groups = [torch.arange(60).repeat_interleave(2) // 2, torch.arange(60) // 2]
    for direction, expected in zip((*DIRECTIONS, MEAN), crossed_bootstrap(values, groups), strict=True):
        assert rows.weighted_sum(terms, direction) == pytest.approx(expected)


def test_measurements_are_the_numbers_of_the_results() -> None:
    skill = {"start": 0.3, "a": 0.5, "b": 0.8}
    results = study_results(STUDY, lambda row, domain, gallery, seed: queries(skill[row], seed), seeds=(1, 2))
    found = results.measurements()
    (rows,) = results.columns
    for one in found:
        at = (one["direction"], one["k"])
        if one["against"] is not None:
            expected = rows.difference(one["row"], one["against"], *at)
            assert (one["value"], one["low"], one["high"]) == expected[:3]
        elif one["seed"] is not None:
            assert one["value"] == rows.recall(one["row"], *at).values[one["seed"]]
        else:
            assert one["value"] == rows.recall(one["row"], *at).mean
            assert one["mark"] == rows.marks(["start", "a", "b"], *at).get(one["row"])
    assert len(found) == 3 * 2 * (2 * 2 + 3 + 2)  # directions × K × (rows × seeds, means, differences)
