"""Runs that are trained once, found again with the same digits, and chosen without the test split."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from hnclip.analysis.heads import TowerFeatures
from hnclip.studies import head_runs as module
from hnclip.studies.head_runs import HeadRun, HeadRuns, Point
from hnclip.studies.tower_heads import HeadSettings, MarginLoss, scaled

SETTINGS = HeadSettings(epochs=2, micro_batch=8, accumulate=2, width=4)
POINTS = [Point(MarginLoss(), "micro", 0.01), Point(MarginLoss(0.1), "micro", 0.01), Point(MarginLoss(), "batch", 0.03)]


def pairs(count: int, seed: int) -> TowerFeatures:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 3, generator=generator)
    sides = [
        hidden @ torch.randn(3, width, generator=torch.Generator().manual_seed(width))
        + 0.3 * torch.randn(count, width, generator=generator)
        for width in (6, 5)
    ]
    return TowerFeatures(*sides, torch.arange(count), torch.arange(count), torch.arange(count))


TRAIN, VALIDATION, TEST = pairs(70, 0), pairs(20, 1), pairs(18, 2)


def runs(cache: Path, **options) -> HeadRuns:
    given = {"train": TRAIN, "validation": VALIDATION, "settings": SETTINGS, "seeds": (0, 1), **options}
    return HeadRuns(cache=cache, **given)


def forbid(*_, **__):
    raise AssertionError("nothing is left to train")


def test_a_run_is_found_again_with_the_same_digits(tmp_path, monkeypatch) -> None:
    first = runs(tmp_path)
    chosen = first.choose(POINTS)
    ranks = first.measure(chosen, TEST)
    monkeypatch.setattr(module, "train_tower_heads", forbid)
    again = runs(tmp_path)
    assert again.choose(POINTS) == chosen
    assert all(torch.equal(a.text_to_image, b.text_to_image) for a, b in zip(ranks, again.measure(chosen, TEST)))
    for change in (
        {"train": pairs(70, 5)},
        {"validation": pairs(20, 5)},
        {"settings": replace(SETTINGS, width=3)},
        {"seeds": (2,)},
    ):
        with pytest.raises(AssertionError, match="nothing is left"):
            runs(tmp_path, **change).choose(POINTS[:1])
    with pytest.raises(AssertionError, match="nothing is left"):
        again.measure(chosen, pairs(18, 5))


def test_a_killed_study_goes_on(tmp_path, monkeypatch) -> None:
    whole = runs(tmp_path / "whole").choose(POINTS)
    train, trained = module.train_tower_heads, []

    def dies_at_the_fourth(*args, **options):
        trained.append(options["seed"])
        if len(trained) == 4:
            raise KeyboardInterrupt
        return train(*args, **options)

    monkeypatch.setattr(module, "train_tower_heads", dies_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        runs(tmp_path / "killed").choose(POINTS)
    assert runs(tmp_path / "killed").choose(POINTS) == whole
    assert len(trained) == 4 + 3  # of six runs three were kept
    assert not list((tmp_path / "killed").rglob(".*"))


def test_the_best_mean_over_seeds_is_chosen_and_of_equals_the_first(tmp_path, monkeypatch) -> None:
    def run(self: HeadRuns, point: Point, seed: int) -> HeadRun:
        table = {0: [(9, 30), (12, 20)], 1: [(10, 31), (31, 10)], 2: [(20, 31), (20, 10)]}
        values = tuple(float(value) for value in table[POINTS.index(point)][seed])
        return HeadRun(values, (1.0, 2.0 + seed), (0.5, 0.6 + seed))

    monkeypatch.setattr(HeadRuns, "run", run)
    found = runs(tmp_path).choose(POINTS)
    assert (found.point, found.epoch, found.validation) == (POINTS[0], 2, 25.0)
    assert (found.mean("scale"), found.mean("similarity")) == (2.5, pytest.approx(1.1))
    found = runs(tmp_path).choose(POINTS[1:])
    assert (found.point, found.epoch, found.validation) == (POINTS[1], 1, 20.5)
    assert runs(tmp_path).choose(POINTS[2:]).validation == 20.5
    assert runs(tmp_path).choose(POINTS[:0:-1]).epoch == 2
    with pytest.raises(ValueError, match="at least one point"):
        runs(tmp_path).choose([])


def test_measured_heads_are_those_of_the_chosen_epoch(tmp_path) -> None:
    found = runs(tmp_path)
    chosen = found.choose(POINTS[:1])
    for epoch in (1, 2):
        some = replace(chosen, epoch=epoch, validation=fmean(run.validation[epoch - 1] for run in chosen.runs))
        heads = [found._heads(POINTS[0], seed, 2)[epoch - 1] for seed in (0, 1)]
        for seed, ranks in enumerate(found.measure(some, TEST)):
            assert torch.equal(ranks.image_to_text, heads[seed].ranks(scaled(TEST)).image_to_text)


def test_runs_of_another_machine_are_noticed(tmp_path) -> None:
    chosen = runs(tmp_path).choose(POINTS[:1])
    for file in (tmp_path / "runs").iterdir():
        content = json.loads(file.read_text())
        content["run"]["validation"] = [value + 0.5 for value in content["run"]["validation"]]
        file.write_text(json.dumps(content))
    changed = runs(tmp_path)
    other = changed.choose(POINTS[:1])
    assert other.validation == chosen.validation + 0.5
    with pytest.raises(ValueError, match="another machine"):
        changed.measure(other, TEST)


def test_progress_counts_the_runs_of_every_point(tmp_path) -> None:
    advanced: list[tuple[int, str]] = []
    runs(tmp_path, advance=lambda done, text: advanced.append((done, text))).choose(POINTS)
    assert len(advanced) == 3
    assert advanced[1] == (2, "micro, fixed margin 0.1, rate 0.01")


def test_bad_input_gets_a_sentence(tmp_path) -> None:
    with pytest.raises(ValueError, match="train split has 1 pictures"):
        runs(tmp_path, train=TRAIN.take(torch.tensor([0])))
    with pytest.raises(ValueError, match="validation split has 15 pictures"):
        runs(tmp_path, validation=VALIDATION.take(torch.arange(15)))
    with pytest.raises(ValueError, match="one family"):
        runs(tmp_path, validation=replace(VALIDATION, groups=torch.zeros(20, dtype=torch.int64)))
    with pytest.raises(ValueError, match="1 image features are not finite"):
        replace(TRAIN, image=TRAIN.image.index_fill(0, torch.tensor([3]), float("nan")))
    with pytest.raises(ValueError, match="image features are 6 and 5 wide"):
        runs(tmp_path, validation=replace(VALIDATION, image=VALIDATION.text))
    for seeds in ((), (1, 1)):
        with pytest.raises(ValueError, match="seeds must"):
            runs(tmp_path, seeds=seeds)
    found = runs(tmp_path)
    with pytest.raises(ValueError, match="test split has 2 pictures"):
        found.measure(found.choose(POINTS[:1]), TEST.take(torch.arange(2)))
