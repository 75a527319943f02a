"""What an engine has made of the rows of one kind, in a file beside it: a generation's `engines/KIND.ENGINE.json`.

It is written last and replaced in one step, so what it names is whole. Rows mean something within their generation
alone, and within it they never change: an engine that has fewer of them than the index is only behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hnclip.search.index.layout import ENGINES, About, Kind
from hnclip.search.index.vectors import StoredVectors
from hnclip.util.console import progress
from hnclip.util.files import read_json, replace_file

FEW = 1_000  # rows; fewer are scanned as quickly as any engine could answer
BLOCK = 2**27  # bytes of float32 that an engine is given at once


class Version(Protocol):
    """An index, or its writer: where the files lie, and whose they are."""

    @property
    def path(self) -> Path: ...
    @property
    def directory(self) -> Path: ...
    @property
    def generation(self) -> int: ...
    @property
    def about(self) -> About: ...


@dataclass(frozen=True)
class Made:
    """
    Args:
        rows: that the engine knows, from the first on.
        trained: rows that there were when it was made; those that came later were only added.
        details: what else the engine needs to open it.
    """

    engine: str
    kind: Kind
    generation: int
    width: int
    rows: int
    trained: int
    details: dict[str, Any] = field(default_factory=dict)


def made_file(version: Version, kind: Kind, engine: str) -> Path:
    return version.directory / ENGINES / f"{kind}.{engine}.json"


def read_made(version: Version, kind: Kind, engine: str, needed: Sequence[str] = ()) -> Made | None:
    """What the engine has made in this generation; None if there is nothing, or nothing that can be used.

    Args:
        needed: which details there must be.
    """
    try:
        found = read_json(made_file(version, kind, engine))
        made = Made(**{one.name: found[one.name] for one in fields(Made)})
    except (FileNotFoundError, ValueError, KeyError):
        return None
    if not isinstance(made.details, dict) or not made.details.keys() >= set(needed):
        return None
    expected = (engine, kind, version.generation, version.about.width)
    return made if (made.engine, made.kind, made.generation, made.width) == expected else None


def write_made(version: Version, made: Made) -> None:
    with replace_file(made_file(version, made.kind, made.engine)) as file:
        file.write_text(json.dumps(asdict(made)), encoding="utf-8")


def again(version: Version, engine: str) -> str:
    """What to do where an engine has nothing that can be used."""
    return f"make it with\n  {version.about.command(version.path, engine=engine)}"


def row_blocks(vectors: StoredVectors, first: int, what: str, *, size: int = BLOCK) -> Iterator[tuple[int, np.ndarray]]:
    """Rows from `first` on, some at a time, each time with the number of the first of them.

    Shape:
        blocks [n, D] float32
    """
    count, width = vectors.shape
    step = max(1, size // (4 * width))
    with progress(what, count, first) as bar:
        for start in range(first, count, step):
            yield start, vectors.rows(slice(start, start + step))
            bar.advance(min(step, count - start))
