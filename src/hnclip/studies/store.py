"""Finished runs and what was measured of them, in directories named by what they are.

    runs/LABEL-IDENTITY/                    a training run as `hnclip train` writes it, or `zero-shot-IDENTITY`
        about.json                          for people: which rows of which studies it is, and library versions
        seal.json                           checksums of its result and its log
        evaluations/GALLERY-ID.safetensors  ranks and metrics on a gallery, with a checksum
    runs/measures/KIND-IDENTITY.json        a measurement, with a checksum

A run that is observed along the way has `-watched-…` or `-probed-N` at the end of its name.
"""

from __future__ import annotations

import json
import logging
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hnclip import __version__
from hnclip.analysis.captions import mean_similarity
from hnclip.config import RunOptions, TrainConfig, to_json
from hnclip.encode.loop import encode_captions
from hnclip.evaluate.retrieval import EvaluationResult, drop_unusable, evaluate_task, open_task
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import RUN_CONFIG, RUN_RESULT, load
from hnclip.studies.identity import (
    UNKNOWN,
    digest,
    gallery_identity,
    model_identity,
    open_start,
    records_identity,
    run_identity,
    training_records,
)
from hnclip.studies.plan import Job, MeasureJob, RunJob
from hnclip.studies.sealed import file_hash, read_result, read_sealed, write_result, write_sealed
from hnclip.studies.spec import Gallery
from hnclip.train.checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint
from hnclip.train.log import METRICS, read_metrics
from hnclip.train.runs import saved_config, train_or_continue
from hnclip.util.files import exclusive_lock, read_json, replace_file
from hnclip.util.text import slugify

log = logging.getLogger(__name__)

RESULT_FORMAT = 1  # raise it when an evaluation of the same model on the same gallery gives another result
ABOUT, SEAL = "about.json", "seal.json"
LIBRARIES = ("torch", "transformers", "numpy", "pillow")


class Busy(Exception):
    """Another process is doing the job."""


