"""From what `run_study` is asked for to studies with their settings."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hnclip.config import ReadConfig, RunOptions, with_fields
from hnclip.data.benchmarks import BENCHMARKS
from hnclip.data.sources import open_data
from hnclip.objectives.registry import MethodChoice
from hnclip.recipes import PAPER_GALLERIES, PAPER_RATES, RECIPES, RESULTS_RATES
from hnclip.studies.catalogue import RESULTS_DATA, RESULTS_FIELDS, STUDIES
from hnclip.studies.spec import SEEDS, Domain, Setting, Study
from hnclip.training.setup import choose_precision
from hnclip.util.device import find_device

log = logging.getLogger(__name__)

ALL = "all"
OPEN = ("gamma", "margin", "center", "mask_duplicates")  # of the objective, what rows do not set themselves
OPTIONS_OF_THEIR_OWN = ("model", "data", "read", "seed", "watch", "out", "device", "threads")
RUN_FIELDS = ("speed", "save_minutes", "evaluate_batch", "tensorboard")


def settings_of(
    names: str,
    *,
    data: Sequence[str] = (),
    tests: Sequence[str] = (),
    model: str | None = None,
    recipe: str | None = None,
    set: Sequence[str] = (),
    seeds: Sequence[int] = (),
    read: ReadConfig | None = None,
    device: str = "auto",
) -> list[Setting]:
    """Every study with what it runs on, by the arguments of `run_study`. Of `all`, those that need two domains are left
    out if there is one."""
    if recipe not in (None, *RECIPES):
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    if len({*seeds}) < len(seeds):
        raise ValueError(f"seeds hold a seed twice: {' '.join(map(str, seeds))}")
    read = read or ReadConfig()
    recipe = recipe or ("demo" if model in (None, "bundled") else "paper")
    is_paper, is_results = recipe.partition("/")[0] == "paper", recipe == "results"
    recipe_config = RECIPES[recipe]()
    recipe_config = replace(recipe_config, read=read, model=model or recipe_config.model)
    fields, _ = _split_fields(set)
    rates: Mapping[MethodChoice, float] = PAPER_RATES if is_paper else RESULTS_RATES if is_results else {}
    if "optim.lr" in fields:  # then one rate for all was asked for
        rates = {}
    found = []
    for study in _studies_named(names):
        base = with_fields(recipe_config, {**(RESULTS_FIELDS.get(study.name, {}) if is_results else {}), **fields})
        # "auto" is another number format on another device, and so another run.
        precision = choose_precision(base.optim.precision, find_device(device))
        base = replace(base, optim=replace(base.optim, precision=precision))
        sources = data or (is_results and RESULTS_DATA.get(study.name, RESULTS_DATA[ALL])) or (base.data,)
        domains = domains_of(sources, tests, read, paper=is_paper)
        if len(domains) > 1 or study.columns == "own":
            found.append(Setting(study, base, domains, tuple(seeds) or SEEDS[: study.seeds], rates))
        elif names == ALL:
            log.info(f"{study.name} is left out: it needs two domains in --data")
        else:
            raise ValueError(f"{study.name} trains on one domain and tests on another: name two or more with --data")
    return found


def _studies_named(names: str) -> list[Study]:
    """`main`, `main,gamma`, or `all`: those of the catalogue, each once."""
    found = [*STUDIES] if names == ALL else list(dict.fromkeys(names.split(",")))
    if unknown := [name for name in found if name not in STUDIES]:
        raise ValueError(f"there is no study {unknown[0]!r}: there are {', '.join(STUDIES)}; or all, or list")
    return [STUDIES[name] for name in found]


def run_options_of(set_fields: Sequence[str], *, device: str, threads: int) -> RunOptions:
    """Where and how the runs of a study are executed."""
    _, fields = _split_fields(set_fields)
    return with_fields(RunOptions(device=device, threads=threads), fields)


def _split_fields(given: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of --set that belong to the configuration of a run, and those of `RunOptions`.

    >>> _split_fields(["optim.lr=1e-4", "objective.mask-duplicates=false", "save_minutes=9"])
    ({'optim.lr': 0.0001, 'objective.mask_duplicates': False}, {'save_minutes': 9})
    """
    config: dict[str, Any] = {}
    run: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        group, _, field = name.partition(".")
        if not equals:
            raise ValueError(f"--set takes KEY=VALUE, for example optim.epochs=2, got {text!r}")
        if group in OPTIONS_OF_THEIR_OWN or (group == "objective" and field not in OPEN):
            raise ValueError(
                f"--set {name}: rows differ in it, or it is an option of hnclip study; of the objective, "
                f"{', '.join(OPEN)} can be set"
            )
        found = run if group in RUN_FIELDS else config
        found[name] = value
        with suppress(json.JSONDecodeError):
            found[name] = json.loads(value)
    return config, run


def domains_of(data: Sequence[str], tests: Sequence[str], read: ReadConfig, *, paper: bool) -> tuple[Domain, ...]:
    """Domains with their galleries.

    Args:
        data: to train on.
        tests: further galleries. One that the paper has for a domain belongs to that domain, any other to all.
        paper: the paper's galleries for its domains, instead of their test splits.
    """
    galleries = {source.partition("=")[0]: _own_galleries(source, read, paper=paper) for source in data}
    if len(galleries) < len(data):
        raise ValueError(f"--data names a source twice: {' '.join(data)}")
    for test in tests:
        name = test.partition("=")[0]
        owners = [owner for owner in galleries if name in PAPER_GALLERIES.get(owner, ())]
        for owner in owners or galleries:  # one that is named with its folder replaces the same without
            others = [gallery for gallery in galleries[owner] if gallery.partition("=")[0] != name]
            galleries[owner] = (*others, test)
    for name, found in galleries.items():
        if not found:
            raise ValueError(f"{name} has no test split: name data to test on with --tests")
    return tuple(map(Domain, data, galleries.values()))


def _own_galleries(source: str, read: ReadConfig, *, paper: bool) -> tuple[str, ...]:
    """What a domain is tested on by default: its test split, if it has one, or what the paper tests on."""
    name, _, folder = source.partition("=")
    if paper and name in PAPER_GALLERIES:
        # In the folder of the domain, if both are read from the same files.
        sharing = [one for one in BENCHMARKS if {*BENCHMARKS[one].folders} & {*BENCHMARKS[name].folders}]
        return tuple(f"{one}={folder}" if folder and one in sharing else one for one in PAPER_GALLERIES[name])
    splits = BENCHMARKS[name].splits if name in BENCHMARKS else open_data(source, read).splits()
    return (source,) if "test" in splits else ()
