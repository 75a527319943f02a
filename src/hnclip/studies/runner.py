"""`hnclip study`: plan, do what is missing, write the reports."""

from __future__ import annotations

import csv
import logging
import shlex
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hnclip.config import ReadConfig, option_words
from hnclip.options import Study as Options
from hnclip.studies.identity import UNKNOWN, gallery_identity, model_identity, pair_count, training_records
from hnclip.studies.plan import Job, MeasureJob, Plan, RunJob, plan
from hnclip.studies.settings import Entry, entries_of, run_options_of
from hnclip.studies.spec import Gallery, galleries_of
from hnclip.studies.store import Busy, Store
from hnclip.util.files import replace_file
from hnclip.util.tables import text_table
from hnclip.util.text import counted, duration

log = logging.getLogger(__name__)

FAILURES = "failures.log"  # in the directory of the store
MEASUREMENTS = "measurements.csv"
WAIT = 10.0  # seconds between looks at jobs of other processes
DONE, TO_EVALUATE, BEGUN, TO_DO, NOT_KNOWN = "done", "to evaluate", "begun", "to do", "not known"


@dataclass(frozen=True)
class Failure:
    """A job that could not be done, and why."""

    job: Job
    reason: str

    def __str__(self) -> str:
        return f"{self.job.title} failed: {self.reason}"


@dataclass(frozen=True)
class StudyOutcome:
    """What a call of the command came to, for people and for programs."""

    text: str
    content: dict[str, Any] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**self.content, "failures": list(map(str, self.failures))}


def study_command(options: Options) -> StudyOutcome:
    """Do what the options ask for.

    Raises:
        ValueError: a study cannot be made of the options, the data or the model; nothing has been run.
    """
    entries = entries_of(options)
    store = Store(options.out / "runs", run_options_of(options))
    if options.dry_run:
        return _dry_run(plan(entries), store)
    _check_out(options.out, [study.name for study, _ in entries])
    _check_inputs(entries)
    planned = plan(entries)
    failures = tuple(run(planned, store, shard=options.shard))
    missing = [job for job in planned.jobs if not store.is_done(job)]
    state = f"{len(planned.jobs) - len(missing)} of {len(planned.jobs)} jobs are done"
    content: dict[str, Any] = {"jobs": len(planned.jobs), "missing": [job.title for job in missing]}
    if options.shard and missing:
        return StudyOutcome(f"{state}: the tables are written when all are", content, failures)
    texts = _write_reports(options, entries, planned, store, content)
    texts += [f"incomplete: {state}"] if missing else []
    return StudyOutcome("\n\n".join([*texts, *_version_notes(planned.runs, store)]), content, failures)


def run(planned: Plan, store: Store, *, shard: str | None = None, wait: float = WAIT) -> list[Failure]:
    """Do what is missing of a plan, in its order. A job that fails stops no other; its traceback is in a log file.

    Args:
        shard: "K/N": only the K-th of N parts, and only measurements whose runs are done.
        wait: seconds between looks at jobs that other processes are doing.
    """
    number, count = map(int, shard.split("/")) if shard else (1, 1)
    waiting: list[Job] = [job for job in planned.jobs[number - 1 :: count] if not store.is_done(job)]
    failures: list[Failure] = []
    rate, busy = WorkRate(planned.runs, store), set[str]()
    total = len(waiting)
    while waiting:
        later: list[Job] = []
        for place, job in enumerate(waiting):
            if store.is_done(job):  # by another process, meanwhile
                continue
            if isinstance(job, MeasureJob) and (lacking := [one for one in job.needs if not store.is_done(one)]):
                if not shard and not any(one in later for one in lacking):
                    failures.append(Failure(job, f"it needs {lacking[0].title}, which failed"))
                elif not shard:
                    later.append(job)
                continue
            if job.identity not in busy:
                open_jobs = [*waiting[place:], *later]
                log.info(f"job {total - len(open_jobs) + 1} of {total}{rate.time_left(open_jobs)}: {job.title}")
            try:
                store.do(job)
            except Busy:
                if job.identity not in busy:
                    log.info("another process is doing it")
                busy.add(job.identity)
                later.append(job)
            except Exception as error:
                failures.append(Failure(job, _first_line(error)))
                log.warning(f"{failures[-1]} (traceback in {_log_failure(store, failures[-1])})")
            else:
                rate.add(job)
        waiting = later
        if waiting:
            time.sleep(wait)
    return failures


class WorkRate:
    """Training pairs per second, by the finished runs of a plan."""

    def __init__(self, runs: Sequence[RunJob], store: Store) -> None:
        self._store, self._pairs, self._seconds = store, 0, 0.0
        for job in runs:
            self.add(job)

    def add(self, job: Job) -> None:
        if isinstance(job, RunJob) and (result := self._store.training(job)) is not None:
            self._pairs += _work(job)
            self._seconds += result["seconds"]

    def seconds(self, jobs: Sequence[Job]) -> float | None:
        """How long the training of these jobs takes, one after the other; None before a run is finished."""
        if not self._pairs:
            return None
        left = [_work(job) for job in jobs if isinstance(job, RunJob) and not self._store.is_trained(job)]
        return sum(left) * self._seconds / self._pairs

    def time_left(self, jobs: Sequence[Job]) -> str:
        seconds = self.seconds(jobs)
        return f", about {duration(seconds)} left" if seconds else ""


