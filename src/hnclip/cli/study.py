"""`hnclip study`."""

from __future__ import annotations

import logging
from dataclasses import field
from pathlib import Path
from typing import Annotated

import tyro
from pydantic.dataclasses import dataclass

from hnclip.cli.options import Output, OutputGroup, Printed, Recipe, SeveralData, arguments_of, sources
from hnclip.config import Number, ReadConfig
from hnclip.util.text import parse_share

log = logging.getLogger("hnclip")


@dataclass(frozen=True)
class StudyOptions:
    """Tables and figures of the paper, and controls that it lacks, on any data and model (hnclip docs studies). Trains
    missing runs and reuses finished ones. The same command resumes an interrupted study; several processes may run it
    at the same time."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """A study, several separated by commas, or all; list prints them."""
    data: SeveralData = ()
    """Domains to train on; each is also tested on its test split (hnclip docs data). The data of the recipe if not
    given."""
    model: str | None = None
    """As for `hnclip train` (hnclip docs models); the model of the recipe if not given."""
    tests: tuple[str, ...] = ()
    """Additional data to test on: long-dci is for runs on dci, urban-1k for runs on vg-paragraphs, any other for every
    domain. A recipe paper/… already includes those of the paper."""
    recipe: Recipe | None = None
    """Base settings of all rows, as for `hnclip train`; if not given, demo for the bundled model and paper for any
    other. With paper or paper/…, each method has the learning rate that the paper states for it. results is that of
    hnclip docs results, on scenes/park and scenes/shelf."""
    set: tuple[str, ...] = ()
    """Fields of the configuration by their dotted names, `optim.epochs=2 objective.gamma=0.25`, or of how runs are
    executed, `speed.recompute=true save_minutes=30`. Settings of a row, and its own learning rate, take precedence."""
    seeds: tuple[int, ...] = ()
    """Seeds of all rows; if not given, as many of 42, 1337, 3407 as the study requires."""
    out: Path = Path("runs/studies")
    """Runs are written to OUT/runs, shared by all studies, tables and figures to OUT/NAME."""
    docs: Path | None = None
    """Also write results.md and its figures, one page about all studies of the call, to this directory."""
    dry_run: bool = False
    """Print the planned runs, their state, and the time left if finished runs tell it. The data of benchmarks and the
    model need not be present."""
    shard: str | None = None
    """K/N: execute the K-th of N parts of the plan, for example 1/4, 2/4, 3/4, 4/4 on four machines that share OUT. The
    process that finds everything done writes the tables."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""
    threads: Number = 0
    """CPU threads of a run; 0 leaves the choice to torch. Results are bit-identical only for the same number."""
    read: ReadConfig = field(default_factory=ReadConfig)
    output: OutputGroup = field(default_factory=Output)

    def __post_init__(self) -> None:
        if self.shard is not None:
            parse_share(self.shard)

    def run(self) -> Printed:
        if self.name == "list":
            from hnclip.studies.catalogue import STUDIES

            listed = [{"name": name, "title": one.title, "question": one.question} for name, one in STUDIES.items()]
            lines = [f"{name:<12}  {one.title}. {one.question}" for name, one in STUDIES.items()]
            return Printed("\n".join(lines), listed)
        from hnclip.studies.runner import run_study

        outcome = run_study(**{**arguments_of(self), "data": tuple(sources(self.data))})
        for failure in outcome.failures:
            log.error(f"hnclip study: {failure}")
        return Printed(outcome.text, outcome.to_dict(), 1 if outcome.failures else 0)
