"""`hnclip study`: plan, do what is missing, write the reports."""

from __future__ import annotations

import csv
import logging
import shlex
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hnclip.config import ReadConfig, option_words
from hnclip.report.document import Report
from hnclip.studies.identity import UNKNOWN, gallery_identity, model_identity, pair_count, training_records
from hnclip.studies.page import PAGE, study_report, write_results
from hnclip.studies.plan import Job, MeasureJob, Plan, RunJob, plan
from hnclip.studies.results import FIELDS, StudyResults
from hnclip.studies.settings import run_options_of, settings_of
from hnclip.studies.spec import GallerySpec, Setting
from hnclip.studies.store import Store
from hnclip.util.files import Busy, replace_file
from hnclip.util.tables import MISSING, text_table
from hnclip.util.text import counted, duration, parse_share

log = logging.getLogger(__name__)

FAILURES = "failures.log"  # in the directory of the store
MEASUREMENTS = "measurements.csv"
WAIT = 10.0  # seconds between looks at a job of another process
DONE, TO_EVALUATE, TO_DO, NOT_KNOWN = "done", "to evaluate", "to do", "not known"


@dataclass(frozen=True)
class StudyOutcome:
    """What a call of the command came to, for people and for programs."""

    text: str
    content: dict[str, Any]
    failures: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**self.content, "failures": list(self.failures)}


def run_study(
    name: str,
    *,
    data: Sequence[str] = (),
    tests: Sequence[str] = (),
    model: str | None = None,
    recipe: str | None = None,
    set: Sequence[str] = (),
    seeds: Sequence[int] = (),
    read: ReadConfig | None = None,
    out: Path = Path("runs/studies"),
    docs: Path | None = None,
    dry_run: bool = False,
    shard: str | None = None,
    device: str = "auto",
    threads: int = 0,
) -> StudyOutcome:
    """Train the missing runs of studies, reuse finished ones, and write tables and figures (hnclip docs studies).

    Args:
        name: a study, several separated by commas, or "all".
        data: domains to train on, read with `read`; each is also tested on its test split. Those of the recipe if not
            given.
        tests: additional data to test on, each for the domain that the paper tests on it, or for all.
        model: that of the recipe if not given.
        recipe: base settings of all rows; if not given, demo for the bundled model and paper for any other.
        set: fields of the configuration or of `RunOptions`, "optim.epochs=2". Settings of a row take precedence.
        seeds: of all rows; if not given, as many of the paper's as the study requires.
        out: directory of the runs, which all studies share, and of the tables and figures.
        docs: directory in which `results.md` is also written, one page about all studies of the call.
        dry_run: only list the planned jobs with their state. Data of benchmarks and the model need not be here.
        shard: "K/N" executes the K-th of N parts of the runs, K from 1 to N; the process that ends last measures what
            needs runs of several parts, and writes the tables.
        threads: CPU threads of a run; 0 leaves the choice to torch.

    Raises:
        ValueError: a study cannot be made of the arguments, the data or the model; nothing has been run.
    """
    share = None if shard is None else parse_share(shard)
    read = read or ReadConfig()
    asked: dict[str, Any] = {"recipe": recipe, "model": model, "data": data, "tests": tests, "set": set, "seeds": seeds}
    settings = settings_of(name, **asked, read=read, device=device)
    store = Store(out / "runs", run_options_of(set, device=device, threads=threads))
    if dry_run:
        return _dry_run(plan(settings), store)
    store.directory.mkdir(parents=True, exist_ok=True)
    _check_inputs(settings)
    planned = plan(settings)
    failures = run(planned, store, share=share)
    missing = [job.title for job in planned.jobs if not store.is_done(job)]
    content = {"jobs": len(planned.jobs), "missing": missing}
    state = f"{len(planned.jobs) - len(missing)} of {len(planned.jobs)} jobs are done"
    if share and missing:
        return StudyOutcome(f"{state}: the tables are written when all are", content, failures)
    results = [StudyResults(setting, planned, store) for setting in settings]
    reports, files = _write_reports(results, out)
    if docs is None:
        texts = [f"{report.to_text()}\n\nwritten: {out / one.study.name}" for one, report in zip(results, reports)]
    else:
        files += write_results(results, docs, command_line(name, asked, read, docs))
        texts = [f"written: {docs / PAGE}"]
    texts += [f"incomplete: {state}"] * bool(missing)
    content |= {"studies": [report.data for report in reports], "files": list(map(str, files))}
    return StudyOutcome("\n\n".join(texts), content, failures)


