"""How long the runs of a plan should take: by runs that are finished, or by a step that is timed."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from hnclip.config import ReadConfig, RunOptions, TrainConfig
from hnclip.data.benchmarks import BENCHMARKS
from hnclip.evaluate.retrieval import open_task
from hnclip.models.load import RUN_RESULT
from hnclip.studies.identity import Trained
from hnclip.studies.plan import Gallery, Job
from hnclip.train.log import read_metrics
from hnclip.train.runs import saved_config, saved_options
from hnclip.train.setup import choose_precision
from hnclip.util.device import find_device

log = logging.getLogger(__name__)

FORWARD = 3.0  # a forward pass alone is taken as a third of one with its backward pass
PROBING = 2.0  # steps that a measurement of the gradients costs


class Cost(NamedTuple):
    """What of a configuration decides over the time that a pair takes in training. γ and its like do not."""

    model: str
    context: int | None
    method: str
    global_term: str
    token_term: bool
    adapt: tuple[str, str, int | str, int | str]
    micro_batch: int
    compared: int
    precision: str
    device: str
    threads: int


def cost_of(config: TrainConfig, options: RunOptions) -> Cost:
    objective, optim, adapt = config.objective, config.optim, config.adapt
    # Losses of B × B scores cost alike beside the towers.
    kind = objective.global_loss if objective.global_loss in ("none", "smoothed") else "pairs"
    together = optim.accumulate if optim.negatives == "batch" else 1
    return Cost(
        config.model,
        config.context,
        objective.method,
        kind,
        objective.token_weight > 0,
        (adapt.method, adapt.towers, adapt.freeze_image, adapt.freeze_text),
        optim.micro_batch,
        optim.micro_batch * together,
        choose_precision(optim.precision, find_device(options.device)),  # saved runs have what auto came to
        options.device,
        options.threads,
    )


@dataclass(frozen=True)
class Rate:
    """How fast a configuration trains, and who says so."""

    pairs_per_second: float
    source: str


@dataclass(frozen=True)
class Expected:
    """Seconds of what is left of a run."""

    training: float
    evaluation: float

    @property
    def seconds(self) -> float:
        return self.training + self.evaluation


class Rates:
    """Speeds of training by cost, and of evaluation by model: pictures with their caption per second."""

    def __init__(self, training: Mapping[Cost, Rate], evaluation: Mapping[str, float], options: RunOptions) -> None:
        self.training, self.evaluation, self.options = dict(training), dict(evaluation), options

    def of(self, config: TrainConfig) -> Rate | None:
        """Of a run, its measurements of gradients included."""
        rate = self.training.get(cost_of(config, self.options))
        if rate is None or not config.probe_gradients:
            return rate
        return replace(rate, pairs_per_second=rate.pairs_per_second / (1 + PROBING / config.probe_gradients))

    def pictures(self, config: TrainConfig) -> float | None:
        """Evaluated per second."""
        if config.model in self.evaluation:
            return self.evaluation[config.model]
        known = [rate.pairs_per_second for cost, rate in self.training.items() if cost.model == config.model]
        return FORWARD * max(known) if known else None  # those that do least beside encoding

    def expected(self, job: Job, *, left: float = 1.0, galleries: Sequence[Gallery] | None = None) -> Expected | None:
        """How long a run takes.

        Args:
            left: the share of its training that is not done.
            galleries: those that it is not evaluated on, all when left out.
        """
        config, counts = job.config, counts_of(job.config)
        pictures = sum(
            gallery_size(gallery, config.read) for gallery in (job.galleries if galleries is None else galleries)
        )
        speed = self.pictures(config)
        if speed is None:
            return None
        if not job.trained:
            return Expected(0.0, pictures / speed)
        rate = self.of(config)
        if rate is None:
            return None
        epochs = config.optim.epochs
        pictures += round(left * (epochs + 1) * (counts.validation + _watched(config)))
        return Expected(left * epochs * counts.pairs / rate.pairs_per_second, pictures / speed)


def rates_of_store(directory: Path, options: RunOptions) -> Rates:
    """What finished runs tell, for runs with these options."""
    speeds: dict[Cost, list[float]] = {}
    evaluated: dict[str, list[float]] = {}
    for home in sorted(directory.glob("*")):
        try:
            config, ran = saved_config(home), saved_options(home)
            seconds = json.loads((home / RUN_RESULT).read_text(encoding="utf-8"))["seconds"]
            steps, (data, *_) = read_metrics(home, "step"), read_metrics(home, "data")
            per_pair = fmean(1 / step["pairs_per_second"] for step in steps)
        except (OSError, ValueError, KeyError, ZeroDivisionError):
            continue  # no finished run
        speeds.setdefault(cost_of(config, ran), []).append(1 / per_pair)
        waited = sum(step["waited"] for step in steps)
        rest = seconds - waited - per_pair * data["pairs"] * config.optim.epochs
        pictures = (config.optim.epochs + 1) * data["validation_captions"]
        # Of a run that was resumed only the last part was timed, and measured gradients are in the rest too.
        if rest > 0 and not config.probe_gradients and config.watch is None:
            evaluated.setdefault(config.model, []).append(pictures / rest)
    training = {
        cost: Rate(median(found), "1 finished run" if len(found) == 1 else f"{len(found)} finished runs")
        for cost, found in speeds.items()
    }
    return Rates(training, {model: median(found) for model, found in evaluated.items()}, options)


def measured(rates: Rates, jobs: Sequence[Job]) -> Rates:
    """The same with a timed step for every cost in the plan that has no finished run. What cannot be timed here stays
    unknown, and is said."""
    found = dict(rates.training)
    for job in jobs:
        config, cost = job.config, cost_of(job.config, rates.options)
        if not job.trained or cost in found:
            continue
        log.info(f"timing a step: {job.places[next(iter(job.places))][0].row}")
        try:
            found[cost] = _timed(config, rates.options)
        except (ValueError, OSError, RuntimeError) as error:
            log.warning(f"no step of it can be timed here: {error}")
    return Rates(found, rates.evaluation, rates.options)


def _timed(config: TrainConfig, options: RunOptions) -> Rate:
    from hnclip.studies.step_time import measure_step

    optim = config.optim
    whole = optim.micro_batch if optim.negatives == "micro" else optim.micro_batch * optim.accumulate
    # A large model takes minutes for a whole step of a processor.
    large = config.model != "bundled" and find_device(options.device).type == "cpu"
    time = measure_step(config, options, pairs=2 if large else whole, turns=1 if large else 3)
    source = f"measured step of {time.measured_pairs} pairs on this machine, {time.source}"
    return Rate(time.pairs_per_second, source)


class Counts(NamedTuple):
    """Pairs that a run trains on, and pictures that it validates on."""

    pairs: int
    validation: int


def counts_of(config: TrainConfig) -> Counts:
    """From the data, or where these are not here from what a benchmark publishes."""
    whole = _whole_counts(Trained.by(config)._replace(fraction=1.0, limit=None))
    pairs = whole.pairs if config.fraction == 1 else round(config.fraction * whole.pairs)
    return whole._replace(pairs=min(pairs, config.limit or pairs))


@cache
def _whole_counts(trained: Trained) -> Counts:
    try:
        return Counts(len(trained.records()), len(trained.held_out()))
    except ValueError:
        benchmark = BENCHMARKS.get(trained.data.partition("=")[0])
        if benchmark is None or "train" not in benchmark.splits:
            raise
    pairs = benchmark.counts["train"]
    if "validation" in benchmark.splits:
        return Counts(pairs, benchmark.counts["validation"])
    held_out = max(2, round(trained.read.validation_share * pairs))
    return Counts(pairs - held_out, held_out)


@cache
def gallery_size(gallery: Gallery, read: ReadConfig) -> int:
    """Pictures that are evaluated, from the data or as published."""
    try:
        return len(open_task(gallery.source, "all" if gallery.whole else None, read).records)
    except ValueError:
        benchmark = BENCHMARKS.get(gallery.source.partition("=")[0])
        if benchmark is None:
            raise
        return sum(benchmark.counts.values()) if gallery.whole else benchmark.counts["test"]


def _watched(config: TrainConfig) -> int:
    return 0 if config.watch is None else gallery_size(Gallery(config.watch), config.read)
