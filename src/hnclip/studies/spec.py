"""What a study is, as data: rows, columns and comparisons; and what it runs on. The studies are in `catalogue`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from hnclip.config import GlobalLoss, TrainConfig, with_fields
from hnclip.objectives.registry import MethodChoice, apply_method, with_global

SEEDS = (42, 1337, 3407)  # the paper's
PROBE = 5  # every N-th step, as the paper measures gradients

Columns = Literal["own", "others", "all"]


@dataclass(frozen=True)
class Variant:
    """One row of a study's table: what it changes of the recipe.

    Args:
        name: of the row.
        method: as `--method` of `hnclip train`; None leaves that of the recipe.
        global_loss: the global loss, as `--global-loss`; None leaves the method's own.
        set: fields of the configuration by their dotted names, `{"objective.gamma": 0.25}`.
        trained: False for the model as it is before training.
        matched: the fixed margin is γ·mean(Ḡ), with the mean over the training captions of the initial encoder.
        against: rows that this one is compared with.
        series, x: the curve that the row is a point of, and where on it.
        published: how the paper names the row, method and setting.
    """

    name: str
    method: MethodChoice | None = None
    global_loss: GlobalLoss | None = None
    set: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = True
    matched: bool = False
    against: tuple[str, ...] = ()
    series: str | None = None
    x: float | None = None
    published: tuple[str, str] | None = None


def resolve(base: TrainConfig, variant: Variant) -> TrainConfig:
    """The configuration of a row: the recipe's, with the row's method, global loss and fields, in this order."""
    config = base
    if variant.method is not None:
        config = apply_method(config, variant.method)
    if variant.global_loss is not None:
        config = with_global(config, variant.global_loss)
    return with_fields(config, variant.set)


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper, or a control that it lacks.

    Args:
        name: on the command line.
        title: in tables.
        question: what it answers, a sentence.
        rows: of the table, in order.
        parts: what its report shows, names of `hnclip.studies.page.PARTS`, in order.
        columns: test galleries of each training domain: its own, the others', or all.
        ks: lengths of the result list.
        seeds: how many of the paper's by default.
        tables: of the paper, by their printed numbers, that hold the same rows.
        watch: every epoch of its runs is also evaluated on the domain's own test gallery.
        probe: both losses and their gradients are measured along its runs.
        whole: also evaluate on all records as one gallery, training pairs included, as Long-DCI is.
    """

    name: str
    title: str
    question: str
    rows: tuple[Variant, ...]
    parts: tuple[str, ...] = ("recalls",)
    columns: Columns = "own"
    ks: tuple[int, ...] = (1, 5, 10)
    seeds: int = 1
    tables: tuple[str, ...] = ()
    watch: bool = False
    probe: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        if len({*names}) < len(names):
            raise ValueError(f"study {self.name} has two rows of the same name: {', '.join(names)}")
        if self.seeds > len(SEEDS):
            raise ValueError(f"study {self.name}: seeds is at most {len(SEEDS)}; name further ones with --seeds")
        for row in self.rows:
            if unknown := {*row.against} - {*names}:
                raise ValueError(f"study {self.name} compares {row.name!r} with {unknown}, which is no row of it")

    def row(self, name: str) -> Variant:
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True)
class Domain:
    """Data to train on, and the galleries that its models are tested on: its test split, or what the paper tests on."""

    data: str
    galleries: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.data.partition("=")[0]


class GallerySpec(NamedTuple):
    """Records to evaluate on: the test split of a source, or with `whole` all of it, with the test split held out."""

    source: str
    whole: bool = False

    @property
    def name(self) -> str:
        plain = self.source.partition("=")[0]
        return f"{plain}, all pairs" if self.whole else plain


@dataclass(frozen=True)
class Setting:
    """A study and what it runs on.

    Args:
        base: the recipe that rows change.
        domains: data to train on, with their galleries.
        seeds: of all rows.
        rates: learning rates of methods that have their own; the others train at the recipe's.
    """

    study: Study
    base: TrainConfig
    domains: tuple[Domain, ...]
    seeds: tuple[int, ...]
    rates: Mapping[MethodChoice, float] = field(default_factory=dict)

    def config_of(self, row: Variant, domain: Domain, seed: int) -> TrainConfig:
        """The configuration of a run, with the observations that the study asks for."""
        config = replace(self.base, data=domain.data, seed=seed)
        if not row.trained:
            return config
        config = resolve(config, row)
        if row.method is not None and row.method in self.rates and "optim.lr" not in row.set:
            config = with_fields(config, {"optim.lr": self.rates[row.method]})
        if self.study.probe:
            config = replace(config, probe_gradients=config.probe_gradients or PROBE)
        return replace(config, watch=domain.galleries[0]) if self.study.watch else config

    def galleries_of(self, domain: Domain) -> tuple[GallerySpec, ...]:
        """What the runs of a domain are evaluated on, in the order of the columns."""
        own = [GallerySpec(source) for source in domain.galleries]
        others = [GallerySpec(source) for other in self.domains if other != domain for source in other.galleries]
        found = {"own": own, "others": others, "all": [*own, *others]}[self.study.columns]
        return tuple(dict.fromkeys([*found, GallerySpec(domain.data, whole=True)] if self.study.whole else found))
