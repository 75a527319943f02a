"""Finished runs and what was measured of them, in directories named by what they are."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from hnclip.config import RunOptions, TrainConfig, to_json
from hnclip.evaluate.retrieval import EvaluationResult, drop_unusable, evaluate_task, open_task
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import RUN_CONFIG, RUN_RESULT, load
from hnclip.studies.identity import EVALUATION, code_fingerprint, gallery_fingerprint, versions
from hnclip.studies.matched import open_start, with_matched_margin
from hnclip.studies.plan import Gallery, Job
from hnclip.studies.saved_result import read_result, write_result
from hnclip.train.runs import saved_config, train_or_continue
from hnclip.util.device import find_device
from hnclip.util.files import exclusive_lock, replace_file
from hnclip.util.text import slugify

log = logging.getLogger(__name__)

ABOUT = "about.json"  # what a directory holds, for people


class Busy(Exception):
    """Another process is at it."""


class Store:
    """The runs below a directory.

    Args:
        options: where and how runs are executed; each has a directory of its own below `directory`.
        any_version: also take runs that other versions of the code made.
    """

    def __init__(self, directory: Path, options: RunOptions | None = None, *, any_version: bool = False) -> None:
        self.directory, self.options, self.any_version = directory, options or RunOptions(), any_version

    def home(self, job: Job) -> Path:
        """The directory of a run, finished or not. The same data by another path have another label; of other versions
        the latest counts."""
        own = self.directory / f"{_label(job)}-{job.identity}"
        if self._is_finished(own, job):
            return own
        same = sorted(self.directory.glob(f"*-{job.identity}"))
        if self.any_version:
            others = self.directory.glob(f"*-{job.identity.what}-*")
            same += sorted(others, key=lambda home: home.stat().st_mtime, reverse=True)
        finished = [home for home in same if self._is_finished(home, job)]
        begun = [home for home in (own, *same[:1]) if (home / RUN_CONFIG).exists()]
        return next(iter((*finished, *begun)), own)

    def is_trained(self, job: Job) -> bool:
        return self._is_finished(self.home(job), job)

    def _is_finished(self, home: Path, job: Job) -> bool:
        return (home / RUN_RESULT).exists() if job.trained else home.is_dir()

    def missing(self, job: Job) -> list[Gallery]:
        """The galleries that the run was not evaluated on."""
        return [gallery for gallery in job.galleries if not self.result_path(job, gallery).exists()]

    def is_done(self, job: Job) -> bool:
        return self.is_trained(job) and not self.missing(job)

    def of_other_versions(self, job: Job) -> list[Path]:
        """Finished runs of the same settings and data that other versions of the code made."""
        found = sorted(self.directory.glob(f"*-{job.identity.what}-*"))
        return [home for home in found if home.name != self.home(job).name and self._is_finished(home, job)]

    @contextmanager
    def held(self, job: Job) -> Iterator[None]:
        """The run for this process alone, or Busy."""
        busy = f"another process is at {self.home(job)}"
        try:
            with exclusive_lock(self.directory / ".locks" / str(job.identity), busy):
                yield
        except ValueError as error:
            if str(error) == busy:
                raise Busy(busy) from error
            raise

    def do(self, job: Job) -> None:
        """What is left of a run: train it, or go on with it, and evaluate its best epoch."""
        with self.held(job):
            home = self.home(job)
            if job.trained and not self.is_trained(job):
                config = job.config
                if job.matched:
                    config = with_matched_margin(config, self.directory / "measures", self.options.device)
                _follow_moved_data(home, config)
                train_or_continue(config, replace(self.options, out=home))
            home.mkdir(parents=True, exist_ok=True)
            self._write_about(job, home)
            if missing := self.missing(job):
                model = self.open_model(job)
                for gallery in missing:
                    log.info(f"evaluating on {gallery.name}")
                    write_result(
                        self.result_path(job, gallery),
                        _evaluated(model, gallery, job.config, self.options.evaluate_batch),
                    )

    def open_model(self, job: Job) -> DualEncoder:
        """The best epoch of a run by validation, or the model as it comes."""
        if not job.trained:
            return open_start(job.config, self.options.device)
        return load(str(self.home(job) / "best")).to(find_device(self.options.device))

    def result_path(self, job: Job, gallery: Gallery) -> Path:
        splits = ("all", None) if gallery.whole else (None,)  # of a whole gallery also what of it is held out
        content = [gallery_fingerprint(gallery.source, split, job.config.read) for split in splits]
        digest = sha256(repr((content, code_fingerprint(EVALUATION))).encode()).hexdigest()[:10]
        place = self.home(job) / "evaluations"
        own = place / f"{slugify(gallery.name)}-{digest}.safetensors"
        # The same records by another path have another name.
        return own if own.exists() else next(iter(sorted(place.glob(f"*-{digest}.safetensors"))), own)

    def result(self, job: Job, gallery: Gallery) -> EvaluationResult:
        """What was measured on a gallery."""
        return read_result(self.result_path(job, gallery))

    def training(self, job: Job) -> dict[str, Any]:
        """`TrainResult` of a finished run."""
        return json.loads((self.home(job) / RUN_RESULT).read_text(encoding="utf-8"))

    def _write_about(self, job: Job, home: Path) -> None:
        path = home / ABOUT
        if path.exists():
            return
        about = {
            "places": {study: [place._asdict() for place in places] for study, places in job.places.items()},
            "versions": versions(),
        }
        with replace_file(path) as partial:
            partial.write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _follow_moved_data(home: Path, config: TrainConfig) -> None:
    """Let a stopped run continue with data or a model of another path: by its identity it is the same run."""
    if (home / RUN_CONFIG).exists() and saved_config(home) != config:
        with replace_file(home / RUN_CONFIG) as partial:
            partial.write_text(to_json(config), encoding="utf-8")


def _evaluated(model: DualEncoder, gallery: Gallery, config: TrainConfig, batch: int) -> EvaluationResult:
    held_out = None
    if gallery.whole:
        held_out = frozenset(record.id for record in open_task(gallery.source, None, config.read).records)
    task = open_task(gallery.source, "all" if gallery.whole else None, config.read)
    task = drop_unusable(task, model, config.read)
    return evaluate_task("", model, task, config.read, batch=batch, held_out=held_out)


def _label(job: Job) -> str:
    """What a directory's name begins with, for people."""
    config = job.config
    if not job.trained:
        return "zero-shot"
    objective = config.objective
    return slugify(f"{objective.method}-{objective.global_loss}-{config.data.partition('=')[0]}-{config.seed}")
