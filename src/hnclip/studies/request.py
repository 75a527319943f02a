"""What `hnclip study` was asked for: studies, and the setting that they are run in."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hnclip.config import ReadConfig, RunOptions, TrainConfig, one_line, with_fields
from hnclip.data.benchmarks import BENCHMARKS
from hnclip.data.sources import open_data
from hnclip.models.load import BUNDLED, is_hub_name
from hnclip.objectives.registry import MethodChoice
from hnclip.options import Study as Options
from hnclip.recipes import PAPER_GALLERIES, PAPER_RATES, RECIPES
from hnclip.studies import miniature
from hnclip.studies.names import ALL, MINIATURE, studies_named
from hnclip.studies.plan import Setting
from hnclip.studies.study import Domain, Study
from hnclip.train.setup import choose_precision
from hnclip.util.device import find_device

log = logging.getLogger(__name__)

Entry = tuple[Study, Setting]

_OPEN = ("gamma", "margin", "center", "mask_duplicates")

# Fields of a run that are the study's own matter, and how to choose them.
_ELSEWHERE = {
    "out": "--out",
    "model": "--model",
    "data": "--data",
    "seed": "--seeds",
    "device": "--device",
    "threads": "--threads",
    "read": "--read.NAME",
    "watch": "a study that looks at every epoch",
}

# Fields of `RunOptions` that --set takes as well.
_RUN = ("speed", "save_minutes", "evaluate_batch", "tensorboard")

_FILES = (".pt", ".pth", ".bin", ".safetensors")  # endings of weights


def entries_of(options: Options) -> list[Entry]:
    """The studies, each with its setting."""
    if options.name == MINIATURE:
        return _miniature(options)
    studies = studies_named(options.name)
    setting = setting_of(options)
    if len(setting.domains) < 2:
        crossing = [study for study in studies if study.columns != "own"]
        names = ", ".join(study.name for study in crossing)
        if crossing and options.name != ALL:
            raise ValueError(f"{names} trains on one domain and tests on another: name two or more with --data")
        if crossing:
            log.info(f"{names} left out, which need two domains in --data")
        studies = [study for study in studies if study not in crossing]
    return [(study, setting) for study in studies]


def _miniature(options: Options) -> list[Entry]:
    given = [f"--{name}" for name in ("model", "data", "tests", "recipe", "set", "seeds") if getattr(options, name)]
    if given:
        raise ValueError(f"the miniature has settings of its own: leave {', '.join(given)} out")
    return [
        (study, replace(setting, base=_with_precision(setting.base, options.device)))
        for study, setting in miniature.entries()
    ]


def _with_precision(base: TrainConfig, device: str) -> TrainConfig:
    """`auto` is another number format on another device, and so another run."""
    precision = choose_precision(base.optim.precision, find_device(device))
    return replace(base, optim=replace(base.optim, precision=precision))


def recipe_of(options: Options) -> str:
    """The recipe's name; without one the demo's settings are the bundled model's, and the paper's any other's."""
    if options.recipe is not None:
        return options.recipe
    return "demo" if options.model in (None, "bundled") else "paper"


def setting_of(options: Options) -> Setting:
    """Recipe, domains, seeds and rates."""
    recipe = recipe_of(options)
    base = RECIPES[recipe]()
    base = replace(base, read=options.read, model=options.model or base.model)
    with _set_errors():
        chosen, _ = _split_fields(options.set)
        _check_objective(chosen)
        base = with_fields(base, chosen)
    base = _with_precision(base, options.device)
    domains = domains_of(options.data or (base.data,), options.tests, options.read, paper=_is_paper(recipe))
    rates = {} if "optim.lr" in chosen else rates_of(recipe)  # one rate for all is what was asked for then
    return Setting(base, domains, seeds=options.seeds or None, rates=rates)


def run_options_of(options: Options) -> RunOptions:
    """Where and how the runs of a study are executed."""
    with _set_errors():
        _, chosen = _split_fields(options.set)
        return with_fields(RunOptions(device=options.device, threads=options.threads), chosen)


