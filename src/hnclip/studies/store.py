"""Finished runs and what was measured of them, in directories named by what they are.

    runs/LABEL-IDENTITY/                    a training run as `hnclip train` writes it, or `zero-shot-IDENTITY`
        about.json                          for people: which rows of which studies it is, and library versions
        seal.json                           checksums of its result and its log
        evaluations/GALLERY-ID.safetensors  ranks and metrics on a gallery, with a checksum
    runs/measures/KIND-IDENTITY.json        a measurement, with a checksum

A run that is observed along the way has `-watched-…` or `-probed-N` at the end of its name. A file that has changed
since it was written is never taken for a result.
"""

from __future__ import annotations

import json
import logging
import platform
import re
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from hnclip import __version__
from hnclip.analysis.captions import mean_similarity
from hnclip.config import RunOptions, TrainConfig
from hnclip.encode.loop import encode_captions
from hnclip.evaluation.ranks import Ranks
from hnclip.evaluation.retrieval import EvaluationResult, drop_unusable, evaluate_task, open_task
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import RUN_RESULT, load
from hnclip.studies.identity import (
    digest,
    gallery_identity,
    model_identity,
    open_start,
    records_identity,
    run_identity,
    training_records,
)
from hnclip.studies.plan import Job, MeasureJob, RunJob
from hnclip.studies.spec import GallerySpec
from hnclip.training.checkpoint import CHECKPOINT
from hnclip.training.log import METRICS, read_metrics
from hnclip.training.runs import train_or_continue
from hnclip.util.files import exclusive_lock, read_json, replace_file
from hnclip.util.text import slugify

log = logging.getLogger(__name__)

RESULT_FORMAT = 1  # raise it when an evaluation of the same model on the same gallery gives another result
ABOUT, SEAL = "about.json", "seal.json"
LIBRARIES = ("torch", "transformers", "numpy", "pillow")
_CHECKSUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_ZEROS = "0" * 64  # in the place of a checksum while it is computed
_TENSORS = ("ranks", "groups", "image", "text", "held_out")  # fields of a result that are not JSON, or not stored


class Store:
    """The runs and measurements in a directory.

    Args:
        options: where and how runs are executed; each has a directory of its own below `directory`.
    """

    def __init__(self, directory: Path, options: RunOptions | None = None) -> None:
        self.directory, self.options = directory, options or RunOptions()

    def home(self, job: RunJob) -> Path:
        """Where a run is, or is to be trained. The label is for people: a finished run is found by its identity."""
        config = job.config
        if not job.trained:
            return self.directory / f"zero-shot-{job.identity}"
        watched = f"-watched-{gallery_identity(GallerySpec(config.watch), config.read)[:8]}" if config.watch else ""
        probed = f"-probed-{config.probe_gradients}" if config.probe_gradients else ""
        for home in sorted(self.directory.glob(f"*-{job.identity}*")):  # one that observes more will do
            if watched in home.name and home.name.endswith(probed) and _is_finished(home):
                return home
        data = config.data.partition("=")[0].split("/")[-2:]
        label = slugify(config.objective.method, config.objective.global_loss, *data, str(config.seed))
        return self.directory / f"{label}-{job.identity}{watched}{probed}"

    def is_trained(self, job: RunJob) -> bool:
        home = self.home(job)
        return _is_finished(home) if job.trained else home.is_dir()

    def is_done(self, job: Job) -> bool:
        if isinstance(job, MeasureJob):
            return self._measurement_path(job).exists()
        return self.is_trained(job) and not self._missing(job)

    def _missing(self, job: RunJob) -> list[GallerySpec]:
        """The galleries that the run was not evaluated on."""
        return [gallery for gallery in job.galleries if not self._result_path(job, gallery).exists()]

    def do(self, job: Job) -> None:
        """Do what is missing of a job: train or continue a run and evaluate its best epoch, or measure.

        Raises:
            Busy: another process is doing it.
        """
        with exclusive_lock(self.directory / ".locks" / job.identity, f"another process is doing {job.title}"):
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

    def result(self, job: RunJob, gallery: GallerySpec) -> EvaluationResult | None:
        """The evaluation of a run on a gallery; None if there is none. ValueError if its file is damaged."""
        path = self._result_path(job, gallery)
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

    def _result_path(self, job: RunJob, gallery: GallerySpec) -> Path:
        place = self.home(job) / "evaluations"
        identity = digest("evaluation", RESULT_FORMAT, gallery_identity(gallery, job.config.read))
        # The same records at another path have another name.
        found = sorted(place.glob(f"*-{identity}.safetensors"))
        return next(iter(found), place / f"{slugify(gallery.name)}-{identity}.safetensors")

    def _measurement_path(self, job: MeasureJob) -> Path:
        return self.directory / "measures" / f"{slugify(job.kind)}-{job.identity}.json"

    def _run(self, job: RunJob) -> None:
        # For a stand-in this says what is wrong with the model or the data.
        if run_identity(job.config, trained=job.trained, matched=job.matched) != job.identity:
            raise ValueError("its model or data have changed since it was planned: give the command again")
        home = self.home(job)
        self._write_about(job, home)
        if job.trained and not _is_finished(home):
            config = self._with_matched_margin(job.config) if job.matched else job.config
            train_or_continue(config, replace(self.options, out=home))
        if job.trained and not (home / SEAL).exists():
            write_sealed(home / SEAL, {name: _file_hash(home / name) for name in (RUN_RESULT, METRICS)})
            (home / CHECKPOINT).unlink(missing_ok=True)  # three times the weights, which nothing needs any more
        if missing := self._missing(job):
            model = self.open_model(job)
            for gallery in missing:
                log.info(f"evaluating on {gallery.name}")
                result = _evaluate(model, gallery, job.config, self.options.evaluate_batch)
                write_result(self._result_path(job, gallery), result)

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
        if (home / SEAL).exists() and read_sealed(home / SEAL)[name] != _file_hash(home / name):
            raise ValueError(f"{home / name} has changed since the run ended: delete {home} to train it again")
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


