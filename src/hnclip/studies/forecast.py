"""A plan before it is done: what would run, what is there already, and how long the rest should take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Literal

from hnclip.config import TrainConfig
from hnclip.data.benchmarks import BENCHMARKS
from hnclip.models.load import RUN_CONFIG
from hnclip.studies import plan
from hnclip.studies.estimate import Expected, Rates, counts_of, gallery_size, measured, rates_of_store
from hnclip.studies.identity import Identity
from hnclip.studies.plan import Gallery, Job, plan_entries
from hnclip.studies.request import Entry, is_here
from hnclip.studies.store import Store
from hnclip.train.log import read_metrics
from hnclip.util.tables import text_table
from hnclip.util.text import duration

State = Literal["done", "to evaluate", "half done", "made by other versions", "to do", "not known"]
NOT_KNOWN = "not known before model and data are here"
_UNSEEN = "unseen"  # in place of the versions of an identity


@dataclass(frozen=True)
class Line:
    """One run of the plan. `expected` is of what is left of it; None where nothing tells."""

    job: Job
    state: State
    pairs: int
    expected: Expected | None

    @property
    def is_open(self) -> bool:
        return self.state != "done"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        job, expected = self.job, self.expected
        return {
            "identity": None if self.state == "not known" else str(job.identity),
            "places": {study: [place._asdict() for place in places] for study, places in job.places.items()},
            "trained": job.trained,
            "epochs": job.config.optim.epochs if job.trained else 0,
            "pairs": self.pairs if job.trained else 0,
            "galleries": [gallery.name for gallery in job.galleries],
            "state": self.state,
            "seconds": None if expected is None else asdict(expected),
        }


@dataclass(frozen=True)
class Forecast:
    """The whole plan."""

    lines: tuple[Line, ...]
    rates: Rates

    @property
    def open(self) -> list[Line]:
        return [line for line in self.lines if line.is_open]

    def total(self, part: str = "seconds") -> float | None:
        """Seconds of all that is left, or None if something of it is not known."""
        found = [None if line.expected is None else getattr(line.expected, part) for line in self.open]
        return None if None in found else float(sum(value for value in found if value is not None))

    def speeds(self) -> list[tuple[str, float | None, str]]:
        """Rows of the studies with pairs per second and who says so; each name once."""
        found: dict[str, tuple[float | None, str]] = {}
        for line in self.lines:
            if line.job.trained:
                rate = self.rates.of(line.job.config)
                for places in line.job.places.values():
                    for place in places:
                        told = (None, "not measured") if rate is None else (rate.pairs_per_second, rate.source)
                        found.setdefault(place.row, told)
        return [(name, *told) for name, told in found.items()]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        names = ("row", "images_per_second", "source")
        return {
            "runs": [line.to_dict() for line in self.lines],
            "to_do": len(self.open),
            "seconds": self.total(),
            "evaluation_seconds": self.total("evaluation"),
            "rates": [dict(zip(names, told)) for told in self.speeds()],
        }

    def to_text(self) -> str:
        headers = ["row", "domain", "seed", "epochs", "pairs", "state", "expected"]
        plan = text_table(headers, [_cells(line) for line in self.lines])
        speeds = [[name, "–" if rate is None else f"{rate:.3g}", source] for name, rate, source in self.speeds()]
        parts = [plan, self._sentence()]
        if speeds:
            parts.append(text_table(["row", "images/s", "by"], speeds))
        if any(line.state == "not known" for line in self.lines):
            parts.append(f"Which runs there are already is {NOT_KNOWN}; pairs are the published numbers.")
        return "\n\n".join(parts)

    def _sentence(self) -> str:
        runs = f"{len(self.lines)} runs, {len(self.open)} of them to do"
        total, evaluation = self.total(), self.total("evaluation")
        if not self.open:
            return f"{runs}: tables and figures are a matter of seconds."
        if total is None or evaluation is None:
            known = [line.expected.seconds for line in self.open if line.expected is not None]
            if not known:
                return f"{runs}; how long they take is not known."
            return f"{runs}: about {duration(sum(known))} for {len(known)} of them; of the others nothing is known."
        share = f", {100 * evaluation / total:.0f} % of it evaluation" if total else ""
        return f"{runs}: about {duration(total)} one after the other{share}."


def _cells(line: Line) -> list[str]:
    job = line.job
    place = next(iter(job.places.values()))[0]
    expected = "–" if line.expected is None or not line.is_open else duration(line.expected.seconds)
    if not job.trained:
        return [place.row, "–", "–", "–", "–", line.state, expected]
    epochs = str(job.config.optim.epochs)
    return [place.row, place.domain, str(place.seed), epochs, f"{line.pairs:,}", line.state, expected]


def forecast(entries: Sequence[Entry], store: Store, *, measure: bool) -> Forecast:
    """Look at a plan without doing anything of it.

    Args:
        measure: time a step of what no finished run tells the speed of.
    """
    jobs = plan_entries(entries, identify=identify_unseen)
    states = [state_of(job, store) for job in jobs]
    rates = rates_of_store(store.directory, store.options)
    if measure:
        rates = measured(rates, [job for job, state in zip(jobs, states) if state != "done"])
    lines = []
    for job, state in zip(jobs, states):
        left = _left(job, state, store)
        galleries = _open_galleries(job, state, store)
        pairs = counts_of(job.config).pairs if job.trained else 0
        lines.append(Line(job, state, pairs, rates.expected(job, left=left, galleries=galleries)))
    return Forecast(tuple(lines), rates)


def identify_unseen(config: TrainConfig, *, trained: bool, matched: bool) -> Identity:
    """Of a run, or where a benchmark or the file of a model is not here a stand-in that tells runs of this plan
    apart."""
    if is_here(config.model):
        try:
            return plan.identify(config, trained=trained, matched=matched)
        except ValueError:
            if config.data.partition("=")[0] not in BENCHMARKS:
                raise
    opened = {"model": config.model, "context": config.context}
    content = (asdict(config) if trained else opened, matched)
    return Identity(sha256(json.dumps(content, default=str).encode()).hexdigest()[:10], _UNSEEN)


def state_of(job: Job, store: Store) -> State:
    """What the store has of a run."""
    if job.identity.versions == _UNSEEN:
        return "not known"
    if store.is_trained(job):
        return "to evaluate" if _open_galleries(job, "to evaluate", store) else "done"
    if (store.home(job) / RUN_CONFIG).exists():
        return "half done"
    return "made by other versions" if store.of_other_versions(job) else "to do"


def _open_galleries(job: Job, state: State, store: Store) -> list[Gallery]:
    """Those that a run was not evaluated on; one that is not here certainly was not."""
    if state == "done":
        return []
    if state != "to evaluate":
        return list(job.galleries)

    def is_missing(gallery: Gallery) -> bool:
        try:
            return not store.result_path(job, gallery).exists()
        except ValueError:
            gallery_size(gallery, job.config.read)  # published, or a mistake
            return True

    return [gallery for gallery in job.galleries if is_missing(gallery)]


def _left(job: Job, state: State, store: Store) -> float:
    """The share of the training that is not done, by the log of the run."""
    if state in ("done", "to evaluate"):
        return 0.0
    if state != "half done":
        return 1.0
    try:
        steps = read_metrics(store.home(job), "step")
    except (OSError, ValueError):  # stopped before the first line, or in the middle of one
        return 1.0
    optim = job.config.optim
    total = -(-counts_of(job.config).pairs // (optim.micro_batch * optim.accumulate)) * optim.epochs
    return 1 - min(1.0, steps[-1]["step"] / total) if steps else 1.0
