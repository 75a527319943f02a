"""Rows of published files into records; a row that is no record becomes a problem that says why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hnclip.core import Problem, Record
from hnclip.data.readers.cells import RowProblem, bad_text
from hnclip.data.readers.rows import read_rows

Row = Mapping[str, Any]
Item = TypeVar("Item")


def make_records(
    items: Iterable[tuple[str, Item]], make: Callable[[Item], Record | None]
) -> Iterator[Record | Problem]:
    """What `make` makes of each item, or the problem that it raises; None for items that are of no concern here. Items
    come with where they are from."""
    for where, item in items:
        try:
            record = make(item)
        except RowProblem as error:
            yield Problem(error.kind, where, str(error))
        else:
            if record is not None:
                yield record


def file_records(file: Path, make: Callable[[Row], Record | None]) -> Iterator[Record | Problem]:
    """The same for the rows of a file of JSON, or JSON lines."""
    unreadable: list[Problem] = []
    yield from make_records(((f"{file}:{place}", row) for place, row in read_rows(file, unreadable)), make)
    yield from unreadable


def read_json(file: Path) -> Any:
    """The content of a JSON file that is no table."""
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


def caption_of(row: Row, *keys: str) -> str:
    """The text under the first of these keys that the row has, without white space around it."""
    return checked_caption(_first(row, keys, "no caption"))


def checked_caption(caption: object) -> str:
    if not isinstance(caption, str):
        raise RowProblem("unreadable row", f"its caption is {type(caption).__name__}, not text")
    if not caption.strip():
        raise RowProblem("empty caption", "its caption holds no word")
    if bad := bad_text(caption):
        raise RowProblem("bad text", f"its caption cannot be used: {bad}")
    return caption.strip()


def picture_of(row: Row, *keys: str) -> str:
    """The picture's name under the first of these keys, as the row gives it."""
    name = _first(row, keys, "no image")
    if not isinstance(name, str) or not base_name(name):
        raise RowProblem("no image", f"names its picture {name!r}")
    return name


def base_name(path: str) -> str:
    """The last part of a path of any machine: published lists carry the directories of whoever made them."""
    return re.split(r"[/\\]", path)[-1]


def stem(path: str) -> str:
    """The base name without its suffix: what benchmarks call a picture."""
    name = base_name(path)
    return name.rpartition(".")[0] or name


def _first(row: Row, keys: tuple[str, ...], kind: str) -> object:
    for key in keys:
        if row.get(key) is not None:
            return row[key]
    raise RowProblem(kind, f"has no {' or '.join(keys)}")
