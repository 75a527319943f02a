"""The runs of one study, by row, domain and seed, with all that was measured of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.recipes import PAPER_GALLERIES
from hnclip.studies.plan import Gallery, Job, Place, Setting, galleries_of, plan
from hnclip.studies.store import Store
from hnclip.studies.study import Domain, Study
from hnclip.train.log import read_metrics


class Column(NamedTuple):
    """What a table has columns for: runs of one domain on one gallery."""

    domain: Domain
    gallery: Gallery

    @property
    def name(self) -> str:
        """The gallery; where it is not the domain's own, from where to where."""
        # A gallery that several domains have in common is nobody's own.
        paper = PAPER_GALLERIES.get(self.domain.name, ())
        own = self.gallery.source == self.domain.data or self.gallery.source.partition("=")[0] in paper
        return self.gallery.name if own else f"{self.domain.name} → {self.gallery.name}"


@dataclass(frozen=True)
class Findings:
    """A study with its finished runs. What is not there yet, or failed, is None wherever it is asked for."""

    study: Study
    setting: Setting
    store: Store
    jobs: Mapping[Place, Job]

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.setting.seeds_of(self.study)

    @property
    def domains(self) -> tuple[Domain, ...]:
        return self.setting.domains

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(
            Column(domain, gallery)
            for domain in self.domains
            for gallery in galleries_of(self.study, domain, self.domains)
        )

    def job(self, row: str, domain: Domain, seed: int) -> Job | None:
        """A finished run, or the untrained model."""
        job = self.jobs.get(Place(row, domain.name, seed))
        return job if job is not None and self.store.is_trained(job) else None

    def result(self, row: str, column: Column, seed: int) -> EvaluationResult | None:
        """What was measured of a run on a gallery."""
        job = self.job(row, column.domain, seed)
        if job is None or not self.store.result_path(job, column.gallery).exists():
            return None
        return self.store.result(job, column.gallery)

    def results(self, row: str, column: Column) -> dict[int, EvaluationResult]:
        """By seed, those that there are. An untrained model has one, whatever the seed."""
        seeds = self.seeds if self.study.row(row).trained else self.seeds[:1]
        return {seed: result for seed in seeds if (result := self.result(row, column, seed)) is not None}

    def home(self, row: str, domain: Domain, seed: int) -> Path | None:
        """The directory of a finished run."""
        job = self.job(row, domain, seed)
        return None if job is None or not job.trained else self.store.home(job)

    def training(self, row: str, domain: Domain, seed: int) -> dict[str, Any] | None:
        """`TrainResult` of a finished run: steps, seconds, best and last epoch with their validation R@1."""
        job = self.job(row, domain, seed)
        return None if job is None or not job.trained else self.store.training(job)

    def metrics(self, row: str, domain: Domain, seed: int, kind: str) -> list[dict[str, Any]]:
        """Entries of the log of a run: "step", "evaluation" (validation), "watched" (test), "gradients"."""
        home = self.home(row, domain, seed)
        return [] if home is None else read_metrics(home, kind)


def find(study: Study, setting: Setting, store: Store) -> Findings:
    """What the store has of a study."""
    return findings_of(study, setting, store, plan([study], setting))


def findings_of(study: Study, setting: Setting, store: Store, jobs: Sequence[Job]) -> Findings:
    """The same from a plan that holds the study among others."""
    places = {place: job for job in jobs for place in job.places.get(study.name, ())}
    return Findings(study, setting, store, places)
