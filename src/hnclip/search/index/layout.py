"""Where the files of an index lie, and the header that says which of them count."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from hnclip.files import read_settings, replace_file

FORMAT = "hnclip index"
LAYOUT = 1  # of the files; another number is another way to read them
HEADER = "index.json"
LOCK = "lock"
CATALOGUE = "catalogue.sqlite"
THUMBNAILS = "thumbnails"
TOKENS = "tokens.bf16"
ENGINES = "engines"

Kind = Literal["images", "captions"]
Storage = Literal["bf16", "int8"]


@dataclass(frozen=True)
class About:
    """What an index was made with and of; search must use the same model.

    Args:
        model: as it was given to `hnclip index`; `source` is what was recognised, `fingerprint` what it computes by.
        opening: how it was opened (`hnclip.options.Opening`), for names and values that are not the usual ones.
        width: of a vector.
        storage: of vectors. bf16 keeps codes of 8 bits beside them, int8 these alone.
        patches: vectors of patches that each picture has in `tokens.bf16`; 0 if they are not kept.
        data: what was indexed, as given; `root` the directory that places of files are relative to, if there is one.
        engine: that searches unless another is asked for; `uri` of one that is elsewhere.
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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> About:
        found = json.loads(text)
        return cls(**{field.name: found[field.name] for field in fields(cls)})


def generation_directory(path: Path, generation: int) -> Path:
    return path / f"{generation:06d}"


def write_header(path: Path, generation: int) -> None:
    """From here on this generation counts."""
    with replace_file(path / HEADER) as file:
        file.write_text(json.dumps({"format": FORMAT, "layout": LAYOUT, "generation": generation}), encoding="utf-8")


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
        header = read_settings(path / HEADER)
    except ValueError as error:
        raise ValueError(f"{damaged(path, f'{HEADER} cannot be read')}\n{error}") from error
    if header.get("format") != FORMAT or not isinstance(header.get("generation"), int):
        raise ValueError(f"{path / HEADER} is not that of an index of hnclip: {make}")
    if header.get("layout") != LAYOUT:
        raise ValueError(
            f"{path} has layout {header.get('layout')}, this version of hnclip reads {LAYOUT}: index the pictures "
            "again, or use the version that made it"
        )
    return header["generation"]


def damaged(path: Path, what: str) -> str:
    return f"{path} is damaged: {what}. Remove it and index the pictures again"