def run(planned: Plan, store: Store, *, share: tuple[int, int] | None = None) -> list[str]:
    """Do what is missing of a plan; returns what failed. A failure stops no other job; its traceback is in a log file.

    Args:
        share: (K, N): only part K of the N parts of the runs, counted from 0, and all measurements whose runs are done,
            so that the last of the processes to end leaves nothing undone.
    """
    number, count = share or (0, 1)
    failures: list[str] = []
    for jobs in (planned.runs[number::count], planned.measures):
        waiting = deque[Job](job for job in jobs if not store.is_done(job))
        total, busy = len(waiting), set[str]()
        while waiting:
            job = waiting.popleft()
            if job.identity in busy:
                time.sleep(WAIT)
            if store.is_done(job):  # by another process, meanwhile
                continue
            lacking = [one for one in job.needs if not store.is_done(one)] if isinstance(job, MeasureJob) else []
            if lacking:
                if share is None:
                    failures.append(f"{job.title} failed: it needs {lacking[0].title}, which failed")
                continue
            if job.identity not in busy:
                seconds = _training_seconds([job, *waiting], planned, store)
                left = f", about {duration(seconds)} left" if seconds else ""
                kind = "run" if isinstance(job, RunJob) else "measurement"
                log.info(f"{kind} {total - len(waiting)} of {total}{left}: {job.title}")
            try:
                store.do(job)
            except Busy as error:
                if job.identity not in busy:
                    log.info(str(error))
                busy.add(job.identity)
                waiting.append(job)
            except Exception as error:
                reason = next(iter(str(error).splitlines()), "") or type(error).__name__
                failures.append(f"{job.title} failed: {reason}")
                path = store.directory / FAILURES
                with path.open("a", encoding="utf-8") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {failures[-1]}\n{traceback.format_exc()}\n")
                log.warning(f"{failures[-1]} (traceback in {path})")
    return failures


def _training_seconds(jobs: Iterable[Job], planned: Plan, store: Store) -> float | None:
    """How long the training of these jobs takes, one after the other, at the rate of the plan's finished runs."""
    seconds = {job.identity: found["seconds"] for job in planned.runs if (found := store.training(job))}
    done = sum(_work(job) for job in planned.runs if job.identity in seconds)
    left = sum(_work(job) for job in jobs if job.identity not in seconds)
    return left * sum(seconds.values()) / done if done else None


def _work(job: Job) -> int:
    """Pairs that a job trains on, in all epochs."""
    trains = isinstance(job, RunJob) and job.trained
    return (pair_count(job.config) or 0) * job.config.optim.epochs if trains else 0


def _dry_run(planned: Plan, store: Store) -> StudyOutcome:
    """The jobs of a plan with their state. Nothing is run or written."""
    jobs: list[dict[str, Any]] = []
    for job in planned.jobs:
        trains = isinstance(job, RunJob) and job.trained
        pairs, epochs = (pair_count(job.config), job.config.optim.epochs) if trains else (None, None)
        jobs.append({"job": job.title, "pairs": pairs, "epochs": epochs, "state": _state(job, store)})
    states = Counter(job["state"] for job in jobs)
    seconds = None if NOT_KNOWN in states else _training_seconds(planned.jobs, planned, store)
    text = f"{counted(len(jobs), 'job')}: {', '.join(f'{number} {state}' for state, number in states.items())}."
    if NOT_KNOWN in states:
        text += " What is there already is not known before model and data are here; pairs are the published numbers."
    elif seconds:
        text += f" Training takes about {duration(seconds)}, by the finished runs, one after the other."
    cells = [[MISSING if value is None else str(value) for value in job.values()] for job in jobs]
    table = text_table(["job", "pairs", "epochs", "state"], cells)
    return StudyOutcome(f"{table}\n\n{text}", {"jobs": jobs, "seconds": seconds})


def _state(job: Job, store: Store) -> str:
    if job.identity.startswith(UNKNOWN):
        return NOT_KNOWN
    try:
        if store.is_done(job):
            return DONE
        return TO_EVALUATE if isinstance(job, RunJob) and store.is_trained(job) else TO_DO
    except (ValueError, OSError):  # a gallery is not here
        return NOT_KNOWN


def _check_inputs(settings: Sequence[Setting]) -> None:
    """The model opens, and so do the records that are trained on and those that are evaluated on afterwards."""
    for setting in settings:
        model_identity(setting.base)
        for domain in setting.domains:
            training_records(replace(setting.base, data=domain.data))
            for gallery in (*setting.galleries_of(domain), *map(GallerySpec, domain.galleries)):
                gallery_identity(gallery, setting.base.read)


def _write_reports(results: Sequence[StudyResults], out: Path) -> tuple[list[Report], list[Path]]:
    """Write the report of every study, and the numbers of all for programs."""
    reports, files = [study_report(one) for one in results], [out / MEASUREMENTS]
    for one, report in zip(results, reports):
        name = one.study.name
        files += report.write(out / name, name, formats=("txt", "md", "tex", "json"), figures=("svg", "pdf"))
    with replace_file(out / MEASUREMENTS) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, FIELDS)
        table.writeheader()
        table.writerows(row for report in reports for row in report.data["measurements"])
    return reports, files


def command_line(study: str, options: Mapping[str, Any], read: ReadConfig, docs: Path) -> str:
    """The command that writes the same page, without where and by which processes the runs are executed."""
    words = ["hnclip", "study", study]
    for name, value in options.items():
        words += [f"--{name}", *([value] if isinstance(value, str) else map(str, value))] if value else []
    words += option_words(read, ReadConfig(), "read.")
    return shlex.join([*words, "--docs", docs.name])