class Store:
    """The runs and measurements in a directory.

    Args:
        options: where and how runs are executed; each has a directory of its own below `directory`.
    """

    def __init__(self, directory: Path, options: RunOptions | None = None) -> None:
        self.directory, self.options = directory, options or RunOptions()

    def home(self, job: RunJob) -> Path:
        """The directory of a run, finished or not. The same data at another path have another label."""
        name = f"{job.identity}{_observations(job.config)}"
        own = self.directory / f"{_label(job.config, job.trained)}-{name}"
        homes = [own, *sorted(self.directory.glob(f"*-{job.identity}*"))]
        finished = [home for home in homes if _observes(home, job) and self._is_finished(home, job)]
        begun = [home for home in homes if home.name.endswith(f"-{name}") and (home / RUN_CONFIG).exists()]
        return next(iter([*finished, *begun]), own)

    def is_trained(self, job: RunJob) -> bool:
        return not job.identity.startswith(UNKNOWN) and self._is_finished(self.home(job), job)

    def _is_finished(self, home: Path, job: RunJob) -> bool:
        return (home / RUN_RESULT).exists() if job.trained else home.is_dir()

    def is_begun(self, job: Job) -> bool:
        return isinstance(job, RunJob) and (self.home(job) / RUN_CONFIG).exists()

    def is_done(self, job: Job) -> bool:
        if isinstance(job, MeasureJob):
            return self._measurement_path(job).exists()
        return self.is_trained(job) and not self.missing(job)

    def missing(self, job: RunJob) -> list[Gallery]:
        """The galleries that the run was not evaluated on."""
        return [gallery for gallery in job.galleries if not self.result_path(job, gallery).exists()]

    def do(self, job: Job) -> None:
        """Do what is missing of a job: train or continue a run and evaluate its best epoch, or measure.

        Raises:
            Busy: another process is doing it.
        """
        with self._held(job):
            if isinstance(job, RunJob):
                self._run(job)
            else:
                from hnclip.studies.analyses import MEASURES

                write_sealed(self._measurement_path(job), MEASURES[job.kind](job, self))

    def open_model(self, job: RunJob) -> DualEncoder:
        """The best epoch of a run by validation, or the model before training."""
        if not job.trained:
            return open_start(job.config, self.options.device)
        return load(str(self.home(job) / "best"), device=self.options.device)

    def result(self, job: RunJob, gallery: Gallery) -> EvaluationResult | None:
        """The evaluation of a run on a gallery; None if there is none. ValueError if its file is damaged."""
        path = self.result_path(job, gallery)
        return read_result(path) if path.exists() else None

    def training(self, job: RunJob) -> dict[str, Any] | None:
        """`TrainResult` of a finished run: steps, seconds, best and last epoch with their validation R@1."""
        return read_json(self._sealed_file(job, RUN_RESULT)) if job.trained and self.is_trained(job) else None

    def metrics(self, job: RunJob, kind: str) -> list[dict[str, Any]]:
        """Entries of the log of a finished run: "data", "step", "evaluation", "watched" or "gradients"."""
        if not (job.trained and self.is_trained(job)):
            return []
        return read_metrics(self._sealed_file(job, METRICS).parent, kind)

    def measurement(self, job: MeasureJob) -> dict[str, Any] | None:
        """What was measured; None if it was not. ValueError if its file is damaged."""
        path = self._measurement_path(job)
        return read_sealed(path) if path.exists() else None

    def versions(self, job: RunJob) -> dict[str, str]:
        """The versions of the libraries that a run was trained with; empty if it was not begun."""
        path = self.home(job) / ABOUT
        return read_json(path)["versions"] if path.exists() else {}

    def result_path(self, job: RunJob, gallery: Gallery) -> Path:
        place = self.home(job) / "evaluations"
        identity = digest("evaluation", RESULT_FORMAT, gallery_identity(gallery, job.config.read))
        own = place / f"{slugify(gallery.name)}-{identity}.safetensors"
        # The same records at another path have another name.
        return own if own.exists() else next(iter(sorted(place.glob(f"*-{identity}.safetensors"))), own)

    def _measurement_path(self, job: MeasureJob) -> Path:
        return self.directory / "measures" / f"{slugify(job.kind)}-{job.identity}.json"

    @contextmanager
    def _held(self, job: Job) -> Iterator[None]:
        """The job for this process alone."""
        busy = f"another process is doing {job.title}"
        try:
            with exclusive_lock(self.directory / ".locks" / job.identity, busy):
                yield
        except ValueError as error:
            if str(error) == busy:
                raise Busy(busy) from error
            raise

    def _run(self, job: RunJob) -> None:
        if job.identity.startswith(UNKNOWN):
            run_identity(job.config, trained=job.trained)  # says what is wrong with the model or the data
            raise ValueError("its model and data could not be opened when it was planned: give the command again")
        home = self.home(job)
        if job.trained and not self.is_trained(job):
            config = self._with_matched_margin(job.config) if job.matched else job.config
            _follow_moved_data(home, config)
            self._write_about(job, home)
            train_or_continue(config, replace(self.options, out=home))
        if job.trained and not (home / SEAL).exists():
            write_sealed(home / SEAL, {name: file_hash(home / name) for name in (RUN_RESULT, METRICS)})
            (home / CHECKPOINT).unlink(missing_ok=True)  # three times the weights, which nothing needs any more
        self._write_about(job, home)
        if missing := self.missing(job):
            model = self.open_model(job)
            for gallery in missing:
                log.info(f"evaluating on {gallery.name}")
                result = _evaluate(model, gallery, job.config, self.options.evaluate_batch)
                write_result(self.result_path(job, gallery), result)

    def _with_matched_margin(self, config: TrainConfig) -> TrainConfig:
        """The run with the fixed margin m = γ·mean(Ḡ)."""
        margin = config.objective.gamma * self.mean_similarity(config)
        return replace(config, objective=replace(config.objective, parameters={"margin": margin}))

    def mean_similarity(self, config: TrainConfig) -> float:
        """Mean Ḡ over all pairs of training captions of different images, by the initial encoder; measured once."""
        records, _ = training_records(config)
        identity = digest("mean similarity", model_identity(config), records_identity(records, config.read.cache))
        path = self.directory / "measures" / f"mean-similarity-{identity}.json"
        if not path.exists():
            model = open_start(config, self.options.device)
            captions = model.text_transform([text for record in records for text in record.captions])
            owner = [number for number, record in enumerate(records) for _ in record.captions]
            text = encode_captions(model, captions).cpu()  # [T, D]
            mean = mean_similarity(text, text.new_tensor(owner).long())
            write_sealed(path, {"mean": mean, "captions": len(captions), "model": config.model, "data": config.data})
        return float(read_sealed(path)["mean"])

    def _sealed_file(self, job: RunJob, name: str) -> Path:
        """A file of a finished run, if it has not changed since."""
        home = self.home(job)
        if (home / SEAL).exists() and read_sealed(home / SEAL)[name] != file_hash(home / name):
            raise ValueError(
                f"{home / name} has changed since the run ended: restore it, or delete {home} to train it again"
            )
        return home / name

    def _write_about(self, job: RunJob, home: Path) -> None:
        if (home / ABOUT).exists():
            return
        places = {study: [place._asdict() for place in places] for study, places in job.places.items()}
        versions = {"hnclip": __version__, "python": platform.python_version()}
        versions |= {name: version(name) for name in LIBRARIES}
        with replace_file(home / ABOUT) as partial:
            content = json.dumps({"places": places, "versions": versions}, indent=2, ensure_ascii=False)
            partial.write_text(content + "\n", encoding="utf-8")