def _split_fields(given: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of --set that belong to the configuration, and those that belong to `RunOptions`."""
    chosen = parse_fields(given)
    run = {name: value for name, value in chosen.items() if name.partition(".")[0] in _RUN}
    return {name: value for name, value in chosen.items() if name not in run}, run


@contextmanager
def _set_errors() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise ValueError(f"--set: {one_line(error)}") from error
    except ValueError as error:
        raise ValueError(f"--set: {error}") from error


def _check_objective(chosen: Mapping[str, Any]) -> None:
    """Rows are about objectives: only what they leave open can be said of all of them."""
    for name in chosen:
        group, _, field = name.partition(".")
        if group == "objective" and field not in _OPEN:
            have = ", ".join(f"objective.{one}" for one in _OPEN)
            raise ValueError(f"{name} is what the rows of a study differ in; of the objective {have} can be set")


def _is_paper(recipe: str) -> bool:
    return recipe.partition("/")[0] == "paper"


def rates_of(recipe: str) -> Mapping[MethodChoice, float]:
    """Learning rates of methods that differ from the recipe's."""
    if recipe == MINIATURE:
        return miniature.RATES  # type: ignore[return-value]
    return PAPER_RATES if _is_paper(recipe) else {}


def parse_fields(given: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` into fields by their dotted names; values are JSON, or text where they are none.

    >>> parse_fields(["optim.lr=1e-4", "objective.mask-duplicates=false", "cluster=4"])
    {'optim.lr': 0.0001, 'objective.mask_duplicates': False, 'cluster': 4}
    """
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not (equals and name):
            raise ValueError(f"it takes KEY=VALUE, for example optim.epochs=2, got {text!r}")
        if option := _ELSEWHERE.get(name.partition(".")[0]):
            raise ValueError(f"{name} is chosen by {option}")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
        if clash := next(
            (other for other in found if other.startswith(f"{name}.") or name.startswith(f"{other}.")), None
        ):
            raise ValueError(f"{name} and {clash} are both set, and one is part of the other")
    return found


def domains_of(data: Sequence[str], tests: Sequence[str], read: ReadConfig, *, paper: bool) -> tuple[Domain, ...]:
    """Domains with their galleries.

    Args:
        data: to train on.
        tests: further galleries. One that the paper has for a domain is of that domain alone, others are of all.
        paper: the paper's galleries for its domains, instead of their test splits.
    """
    names = [source.partition("=")[0] for source in data]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--data names {name} twice")
    galleries = {name: own_galleries(source, read, paper=paper) for name, source in zip(names, data)}
    for test in tests:
        name = test.partition("=")[0]
        owners = [owner for owner, known in PAPER_GALLERIES.items() if name in known and owner in names]
        for owner in owners or names:
            # One that is named with its folder takes the place of the same without.
            others = [gallery for gallery in galleries[owner] if gallery.partition("=")[0] != name]
            galleries[owner] = (*others, test)
    for name, found in galleries.items():
        if not found:
            raise ValueError(f"{name} has no test split: name data to test on with --tests")
    return tuple(Domain(source, galleries[name]) for name, source in zip(names, data))


def own_galleries(source: str, read: ReadConfig, *, paper: bool) -> tuple[str, ...]:
    """What a domain is tested on unasked: its test split, if it has one, or what the paper tests on."""
    name, _, folder = source.partition("=")
    if paper and name in PAPER_GALLERIES:
        return tuple(_beside(gallery, name, folder) for gallery in PAPER_GALLERIES[name])
    splits = BENCHMARKS[name].splits if name in BENCHMARKS else open_data(source, read).splits()
    return (source,) if "test" in splits else ()


def _beside(gallery: str, name: str, folder: str) -> str:
    """A gallery in the folder of a domain, if both are read from the same files."""
    shared = {*BENCHMARKS[gallery].folders} & {*BENCHMARKS[name].folders}
    return f"{gallery}={folder}" if folder and shared else gallery


def is_here(model: str) -> bool:
    """Whether a model can be told by what it holds. Names on the hub stand for what is behind them."""
    if model == BUNDLED or Path(model).exists():
        return True
    parts = model.split("+")
    return all(Path(part).exists() or (is_hub_name(part) and Path(part).suffix not in _FILES) for part in parts)


def check_out(out: Path) -> None:
    """Before any work: a directory that can be written."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file, not a directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror or error}") from error
