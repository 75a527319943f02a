"""What makes two runs the same run: settings, data, model, and the versions of the code that trains.

Where and how it runs (`RunOptions`) is not part of it.
"""

from __future__ import annotations

import ast
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

from hnclip.config import ReadConfig, TrainConfig
from hnclip.core import InvalidImage, Record
from hnclip.data.records import fraction_of
from hnclip.data.sources import open_data
from hnclip.models import adapters
from hnclip.util.files import read_json

_RANKING = tuple(f"evaluate/{name}.py" for name in ("ranks", "metrics", "retrieval"))  # validation chooses by it
ROOMS = (
    "losses",
    "objectives",
    "models",
    "data",
    "train",
    "core.py",
    "config.py",
    *_RANKING,
)
EVALUATION = (*_RANKING, "evaluate/bootstrap.py")
LIBRARIES = ("torch", "transformers", "numpy", "pillow")

_PICTURES = 32  # read to tell whether pictures are what they were


@dataclass(frozen=True)
class Identity:
    """Two hashes: of what a run is, and of the versions that it is made with."""

    what: str
    versions: str

    def __str__(self) -> str:
        return f"{self.what}-{self.versions}"


def run_identity(config: TrainConfig, *, matched: bool = False) -> Identity:
    """Of a training run.

    Args:
        matched: the margin is γ·mean(Ḡ), which model and data determine.
    """
    plain = replace(
        config,
        read=replace(config.read, cache=None, images=None, match="path", prepared=None),
        # By what they hold, not by where they lie:
        model="",
        tokenizer=None,
        data="",
        validation=None,
        watch=None,
    )
    content = {
        "config": asdict(plain),
        "matched": matched,
        "model": model_fingerprint(config.model, config.tokenizer),
        "data": training_fingerprint(config),
        "watch": None if config.watch is None else gallery_fingerprint(config.watch, None, config.read),
    }
    return Identity(_short(content), _short(versions()))


def model_identity(config: TrainConfig) -> Identity:
    """Of the model that a run would start from, as it is."""
    return Identity(_short(_start(config)), _short(versions()))


def start_fingerprint(config: TrainConfig) -> str:
    """Of what the model is to the code as it stands, before training."""
    return _short({**_start(config), "code": versions()["code"]})


def _start(config: TrainConfig) -> dict[str, Any]:
    opening = {name: getattr(config, name) for name in ("context", "keep", "ratio", "activation")}
    return {"zero-shot": model_fingerprint(config.model, config.tokenizer), **opening}


@cache
def versions() -> dict[str, str]:
    """Of whatever results depend on: the code that trains, without its comments and docstrings, and the libraries."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {
        "code": code_fingerprint(ROOMS),
        "python": python,
        **{name: version(name).partition("+")[0] for name in LIBRARIES},
    }


@cache
def code_fingerprint(rooms: Sequence[str]) -> str:
    """Of what the code of these files and directories of the package does, whatever it says about it."""
    root = Path(str(files("hnclip")))
    paths = [
        path for room in rooms for path in ([root / room] if room.endswith(".py") else (root / room).rglob("*.py"))
    ]
    content = sha256()
    for path in sorted(paths):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        content.update(f"{path.relative_to(root).as_posix()}\n{ast.dump(_silent(tree))}\n".encode())
    return content.hexdigest()[:12]


def _silent(tree: ast.Module) -> ast.Module:
    """The code without strings that stand alone: docstrings of modules, functions, classes and fields."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, name, None), list):
                setattr(node, name, [line for line in body if not _is_string(line)])
    return tree


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def model_fingerprint(model: str, tokenizer: str | None) -> str:
    """Of the files of a model; of one on the hub its name, with the revision if it says one."""
    parts = [model] if Path(model).exists() else model.split("+")
    found = "+".join(_files_fingerprint(part) for part in parts)
    return found if tokenizer is None else f"{found} tokenizer {_files_fingerprint(tokenizer)}"


