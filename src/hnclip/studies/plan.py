"""Which runs a study needs: every row on every domain with every seed, each run once however often it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hnclip.config import TrainConfig
from hnclip.objectives.registry import MethodChoice
from hnclip.studies.identity import Identity, model_identity, run_identity
from hnclip.studies.study import SEEDS, Domain, Study
from hnclip.studies.variant import Variant, resolve

PROBE = 5  # as the paper measures gradients


class Gallery(NamedTuple):
    """A split to evaluate on: the test split, or with `whole` all records, of which the test split is held out."""

    source: str
    whole: bool = False

    @property
    def name(self) -> str:
        plain = self.source.partition("=")[0]
        return f"{plain}, all pairs" if self.whole else plain


class Place(NamedTuple):
    """Where a run stands in a study: its row, the name of its domain, its seed."""

    row: str
    domain: str
    seed: int


@dataclass(frozen=True)
class Job:
    """A run, or the model as it comes, and the galleries that it is evaluated on.

    Args:
        config: of the run. Of an untrained model only its opening counts.
        trained, matched: as of `Variant`.
        places: where it stands, in which studies.
    """

    identity: Identity
    config: TrainConfig
    trained: bool
    matched: bool
    galleries: tuple[Gallery, ...]
    places: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """For people: its first place."""
        places = next(iter(self.places.values()))
        place = places[0]
        return f"{place.row}, {place.domain}, seed {place.seed}" if self.trained else place.row


@dataclass(frozen=True)
class Setting:
    """What a study is run on.

    Args:
        base: the recipe that rows change.
        domains: data to train on, with their galleries.
        seeds: of all rows alike; None takes as many of the paper's as a study asks for.
        rates: learning rates of methods that have their own; the others train at the recipe's.
    """

    base: TrainConfig
    domains: tuple[Domain, ...]
    seeds: tuple[int, ...] | None = None
    rates: Mapping[MethodChoice, float] = field(default_factory=dict)

    def seeds_of(self, study: Study) -> tuple[int, ...]:
        if self.seeds is not None:
            return self.seeds
        if study.seeds > len(SEEDS):
            raise ValueError(f"study {study.name} asks for {study.seeds} seeds: name them with --seeds")
        return SEEDS[: study.seeds]


def galleries_of(study: Study, domain: Domain, domains: Sequence[Domain]) -> tuple[Gallery, ...]:
    """What the runs of a domain are evaluated on in a study, in the order of its columns."""
    own = [Gallery(source) for source in domain.galleries]
    others = [Gallery(source) for other in domains if other != domain for source in other.galleries]
    found = {"own": own, "others": others, "all": [*own, *others]}[study.columns]
    if study.whole:
        found = [*found, Gallery(domain.data, whole=True)]
    return tuple(dict.fromkeys(found))


def identify(config: TrainConfig, *, trained: bool, matched: bool) -> Identity:
    """Of a run, or of the model as it comes."""
    return run_identity(config, matched=matched) if trained else model_identity(config)


def plan(studies: Sequence[Study], setting: Setting, *, identify: Callable[..., Identity] = identify) -> list[Job]:
    """The runs of all studies, each once: seed by seed, so that a plan that is cut short is even."""
    return plan_entries([(study, setting) for study in studies], identify=identify)


def plan_entries(
    entries: Iterable[tuple[Study, Setting]], *, identify: Callable[..., Identity] = identify
) -> list[Job]:
    """The same where every study has a setting of its own.

    Args:
        identify: tells runs apart, by their configuration and whether they are `trained` and `matched`.
    """
    found: dict[str, Job] = {}
    for study, setting in entries:
        for seed in setting.seeds_of(study):
            for domain in setting.domains:
                for row in study.rows:
                    job = _job(study, row, domain, seed, setting, identify)
                    known = found.get(str(job.identity))
                    found[str(job.identity)] = job if known is None else _merged(known, job)
    return list(found.values())


def _job(
    study: Study, row: Variant, domain: Domain, seed: int, setting: Setting, identify: Callable[..., Identity]
) -> Job:
    place = {study.name: (Place(row.name, domain.name, seed),)}
    galleries = galleries_of(study, domain, setting.domains)
    # An untrained model is the same whatever the domain and seed.
    config = replace(setting.base, data=domain.data, seed=seed)
    if row.trained:
        config = resolve(config, row)
        if row.method is not None and row.method in setting.rates and "optim.lr" not in row.set:
            config = replace(config, optim=replace(config.optim, lr=setting.rates[row.method]))
        if study.probe and not config.probe_gradients:
            config = replace(config, probe_gradients=PROBE)
        if study.watch:
            config = replace(config, watch=domain.galleries[0])
    identity = identify(config, trained=row.trained, matched=row.matched)
    return Job(identity, config, row.trained, row.matched, galleries, place)


def _merged(one: Job, other: Job) -> Job:
    places = {
        study: (*one.places.get(study, ()), *other.places.get(study, ())) for study in {**one.places, **other.places}
    }
    return replace(one, galleries=tuple(dict.fromkeys((*one.galleries, *other.galleries))), places=places)
