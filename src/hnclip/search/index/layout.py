"""Where the files of an index lie, and the header that says which of them count."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from hnclip.util.files import read_json, replace_file

FORMAT = "hnclip index"
LAYOUT = 1  # of the files; another number is another way to read them
HEADER = "index.json"
LOCK = "lock"
CATALOGUE = "catalogue.sqlite"
THUMBNAILS = "thumbnails"
TOKENS = "tokens.bf16"
ENGINES = "engines"

Kind = Literal["images", "captions"]
KINDS: tuple[Kind, ...] = ("images", "captions")
Storage = Literal["bf16", "int8"]
EngineName = Literal["exact", "faiss-ivf", "faiss-hnsw", "milvus"]


@dataclass(frozen=True)
class About:
    """What an index was made with and of; search must use the same model.

    Args:
        model: as it was given to `hnclip index`; `source` is what was recognised, `fingerprint` what it computes by.
        opening: how it was opened (`hnclip.config.Opening`), for names and values that are not the usual ones.
        width: of a vector.
        storage: of vectors. bf16 keeps codes of 8 bits beside them, int8 these alone.
        patches: vectors of patches that each picture has in `tokens.bf16`; 0 if they are not kept.
        data: what was indexed, as given, but of files and folders the absolute path; `root` the directory that places
            of files are relative to, if there is one.
        engine: that searches unless another is asked for; `uri` of one that is elsewhere.
        split: of the data, or all.
    """

    model: str
    source: str
    fingerprint: str
    opening: dict[str, Any]
    width: int
    storage: Storage
    patches: int
    data: str
    root: str | None
    engine: str = "exact"
    uri: str | None = None
    split: str = "all"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str, path: Path) -> About:
        """
        Args:
            path: of the index, for messages.
        """
        try:
            found = json.loads(text)
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(damaged(path, f"its catalogue does not say what it is about ({error!r})")) from error

    def command(self, path: Path, **instead: str) -> str:
        """`hnclip index …` that makes this index or brings it up to date; `instead` are other values for options."""
        words = ["hnclip", "index", self.data, "--out", str(path)]
        given = {"model": self.model, "split": self.split, "storage": self.storage, **instead}
        usual = {"model": "bundled", "split": "all", "storage": "bf16"}
        words += [word for name, value in given.items() if value != usual.get(name) for word in (f"--{name}", value)]
        words += ["--tokens"] * bool(self.patches)
        return shlex.join([*words, *_options(self.opening)])


def generation_directory(path: Path, generation: int) -> Path:
    return path / f"{generation:06d}"


def write_header(path: Path, generation: int) -> None:
    """From here on this generation counts, also after a power cut: its names are on the disk before, the header's
    afterwards, so that an older generation may be removed."""
    for directory in (generation_directory(path, generation), path):
        _flush_names(directory)
    with replace_file(path / HEADER) as file:
        file.write_text(json.dumps({"format": FORMAT, "layout": LAYOUT, "generation": generation}), encoding="utf-8")
    _flush_names(path)


def read_header(path: Path) -> int:
    """The generation that counts.

    Raises:
        ValueError: there is no index, or one that cannot be read; the message says what to do.
    """
    make = f"make it with hnclip index FOLDER --out {path}"
    if not path.exists():
        raise ValueError(f"{path} does not exist: {make}")
    if not (path / HEADER).is_file():
        raise ValueError(f"{path} is no index of hnclip, it has no {HEADER}: {make}")
    try:
        header = read_json(path / HEADER)
    except ValueError as error:
        raise ValueError(f"{damaged(path, f'{HEADER} cannot be read')}\n{error}") from error
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path / HEADER} is not that of an index of hnclip: make one with hnclip index FOLDER --out INDEX.hnc"
        )
    if header.get("layout") != LAYOUT:
        raise ValueError(
            f"{path} has layout {header.get('layout')}, this version of hnclip reads {LAYOUT}: use the version that "
            f"made it, or make it anew with hnclip index FOLDER --out {path} --replace"
        )
    if not isinstance(header.get("generation"), int):
        raise ValueError(damaged(path, f"{HEADER} names no generation"))
    return header["generation"]


def damaged(path: Path, what: str) -> str:
    return f"{path} is damaged: {what}. Make it anew with hnclip index FOLDER --out {path} --replace"


def _options(opening: Mapping[str, Any]) -> list[str]:
    """How a model is opened, as options; what is None or usual is left out."""
    from hnclip.config import Opening

    usual = vars(Opening())
    return [word for name, value in opening.items() if value != usual.get(name) for word in (f"--{name}", str(value))]


def _flush_names(directory: Path) -> None:
    if os.name == "nt":  # there directories cannot be opened
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