def _label(config: TrainConfig, trained: bool) -> str:
    """What the name of a directory begins with, for people."""
    data = config.data.partition("=")[0].split("/")[-2:]
    parts = (config.objective.method, config.objective.global_loss, *data, str(config.seed))
    return slugify("-".join(parts)) if trained else "zero-shot"


def _observations(config: TrainConfig) -> str:
    watched = f"-watched-{gallery_identity(Gallery(config.watch), config.read)[:8]}" if config.watch else ""
    return watched + (f"-probed-{config.probe_gradients}" if config.probe_gradients else "")


def _observes(home: Path, job: RunJob) -> bool:
    """Whether the run in a directory has the identity of the job and observes all that the job asks for."""
    found = re.search(rf"-{job.identity}(-watched-\w+)?(-probed-(\d+))?$", home.name)
    if found is None:
        return False
    wanted, every = _observations(replace(job.config, probe_gradients=0)), job.config.probe_gradients
    watches = not wanted or found[1] == wanted
    return not job.trained or (watches and (not every or (found[3] is not None and every % int(found[3]) == 0)))


def _follow_moved_data(home: Path, config: TrainConfig) -> None:
    """Let a stopped run continue with data and model at other paths: by its identity it is the same run."""
    if not (home / RUN_CONFIG).exists():
        return
    saved = saved_config(home)
    config = replace(config, optim=replace(config.optim, precision=saved.optim.precision))  # "auto" is resolved there
    if saved != config:
        if (state := load_checkpoint(home)) is not None:
            save_checkpoint(home, replace(state, config=to_json(config)))
        with replace_file(home / RUN_CONFIG) as partial:
            partial.write_text(to_json(config), encoding="utf-8")


def _evaluate(model: DualEncoder, gallery: Gallery, config: TrainConfig, batch: int) -> EvaluationResult:
    held_out = None
    if gallery.whole:
        held_out = frozenset(record.id for record in open_task(gallery.source, None, config.read).records)
    task = open_task(gallery.source, "all" if gallery.whole else None, config.read)
    task = drop_unusable(task, model, config.read)
    return evaluate_task("", model, task, config.read, batch=batch, held_out=held_out)
