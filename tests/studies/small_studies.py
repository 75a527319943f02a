"""Studies with invented ranks instead of training: a store filled by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hnclip.config import TrainConfig
from hnclip.evaluate import summarize
from hnclip.evaluate.bootstrap import crossed_bootstrap
from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.studies.findings import Findings
from hnclip.studies.identity import Identity
from hnclip.studies.plan import Gallery, Job, Place, Setting, galleries_of
from hnclip.studies.saved_result import write_result
from hnclip.studies.store import Store
from hnclip.studies.study import Domain, Study

PICTURES = 60
# What tables hold does not depend on how finely intervals are drawn.
FEWER_RESAMPLES = partial(crossed_bootstrap, resamples=200)


def queries(
    skill: float, seed: int, *, pictures: int = PICTURES, captions: int = 1, family: int = 2
) -> EvaluationResult:
    """Ranks of which a share of about `skill` is 1, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def ranks(count: int) -> torch.Tensor:
        wrong = torch.randint(2, 30, (count,), generator=generator)
        return torch.where(torch.rand(count, generator=generator) < skill, 1, wrong)

    owner = torch.arange(pictures).repeat_interleave(captions)
    names = tuple(f"r{number}" for number in range(pictures))
    return EvaluationResult(Ranks(ranks(len(owner)), ranks(pictures), owner), torch.arange(pictures) // family, names)


def result(
    found: EvaluationResult, *, data: str = "a", apart: EvaluationResult | None = None, truncated: int = 0
) -> EvaluationResult:
    def measured(of: EvaluationResult) -> EvaluationResult:
        return replace(of, metrics=summarize(of.ranks))

    part = None if apart is None else measured(apart)
    return replace(measured(found), data=data, split="test", truncated=truncated, held_out=part)


class SmallStore(Store):
    """Galleries by their names alone: nothing is read."""

    def result_path(self, job: Job, gallery: Gallery) -> Path:
        return self.home(job) / "evaluations" / f"{gallery.name.replace('/', '-')}.safetensors"


Measure = Callable[[str, str, str, int], EvaluationResult | None]
"""Of row, domain, gallery and seed; None for a run that is missing."""


def findings(
    directory: Path,
    study: Study,
    measure: Measure,
    *,
    domains: Sequence[str] = ("a",),
    seeds: tuple[int, ...] = (1,),
    galleries: Mapping[str, tuple[str, ...]] | None = None,
    any_version: bool = False,
) -> Findings:
    """What a study finds in a store that holds what `measure` gives it."""
    places = tuple(Domain(name, (galleries or {}).get(name, (name,))) for name in domains)
    setting = Setting(TrainConfig(), places, seeds=seeds)
    store = SmallStore(directory, any_version=any_version)
    jobs: dict[Place, Job] = {}
    for domain in places:
        for row in study.rows:
            for seed in seeds:
                what = f"{row.name}/{domain.name}/{seed}" if row.trained else row.name
                identity = Identity(str(abs(hash(what))), "v")
                shown = galleries_of(study, domain, places)
                job = Job(identity, TrainConfig(data=domain.data, seed=seed), row.trained, False, shown)
                jobs[Place(row.name, domain.name, seed)] = job
                for gallery in shown:
                    found = measure(row.name, domain.name, gallery.name, seed)
                    if found is not None:
                        path = store.result_path(job, gallery)
                        write_result(path, found)
                        if row.trained:
                            training(store.home(job), best=1, epochs={1: 50.0, 2: 50.0})
    return Findings(study, setting, store, jobs)


def training(home: Path, *, best: int, epochs: Mapping[int, float], watched: Mapping[int, float] | None = None) -> None:
    """What a finished run leaves: its chosen epoch and its log."""
    last = max(epochs)
    told = {"best": {"epoch": best, "mean_R@1": epochs[best]}, "last": {"epoch": last, "mean_R@1": epochs[last]}}
    (home / "result.json").write_text(json.dumps({"steps": 1, "seconds": 1.0, **told}), encoding="utf-8")
    entries = [{"kind": "evaluation", "epoch": epoch, "mean_R@1": recall} for epoch, recall in epochs.items()]
    entries += [{"kind": "watched", "epoch": epoch, "mean_R@1": recall} for epoch, recall in (watched or {}).items()]
    (home / "metrics.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")
