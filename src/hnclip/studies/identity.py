"""What makes two runs the same run: the configuration, the content of the data, the weights of the initial model.

Where it runs, where data and models are, and the versions of libraries are no part of it. A change of this package that
changes results needs a higher `FORMAT`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any

from hnclip.config import ReadConfig, TrainConfig
from hnclip.core import Record
from hnclip.data.benchmarks import BENCHMARKS
from hnclip.data.image_cache import cache_directory
from hnclip.data.image_hashes import image_hashes
from hnclip.data.manifest import KINDS, Kind, apply_manifest, manifest_path, read_manifest
from hnclip.data.sources import open_data
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.evaluation.retrieval import open_task
from hnclip.models.adapters import BaseModel
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import is_hub_name, load
from hnclip.objectives.registry import build_objective
from hnclip.studies.spec import GallerySpec
from hnclip.training.data import choose_records, needed_views

FORMAT = 1  # raise it when the same configuration, data and model give other results
UNKNOWN = "unknown-"  # how stand-ins for identities begin
OPENING = tuple(spec.name for spec in fields(BaseModel))  # fields that determine the initial model
READING = ("data", "validation", "read", "fraction", "limit")  # and those that determine the records
OBSERVATIONS: dict[str, Any] = {"watch": None, "probe_gradients": 0}  # they change no weights

Records = tuple[Record, ...]


def run_identity(config: TrainConfig, *, trained: bool = True, matched: bool = False) -> str:
    """The identity of a training run, or of the model before training.

    Args:
        matched: the margin is γ·mean(Ḡ), which model and data determine.

    Raises:
        ValueError: the model or the data cannot be opened.
    """
    model = model_identity(config)
    if not trained:
        return digest("model", model)
    default = TrainConfig()
    plain = replace(config, **{name: getattr(default, name) for name in (*OPENING, *READING)}, **OBSERVATIONS)
    kinds = frozenset(needed_views(build_objective(config.objective)))
    records = _training_identity(kinds, *attrgetter(*READING)(config))
    # Only what differs from the defaults: a new field changes no identity.
    return digest("run", model, _changes(asdict(plain), asdict(default)), matched, records)


def identify(config: TrainConfig, *, trained: bool = True, matched: bool = False) -> str:
    """`run_identity`; if the model or the data are not here, a stand-in that tells the runs of one plan apart."""
    try:
        if _is_here(config.model):
            return run_identity(config, trained=trained, matched=matched)
    except (ValueError, OSError):
        pass
    content = asdict(replace(config, **OBSERVATIONS)) if trained else attrgetter(*OPENING)(config)
    return UNKNOWN + digest(content, matched)


def _changes(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values that differ from the defaults, of nested mappings those inside."""
    return {
        name: _changes(value, defaults[name]) if isinstance(value, dict) and name in defaults else value
        for name, value in values.items()
        if name not in defaults or value != defaults[name]
    }


def _is_here(model: str) -> bool:
    """Whether opening a model downloads nothing."""
    from huggingface_hub import try_to_load_from_cache

    parts = [model] if Path(model).exists() else model.split("+")
    names = [part.partition("@") for part in parts if is_hub_name(part)]
    found = [try_to_load_from_cache(name, "config.json", revision=revision or None) for name, _, revision in names]
    return all(isinstance(path, str) for path in found)


def model_identity(config: TrainConfig) -> str:
    """The identity of the model that a run starts from."""
    return _model_identity(*attrgetter(*OPENING)(config))


@cache
def _model_identity(*opening: Any) -> str:
    return model_fingerprint(load(**dict(zip(OPENING, opening))), opening[0])


def open_start(config: TrainConfig, device: str) -> DualEncoder:
    """The model that a run starts from."""
    return load(**{name: getattr(config, name) for name in OPENING}, device=device)


def training_records(config: TrainConfig) -> tuple[Records, Records]:
    """The records that a run trains on, and those that it validates on."""
    return _training_records(*attrgetter(*READING)(config))


@cache
def _training_records(*reading: Any) -> tuple[Records, Records]:
    config = TrainConfig(**dict(zip(READING, reading)))
    train, held_out, _ = choose_records(config, open_data(config.data, config.read, splits={"train", "validation"}))
    return train, held_out


@cache
def _training_identity(kinds: frozenset[Kind], *reading: Any) -> tuple[str, str]:
    """The identities of the training records, with what `hnclip prepare` made, and of the validation records."""
    config = TrainConfig(**dict(zip(READING, reading)))
    train, held_out = training_records(config)
    for kind in KINDS:
        if kind in kinds and (path := manifest_path(config.read, config.data, kind)).exists():
            train = tuple(apply_manifest(train, read_manifest(path, kind))[0])
    return records_identity(train, config.read.cache), records_identity(held_out, config.read.cache)


def pair_count(config: TrainConfig) -> int | None:
    """Training pairs of a run; of a benchmark whose files are not here, by the published number."""
    try:
        return len(training_records(config)[0])
    except (ValueError, OSError):
        benchmark = BENCHMARKS.get(config.data.partition("=")[0])
        return None if benchmark is None else round(benchmark.counts.get("train", 0) * config.fraction)


@cache
def gallery_identity(gallery: GallerySpec, read: ReadConfig) -> str:
    """Of the records that are evaluated on."""
    test = open_task(gallery.source, None, read).records
    if not gallery.whole:
        return records_identity(test, read.cache)
    records = open_task(gallery.source, "all", read).records
    return digest(records_identity(records, read.cache), [record.id for record in test])


def records_identity(records: Sequence[Record], cache_path: str | None = None) -> str:
    """Ids, texts, regions and groups of all records in their order, and the content of all images.

    Args:
        cache_path: the cache directory, which remembers the hashes of images; the default one if not given.
    """
    images = image_hashes([record.image for record in records], cache_directory(cache_path))
    return digest(
        [
            [
                [record.id, image, record.captions, record.short, record.group, record.filtered],
                [[region.box, region.sentence] for region in record.regions],
            ]
            for record, image in zip(records, images)
        ]
    )


def digest(*content: Any) -> str:
    return sha256(json.dumps([FORMAT, *content]).encode()).hexdigest()[:16]  # ASCII, also of lone surrogates
