"""Rows of text tables: CSV, TSV, JSON lines, JSON. One bad row is a problem, not the end of the file."""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hnclip.core import Problem
from hnclip.data.readers.coco import rows_of_object

# A row's place in its file, for messages, and its cells by column.
PlacedRow = tuple[str, dict[str, Any]]

_DELIMITERS = ("\t", ",", ";", "|")
_LONGEST_ROW = 1000  # lines; a row beyond it has a quote that was never closed


def read_rows(path: Path, problems: list[Problem]) -> Iterator[PlacedRow]:
    """The rows of a table, one after the other. What cannot be read as a row is added to the problems.

    Bytes that are not UTF-8 come as surrogate escapes: `cells.bad_text` finds them.
    """
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return _csv_rows(path, problems)
    if suffix in (".jsonl", ".ndjson", ".jsonlines") or _is_json_lines(path):
        return _json_lines(path, problems)
    return _json_rows(path, problems)


def _csv_rows(path: Path, problems: list[Problem]) -> Iterator[PlacedRow]:
    csv.field_size_limit(2**31 - 1)  # the module's own limit of 128 kB is one for the whole process
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = _Lines(file)
        first = lines.peek()
        if first.startswith("\udcff\udcfe") or first.startswith("\udcfe\udcff"):
            raise ValueError(f"{path} is UTF-16; save it as UTF-8")
        delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(first)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        header: list[str] = []
        while True:
            lines.begin_row()
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                problems.append(Problem("unreadable row", f"{path}:{lines.start}", str(error)))
                lines.resume_after_first()
                continue
            if not any(cells):
                continue
            if not header:
                header = [name.strip() for name in cells]
                while not header[-1]:
                    header.pop()
                repeated = [name for name in dict.fromkeys(header) if name and header.count(name) > 1]
                if repeated:
                    raise ValueError(f"{path} has more than one column {repeated[0]!r}")
            elif len(cells) < len(header) or any(cells[len(header) :]):
                detail = f"{len(cells)} cells for {len(header)} columns; text that holds {delimiter!r} must be quoted"
                problems.append(Problem("unreadable row", f"{path}:{lines.start}", detail))
            else:
                yield str(lines.start), dict(zip(header, cells))


class _Lines:
    """Lines for `csv.reader`, which can go back: where a quote is not closed, the row's first line alone is lost and
    not all that the quote would swallow."""

    def __init__(self, file: Iterable[str]) -> None:
        self._file = iter(file)
        self._again: deque[str] = deque()
        self._row: list[str] = []
        self.start = 1
        """The number of the row's first line."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if len(self._row) == _LONGEST_ROW:
            raise csv.Error(f"a quote is open for more than {_LONGEST_ROW} lines")
        line = self._again.popleft() if self._again else next(self._file)
        self._row.append(line)
        return line

    def peek(self) -> str:
        line = next(self._file, "")
        self._again.append(line)
        return line

    def begin_row(self) -> None:
        self.start += len(self._row)
        self._row = []

    def resume_after_first(self) -> None:
        self._again.extendleft(reversed(self._row[1:]))
        self._row = self._row[:1]


def _delimiter(header: str) -> str:
    """The delimiter that the line with the columns' names has most of, outside of quotes."""
    bare = "".join(header.split('"')[::2])
    return max(_DELIMITERS, key=bare.count) if any(map(bare.count, _DELIMITERS)) else ","


def _json_lines(path: Path, problems: list[Problem]) -> Iterator[PlacedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = _decode(line)
            if not text or text.isspace():
                continue
            try:
                row = json.loads(text)
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__}, not an object")
            except (ValueError, RecursionError) as error:
                problems.append(Problem("unreadable row", f"{path}:{number}", str(error)))
            else:
                yield str(number), row


def _json_rows(path: Path, problems: list[Problem]) -> Iterator[PlacedRow]:
    try:
        content = json.loads(_decode(path.read_bytes()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    rows: Iterator[tuple[str, Any]]
    if isinstance(content, dict):
        rows = rows_of_object(path, content)
    elif isinstance(content, list):
        rows = ((f"[{number}]", row) for number, row in enumerate(content))
    else:
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, not a list of objects")
    for place, row in rows:
        if isinstance(row, dict):
            yield place, row
        else:
            problems.append(Problem("unreadable row", f"{path}:{place}", f"a {type(row).__name__}, not an object"))


def _is_json_lines(path: Path) -> bool:
    """Whether a .json file has an object on each of its first two lines, as many tools write them."""
    with path.open("rb") as file:
        lines = [line for line in (file.readline(1 << 20), file.readline(1 << 20)) if line.strip()]
    try:
        return len(lines) == 2 and all(isinstance(json.loads(_decode(line)), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def _decode(content: bytes) -> str:
    return content.decode("utf-8-sig", "surrogateescape")
