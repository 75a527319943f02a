"""Studies with invented ranks, logs and measurements instead of training: nothing is opened, and nothing is on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hnclip.config import TrainConfig
from hnclip.evaluation import summarize
from hnclip.evaluation.ranks import Ranks
from hnclip.evaluation.retrieval import EvaluationResult
from hnclip.studies.plan import MEASURED, MeasureJob, Place, Plan, RunJob
from hnclip.studies.results import StudyResults
from hnclip.studies.spec import Domain, GallerySpec, Setting, Study
from hnclip.studies.store import Store

NOWHERE = TrainConfig(model="no-such-model", data="no-such-data")
Evaluate = Callable[[str, str, str, int], EvaluationResult | None]
"""By row, domain, gallery and seed; None for a run that is missing."""


def queries(skill: float, seed: int, *, images: int = 60, captions: int = 1, group: int = 2) -> EvaluationResult:
    """Ranks of which a share of about `skill` is 1, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def ranks(count: int) -> torch.Tensor:
        wrong = torch.randint(2, 30, (count,), generator=generator)
        return torch.where(torch.rand(count, generator=generator) < skill, 1, wrong)

    owner = torch.arange(images).repeat_interleave(captions)
    found = Ranks(ranks(len(owner)), ranks(images), owner)
    names = tuple(f"r{number}" for number in range(images))
    return EvaluationResult(found, torch.arange(images) // group, names, summarize(found), split="test")


class SmallStore(Store):
    """What is stored, in memory."""

    def __init__(self, measured: Callable[[str, str], dict[str, Any] | None]) -> None:
        super().__init__(Path("no-such-store"))
        self.results: dict[tuple[str, GallerySpec], EvaluationResult] = {}
        self.logs: dict[str, list[dict[str, Any]]] = {}
        self.measured = measured

    def result(self, job: RunJob, gallery: GallerySpec) -> EvaluationResult | None:
        return self.results.get((job.identity, gallery))

    def training(self, job: RunJob) -> dict[str, Any] | None:
        epochs = {name: {"epoch": 1, "mean_R@1": 50.0} for name in ("best", "last")}
        trained = job.identity in self.logs or any(identity == job.identity for identity, _ in self.results)
        return {"seconds": 60.0, **epochs} if job.trained and trained else None

    def metrics(self, job: RunJob, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.logs.get(job.identity, ()) if entry["kind"] == kind]

    def measurement(self, job: MeasureJob) -> dict[str, Any] | None:
        return self.measured(job.kind, job.domain.name)


def study_results(
    study: Study,
    evaluate: Evaluate = lambda row, domain, gallery, seed: None,
    *,
    domains: Sequence[str] = ("a",),
    seeds: tuple[int, ...] = (1,),
    galleries: Mapping[str, tuple[str, ...]] | None = None,
    logs: Callable[[str, str, int], list[dict[str, Any]]] = lambda row, domain, seed: [],
    measured: Callable[[str, str], dict[str, Any] | None] = lambda kind, domain: None,
    base: TrainConfig = NOWHERE,
) -> StudyResults:
    """The results of a study in a store that holds what these functions return.

    Args:
        logs: entries of a run's log by row, domain and seed.
        measured: measurements by kind and domain.
    """
    places = tuple(Domain(name, (galleries or {}).get(name, (name,))) for name in domains)
    store, runs, measures = SmallStore(measured), [], []
    setting = Setting(study, base, places, seeds)
    for domain in places:
        shown = setting.galleries_of(domain)
        for row in study.rows:
            for seed in seeds if row.trained else seeds[:1]:
                identity = f"{row.name}/{domain.name}/{seed}"
                where = {study.name: (Place(row.name, domain.name, seed),)}
                config = replace(base, data=domain.data, seed=seed)
                runs.append(RunJob(identity, config, row.trained, row.matched, shown, where))
                found = {(identity, gallery): evaluate(row.name, domain.name, gallery.name, seed) for gallery in shown}
                store.results |= {place: result for place, result in found.items() if result is not None}
                if row.trained and (entries := logs(row.name, domain.name, seed)):
                    store.logs[identity] = entries
        for kind in [part for part in study.parts if part in MEASURED]:
            where = {study.name: (Place(kind, domain.name, seeds[0]),)}
            measures.append(MeasureJob(f"{kind}/{domain.name}", kind, base, domain, (), where))
    return StudyResults(setting, Plan(tuple(runs), tuple(measures)), store)


def evaluation(epoch: int, recall: float, kind: str = "evaluation") -> dict[str, Any]:
    """A log entry with the same R@1 in both directions."""
    directions = {direction: {"R@1": recall} for direction in ("text_to_image", "image_to_text")}
    return {"kind": kind, "epoch": epoch, "mean_R@1": recall, **directions}
