"""`hnclip study`: plan, run what is missing, write tables and figures."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hnclip.config import ReadConfig
from hnclip.models.load import load
from hnclip.options import Study as Options
from hnclip.studies.estimate import FORWARD, counts_of, gallery_size, rates_of_store
from hnclip.studies.execute import Failure, Shard, execute, parse_shard
from hnclip.studies.findings import findings_of
from hnclip.studies.forecast import forecast
from hnclip.studies.identity import gallery_fingerprint
from hnclip.studies.names import ADAPTIVITY, MINIATURE
from hnclip.studies.outcome import show
from hnclip.studies.plan import Job, plan_entries
from hnclip.studies.request import Entry, check_out, entries_of, is_here, parse_fields, run_options_of
from hnclip.studies.store import Store
from hnclip.train.data import batch_sizes, too_small
from hnclip.util.files import replace_file
from hnclip.util.text import option_words

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Done:
    """What a call of the command came to, for people and for programs; `failures` are sentences."""

    text: str
    found: dict[str, Any] = field(default_factory=dict)
    failures: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**self.found, "failures": list(self.failures)}


def study(options: Options) -> Done:
    """Do what the options ask for.

    Raises:
        ValueError: the options, the data or the model are not what a study can be made of.
    """
    shard = None if options.shard is None else parse_shard(options.shard)
    if options.name == ADAPTIVITY:
        return _adaptivity(options)
    store = Store(options.out / "runs", run_options_of(options), any_version=options.any_version)
    entries = entries_of(options)
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out} is a file, not a directory")
    if options.dry_run:
        found = forecast(entries, store, measure=options.measure)
        return Done(found.to_text(), found.to_dict())
    _check_models(entries)
    jobs = plan_entries(entries)
    _check_galleries(jobs)
    if options.commands:
        commands = [command_line(options, job) for job in jobs if not store.is_done(job)]
        return Done("\n".join(commands), {"commands": commands})
    check_out(options.out)
    return _run(options, entries, jobs, store, shard)


def _run(options: Options, entries: Sequence[Entry], jobs: Sequence[Job], store: Store, shard: Shard | None) -> Done:
    wanted = list(jobs)
    if options.run is not None:
        wanted = [_job_named(options.run, jobs)]
    elif shard is not None:
        wanted = shard.of(jobs)
    _log_other_versions(wanted, store)
    _warn_of_small_data(wanted)
    failures = _sentences(execute(wanted, store, expected=_weigh(store)))
    if options.run is not None:
        homes = [str(store.home(job)) for job in wanted]
        return Done(f"done: {homes[0]}" if not failures else "", {"runs": homes}, failures)
    missing = [job for job in jobs if not store.is_done(job)]
    state = f"{len(jobs) - len(missing)} of {len(jobs)} runs are done"
    found: dict[str, Any] = {"runs": len(jobs), "missing": [str(job.identity) for job in missing]}
    if shard is not None and missing:
        return Done(f"{state}: the tables are written when all are", found, failures)
    incomplete = f"\n\nincomplete: {state}" if missing else ""
    if options.name == MINIATURE:
        return _miniature(options, entries, store, Done(incomplete, found, failures))
    texts, studies, files = [], [], []
    for one, setting in entries:
        outcome = show(findings_of(one, setting, store, jobs))
        written = outcome.write(options.out / one.name)
        texts.append(outcome.to_text())
        studies.append(outcome.to_dict())
        files += [str(path) for path in written]
        texts.append(f"written: {', '.join(path.name for path in written)} in {options.out / one.name}")
    return Done("\n\n".join(texts) + incomplete, {**found, "studies": studies, "files": files}, failures)


def _warn_of_small_data(jobs: Sequence[Job]) -> None:
    reasons: dict[str, str | None] = {}
    for config in (job.config for job in jobs if job.trained):
        counts = counts_of(config)
        steps = len(batch_sizes(counts.pairs, config))
        reasons.setdefault(config.data, too_small(steps, counts.validation))
    for data, reason in reasons.items():
        if reason:
            log.warning(f"{data}: {reason}")


def _miniature(options: Options, entries: Sequence[Entry], store: Store, done: Done) -> Done:
    from hnclip.studies.miniature_report import PHOTOS_TITLE, judge_miniature, write_document

    result = judge_miniature(store, entries)
    beside = options.out / ADAPTIVITY / f"{ADAPTIVITY}.md"
    photos = f"{PHOTOS_TITLE}\n\n{beside.read_text(encoding='utf-8').strip()}" if beside.exists() else None
    files = write_document(result, options.docs or options.out / MINIATURE, photos)
    found = {**done.found, **result.to_dict(), "files": [str(path) for path in files]}
    return Done(f"{result.to_text()}\n\nwritten: {files[0]}{done.text}", found, done.failures)


def _adaptivity(options: Options) -> Done:
    from hnclip.studies.adaptivity import AdaptivityOptions, adaptivity, with_grids

    for name in ("tests", "recipe", "dry_run", "shard", "commands", "run", "any_version"):
        if getattr(options, name):
            raise ValueError(
                f"adaptivity trains heads on frozen towers, not runs: leave --{name.replace('_', '-')} out"
            )
    if len(options.data) > 1:
        raise ValueError("adaptivity takes one domain: name one in --data")
    check_out(options.out)
    out = options.out / ADAPTIVITY
    asked = AdaptivityOptions(
        model=options.model or "bundled",
        data=next(iter(options.data), "scenes/park"),
        out=out,
        read=options.read,
        device=options.device,
    )
    if options.seeds:
        asked = replace(asked, seeds=options.seeds)
    asked = with_grids(asked, parse_fields(options.set))
    result = adaptivity(asked)
    made = f"Measured by `{shlex.join(_words(options))}`."
    texts = {"txt": result.to_text(), "md": f"{result.to_markdown()}\n\n{made}", "tex": result.to_latex()}
    texts["json"] = json.dumps(result.to_dict(), indent=2, ensure_ascii=False)
    files = []
    for ending, text in texts.items():
        files.append(out / f"{ADAPTIVITY}.{ending}")
        with replace_file(files[-1]) as partial:
            partial.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    written = f"written: {', '.join(path.name for path in files)} in {out}"
    found = {"studies": [{"study": ADAPTIVITY, **result.to_dict()}], "files": [str(path) for path in files]}
    return Done(f"{result.to_text()}\n\n{written}", found)


def _check_models(entries: Sequence[Entry]) -> None:
    """Before one run after the other fails."""
    for model in {setting.base.model for _, setting in entries}:
        if not is_here(model):
            load(model)  # says what is wrong


def _check_galleries(jobs: Sequence[Job]) -> None:
    """Before hours of training: what is evaluated on afterwards is there."""
    for job in jobs:
        for gallery in job.galleries:
            gallery_fingerprint(gallery.source, "all" if gallery.whole else None, job.config.read)


def _job_named(identity: str, jobs: Sequence[Job]) -> Job:
    for job in jobs:
        if identity == str(job.identity):
            return job
    raise ValueError(
        f"the plan has no run {identity}: options, model, data or versions are others than those that the command was "
        "printed for; print the commands again with --commands"
    )


def _log_other_versions(jobs: Sequence[Job], store: Store) -> None:
    others = sum(not store.is_trained(job) and bool(store.of_other_versions(job)) for job in jobs)
    if others:
        log.info(f"{others} runs were made by other versions and are made again; --any-version takes them as they are")


def _sentences(failures: Sequence[Failure]) -> tuple[str, ...]:
    return tuple(f"{failure.job.title} failed: {failure.reason}" for failure in failures)


def _weigh(store: Store) -> Callable[[Job], float]:
    """How long runs take in relation to each other, as far as finished ones tell."""
    rates = rates_of_store(store.directory, store.options)
    known = [rate.pairs_per_second for rate in rates.training.values()]
    usual = sum(known) / len(known) if known else 1.0

    def seconds(job: Job) -> float:
        if (expected := rates.expected(job)) is not None:
            return expected.seconds
        evaluated = sum(gallery_size(gallery, job.config.read) for gallery in job.galleries)
        trained = counts_of(job.config).pairs * job.config.optim.epochs if job.trained else 0
        return (trained + evaluated / FORWARD) / usual

    return seconds


def command_line(options: Options, job: Job) -> str:
    """The command that does one run of the plan, to be given from the same directory."""
    return shlex.join([*_words(options), "--run", str(job.identity)])


def _words(options: Options) -> list[str]:
    """The command that was given, without what is only said and done once."""
    words = ["hnclip", "study", options.name]
    for name in ("model", "data", "tests", "recipe", "set", "seeds", "out"):
        value = getattr(options, name)
        if value:
            words += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    words += option_words(options.read, ReadConfig(), "read.")
    for name in ("device", "threads"):
        if (value := getattr(options, name)) not in ("auto", 0):
            words += [f"--{name}", str(value)]
    return [*words, *(["--any-version"] if options.any_version else [])]