def _work(job: RunJob) -> int:
    """Pairs that a run trains on, in all epochs."""
    return (pair_count(job.config) or 0) * job.config.optim.epochs if job.trained else 0


def _dry_run(planned: Plan, store: Store) -> StudyOutcome:
    """The jobs of a plan with their state. Nothing is run or written."""
    states = [_state(job, store) for job in planned.jobs]
    rows, jobs = [], []
    for job, state in zip(planned.jobs, states):
        config, trained = job.config, isinstance(job, RunJob) and job.trained
        pairs, epochs = (pair_count(config), config.optim.epochs) if trained else (None, None)
        rows.append([job.title, "–" if pairs is None else f"{pairs:,}", str(epochs or "–"), state])
        places = {study: [place._asdict() for place in places] for study, places in job.places.items()}
        identity = None if state == NOT_KNOWN else job.identity
        entry = {"identity": identity, "title": job.title, "state": state, "places": places, "trained": trained}
        galleries = [one.name for one in job.galleries] if isinstance(job, RunJob) else []
        jobs.append(entry | {"pairs": pairs, "epochs": epochs, "galleries": galleries})
    left = [job for job, state in zip(planned.jobs, states) if state != DONE]
    seconds = None if NOT_KNOWN in states else WorkRate(planned.runs, store).seconds(left)
    text = ", ".join(f"{number} {state}" for state, number in Counter(states).items())
    text = f"{counted(len(states), 'job')}: {text}."
    if NOT_KNOWN in states:
        text += " What is there already is not known before model and data are here; pairs are the published numbers."
    elif seconds:
        text += f" Training takes about {duration(seconds)}, by the finished runs, one after the other."
    elif left:
        text += " How long it takes is not known before a run is finished."
    table = text_table(["job", "pairs", "epochs", "state"], rows)
    return StudyOutcome(f"{table}\n\n{text}", {"jobs": jobs, "to_do": len(left), "seconds": seconds})


def _state(job: Job, store: Store) -> str:
    if job.identity.startswith(UNKNOWN):
        return NOT_KNOWN
    try:
        if store.is_done(job):
            return DONE
        if isinstance(job, RunJob) and job.trained and store.is_trained(job):
            return TO_EVALUATE
    except (ValueError, OSError):  # a gallery is not here
        return NOT_KNOWN
    return BEGUN if store.is_begun(job) else TO_DO


def _check_out(out: Path, names: Sequence[str]) -> None:
    """Everything that will be written can be written."""
    for path in (out, out / "runs", *(out / name for name in names)):
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file, but a directory is written there: move it, or choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out).close()
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror or error}") from error


def _check_inputs(entries: Sequence[Entry]) -> None:
    """The model opens, and so do the records that are trained on and those that are evaluated on afterwards."""
    for study, setting in entries:
        model_identity(setting.base)
        for domain in setting.domains:
            training_records(replace(setting.base, data=domain.data))
            for gallery in (*galleries_of(study, domain, setting.domains), *map(Gallery, domain.galleries)):
                gallery_identity(gallery, setting.base.read)


def _write_reports(
    options: Options, entries: Sequence[Entry], planned: Plan, store: Store, content: dict[str, Any]
) -> list[str]:
    """Write the report of every study and the numbers of all; returns the reports as text."""
    from hnclip.studies.page import study_report, write_results
    from hnclip.studies.results import FIELDS, StudyResults

    results = [StudyResults(study, setting, planned, store) for study, setting in entries]
    texts, files, content["studies"] = [], list[Path](), []
    for found in results:
        name = found.study.name
        report = study_report(found)
        formats, figures = ("txt", "md", "tex", "json"), ("svg", "pdf")
        written = report.write(options.out / name, name, formats=formats, figures=figures)
        files += written
        content["studies"].append(report.data)
        texts.append(
            f"{report.to_text()}\n\nwritten: {', '.join(path.name for path in written)} in {options.out / name}"
        )
    with replace_file(options.out / MEASUREMENTS) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, FIELDS)
        table.writeheader()
        table.writerows(row for found in results for row in found.measurements())
    files.append(options.out / MEASUREMENTS)
    if options.docs is not None:
        files += write_results(results, options.docs, command_line(options))
        texts = [f"written: {options.docs / 'results.md'}"]
    content["files"] = list(map(str, files))
    return texts


def command_line(options: Options) -> str:
    """The command that writes the same page, without where and by which processes the runs are executed."""
    words = ["hnclip", "study", options.name]
    for name in ("recipe", "model", "data", "tests", "set", "seeds"):
        value = getattr(options, name) or ()
        words += [f"--{name}", *([value] if isinstance(value, str) else map(str, value))] if value else []
    words += option_words(options.read, ReadConfig(), "read.")
    return shlex.join([*words, "--docs", options.docs.name if options.docs else "docs"])


def _version_notes(runs: Sequence[RunJob], store: Store) -> list[str]:
    """A note if the runs were trained with several versions of libraries."""
    found = [store.versions(job) for job in runs if job.trained]
    names = {name for versions in found for name in versions}
    several = {name: sorted({versions[name] for versions in found if name in versions}) for name in sorted(names)}
    said = [f"{name} {' and '.join(versions)}" for name, versions in several.items() if len(versions) > 1]
    return [f"note: runs were trained with different versions: {', '.join(said)}"] if said else []


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _log_failure(store: Store, failure: Failure) -> Path:
    path = store.directory / FAILURES
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {failure}\n{traceback.format_exc()}\n")
    return path