def _is_finished(home: Path) -> bool:
    """Whether a directory holds a finished training run."""
    return (home / RUN_RESULT).exists()


def _evaluate(model: DualEncoder, gallery: GallerySpec, config: TrainConfig, batch: int) -> EvaluationResult:
    held_out = None
    if gallery.whole:
        held_out = frozenset(record.id for record in open_task(gallery.source, None, config.read).records)
    task = open_task(gallery.source, "all" if gallery.whole else None, config.read)
    task = drop_unusable(task, model, config.read)
    return evaluate_task("", model, task, config.read, batch=batch, held_out=held_out)


def write_result(path: Path, result: EvaluationResult) -> None:
    """Write a result with its ranks, without its vectors, as one file of JSON and tensors with a checksum."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for prefix, part in (("", result), ("held_out_", result.held_out)):
        if part is not None:
            found = {**vars(part.ranks), "groups": part.groups}
            tensors |= {f"{prefix}{name}": value.contiguous() for name, value in found.items()}
            values[prefix] = {name: value for name, value in vars(part).items() if name not in _TENSORS}
    content = save(tensors, metadata={"result": json.dumps(values), "sha256": _ZEROS})
    sealed = _CHECKSUM.sub(f'"sha256":"{sha256(content).hexdigest()}"'.encode(), content, count=1)
    with replace_file(path) as partial:
        partial.write_bytes(sealed)


def read_result(path: Path) -> EvaluationResult:
    """Read a result of `write_result`. ValueError if any byte of it has changed."""
    from safetensors.torch import load as load_tensors

    content = path.read_bytes()
    saved = _CHECKSUM.search(content)
    if saved is None or sha256(content.replace(saved[1], _ZEROS.encode(), 1)).hexdigest().encode() != saved[1]:
        raise _damaged(path)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors, parts = load_tensors(content), {}
    for prefix, part in json.loads(header["__metadata__"]["result"]).items():
        ranks = Ranks(*(tensors[f"{prefix}{name}"] for name in ("text_to_image", "image_to_text", "owner")))
        part["ids"] = tuple(part["ids"])
        parts[prefix] = EvaluationResult(ranks=ranks, groups=tensors[f"{prefix}groups"], **part)
    return replace(parts[""], held_out=parts.get("held_out_"))


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with its checksum."""
    content = json.loads(json.dumps(content))  # as it is read again
    with replace_file(path) as partial:
        sealed = {"sha256": _json_hash(content), "content": content}
        partial.write_text(json.dumps(sealed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote. ValueError if it has changed."""
    try:
        sealed = read_json(path)
        content: dict[str, Any] = sealed["content"]
        if sealed["sha256"] == _json_hash(content):
            return content
    except (ValueError, KeyError):
        pass
    raise _damaged(path)


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is damaged: delete it and give the command again, which measures it again")


def _json_hash(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