def _files_fingerprint(name: str) -> str:
    if name == "bundled":
        with as_file(files("hnclip.models") / name) as directory:
            return _files_fingerprint(str(directory))
    path = Path(name)
    if not path.exists():
        return name
    found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    # Cards and other words about a model do not change it.
    used = [file for file in found if file.suffix not in (".md", ".txt") or file.name in ("merges.txt", "vocab.txt")]
    content = sha256()
    for file in used:
        stat = file.stat()
        name = file.relative_to(path).as_posix() if path.is_dir() else file.suffix
        content.update(f"{name} {_file_hash(file, stat.st_size, stat.st_mtime_ns)}\n".encode())
    if base := _adapted_model(path):
        content.update(model_fingerprint(base, None).encode())
    return content.hexdigest()[:16]


def _adapted_model(path: Path) -> str | None:
    """The model that an adapter was made for, without which it is nothing."""
    if not (path / adapters.CONFIG).is_file():
        return None
    if (path / adapters.ABOUT).is_file():
        return read_json(path / adapters.ABOUT).get("base", {}).get("model")
    return read_json(path / adapters.CONFIG).get("base_model_name_or_path")


@cache
def _file_hash(file: Path, size: int, time: int) -> str:
    content = sha256()
    with file.open("rb") as opened:
        while part := opened.read(1 << 20):
            content.update(part)
    return content.hexdigest()


class Trained(NamedTuple):
    """The fields of a configuration that say what a run trains and validates on."""

    data: str
    validation: str | None
    read: ReadConfig
    fraction: float
    limit: int | None

    @staticmethod
    def by(config: TrainConfig) -> Trained:
        return Trained(*(getattr(config, name) for name in Trained._fields))

    def records(self) -> tuple[Record, ...]:
        """Those that are trained on."""
        data = open_data(self.data, self.read, splits={"train", "validation"})
        train = data.part("train", validation_share=self.read.validation_share if self.validation is None else 0.0)
        return fraction_of(train, self.fraction)[: self.limit]

    def held_out(self) -> tuple[Record, ...]:
        """Those that are validated on."""
        if self.validation is None:
            data = open_data(self.data, self.read, splits={"train", "validation"})
            return data.part("validation", validation_share=self.read.validation_share)
        data = open_data(self.validation, self.read, splits={"validation"})
        return data.part("validation" if data.splits() else "all", validation_share=0.0)


def training_fingerprint(config: TrainConfig) -> str:
    """Of the pairs that a run trains and validates on, and of what was prepared for them."""
    prepared = _prepared_fingerprint(config) if config.objective.method in ("goal", "structxlip") else ""
    return f"{_pairs_fingerprint(Trained.by(config))}{prepared}"


@cache
def _pairs_fingerprint(trained: Trained) -> str:
    return f"{records_fingerprint(trained.records())} {records_fingerprint(trained.held_out())}"


def _prepared_fingerprint(config: TrainConfig) -> str:
    from hnclip.data.manifest import KINDS, manifest_path

    paths = [manifest_path(config.read, config.data, kind) for kind in KINDS]
    stats = [(path, path.stat()) for path in paths if path.exists()]
    return "".join(f" {_file_hash(path, stat.st_size, stat.st_mtime_ns)[:16]}" for path, stat in stats)


@cache
def gallery_fingerprint(source: str, split: str | None, read: ReadConfig) -> str:
    """Of the records that are evaluated on."""
    from hnclip.evaluate.retrieval import open_task

    return records_fingerprint(open_task(source, split, read).records)


def records_fingerprint(records: Sequence[Record]) -> str:
    """Of ids, captions and families of all records, and of the pictures of a few."""
    content = sha256()
    for record in records:
        regions = [(region.box, region.sentence) for region in record.regions]
        said = (record.id, record.captions, record.short, record.group, regions)
        content.update(repr(said).encode("utf-8", "surrogatepass"))
    for record in records[:: max(1, len(records) // _PICTURES)]:
        try:
            content.update(sha256(record.image.read()).digest())
        except (InvalidImage, OSError):
            content.update(b"no picture")
    return content.hexdigest()[:16]


def _short(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:10]
