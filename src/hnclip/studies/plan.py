"""Which runs and measurements studies need: each once, whichever studies ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from hnclip.config import TrainConfig
from hnclip.studies.identity import OPENING, READING, UNKNOWN, digest, gallery_identity, identify
from hnclip.studies.spec import Domain, GallerySpec, Setting, Study, Variant

COMPARING = ("retrievals", "step_time")  # measurements of the runs of a study's rows
MEASURED = ("geometry", "duplicates", *COMPARING)  # parts of reports that show a measurement of this kind


class Place(NamedTuple):
    """Where a run stands in a study: its row, the name of its domain, its seed."""

    row: str
    domain: str
    seed: int


Places = Mapping[str, tuple[Place, ...]]
"""By the name of the study."""


@dataclass(frozen=True)
class RunJob:
    """A run, or the model before training, and the galleries that it is evaluated on.

    Args:
        config: of the run, with what is observed along it. For an untrained model only its opening counts.
        trained, matched: as of `Variant`.
        places: where it stands, in which studies.
    """

    identity: str
    config: TrainConfig
    trained: bool
    matched: bool
    galleries: tuple[GallerySpec, ...]
    places: Places = field(default_factory=dict)

    @property
    def title(self) -> str:
        place = next(iter(self.places.values()))[0]
        return f"{place.row}, {place.domain}, seed {place.seed}" if self.trained else place.row


@dataclass(frozen=True)
class MeasureJob:
    """A measurement on one domain that a report shows.

    Args:
        kind: "geometry", "duplicates", "retrievals" or "step_time".
        config: the recipe on the data of the domain.
        runs: the runs that are measured or whose steps are, one for each row, with the first seed.
    """

    identity: str
    kind: str
    config: TrainConfig
    domain: Domain
    runs: tuple[RunJob, ...]
    places: Places = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.kind.replace('_', ' ')}, {self.domain.name}"

    @property
    def needs(self) -> tuple[RunJob, ...]:
        """Runs that must be done first; to time a step of a run, it need not be trained."""
        return self.runs if self.kind == "retrievals" else ()


Job = RunJob | MeasureJob


@dataclass(frozen=True)
class Plan:
    """The jobs of some studies, in the order in which they are done."""

    runs: tuple[RunJob, ...]
    measures: tuple[MeasureJob, ...]

    @property
    def jobs(self) -> tuple[Job, ...]:
        return (*self.runs, *self.measures)

    def of(self, study: Study) -> dict[Place, RunJob]:
        """The runs of a study by their places."""
        return {place: job for job in self.runs for place in job.places.get(study.name, ())}

    def measures_of(self, study: Study) -> dict[tuple[str, str], MeasureJob]:
        """The measurements of a study, by kind and name of the domain."""
        return {(job.kind, job.domain.name): job for job in self.measures if study.name in job.places}


def plan(settings: Sequence[Setting]) -> Plan:
    """The jobs of studies: seed by seed, so that a plan that is cut short is even.

    A run whose model or data cannot be opened is planned too; it fails with the reason when it is done.
    """
    runs: dict[str, RunJob] = {}
    for setting in settings:
        for seed, domain, row in product(setting.seeds, setting.domains, setting.study.rows):
            job = _run_job(setting, row, domain, seed)
            runs[job.identity] = _merged(runs[job.identity], job) if job.identity in runs else job
    measures: dict[str, MeasureJob] = {}
    for setting in settings:
        kinds = [part for part in setting.study.parts if part in MEASURED]
        for kind, domain in product(kinds, setting.domains):
            measure = _measure_job(setting, kind, domain, runs.values())
            known = measures.get(measure.identity, measure)
            measures[measure.identity] = replace(measure, places={**known.places, **measure.places})
    return Plan(tuple(runs.values()), tuple(measures.values()))


def _run_job(setting: Setting, row: Variant, domain: Domain, seed: int) -> RunJob:
    config = setting.config_of(row, domain, seed)
    identity = identify(config, trained=row.trained, matched=row.matched)
    places = {setting.study.name: (Place(row.name, domain.name, seed),)}
    return RunJob(identity, config, row.trained, row.matched, setting.galleries_of(domain), places)


def _merged(one: RunJob, other: RunJob) -> RunJob:
    """The same run for all places, with the galleries and observations of both."""
    watch = one.config.watch or other.config.watch
    probe = max(one.config.probe_gradients, other.config.probe_gradients)
    return replace(
        one,
        config=replace(one.config, watch=watch, probe_gradients=probe),
        galleries=tuple(dict.fromkeys((*one.galleries, *other.galleries))),
        places={
            study: (*one.places.get(study, ()), *other.places.get(study, ()))
            for study in {**one.places, **other.places}
        },
    )


def _measure_job(setting: Setting, kind: str, domain: Domain, runs: Iterable[RunJob]) -> MeasureJob:
    study, seed = setting.study, setting.seeds[0]
    config = replace(setting.base, data=domain.data, seed=seed)
    if kind in COMPARING:
        places = [Place(row.name, domain.name, seed) for row in study.rows]
        measured = tuple(next(job for job in runs if place in job.places.get(study.name, ())) for place in places)
        subjects = [job.identity for job in measured]
        if kind == "retrievals":
            try:
                subjects += [gallery_identity(GallerySpec(source), config.read) for source in domain.galleries]
            except (ValueError, OSError):  # they are not here
                subjects += [UNKNOWN]
    else:  # the model and the data alone, whatever is trained
        measured = ()
        kept = {name: getattr(config, name) for name in (*OPENING, *READING)}
        subjects = [identify(TrainConfig(**kept, seed=0))]
    identity = UNKNOWN * any(one.startswith(UNKNOWN) for one in subjects) + digest(kind, *subjects)
    return MeasureJob(identity, kind, config, domain, measured, {study.name: (Place(kind, domain.name, seed),)})
