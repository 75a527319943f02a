"""Parquet files, with pictures' names or with the pictures themselves in their cells."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from hnclip.core import InvalidImage, Problem
from hnclip.data.needs import needs
from hnclip.data.pictures import CellImage
from hnclip.data.readers.arrow import picture_columns, plain_rows
from hnclip.data.readers.cells import picture_bytes
from hnclip.data.readers.columns import Columns, Row
from hnclip.data.readers.tables import HEAD, Table

_ROWS = 4096  # of text that are read at once
_PICTURES = 16  # that are read at once
_RECENT = 3  # batches that are kept: threads overtake each other by a few pictures


def parquet_table(path: Path, label: str, problems: list[Problem]) -> Table:
    """A Parquet file as a table. Pictures stay in the file until somebody looks at them."""
    with _opened(path) as file:
        names = file.schema_arrow.names
        holding = picture_columns(file.schema_arrow)
        text = [name for name in names if name not in holding]
        first = next(file.iter_batches(batch_size=HEAD, columns=text), None)
        head = [] if first is None else [row for row in plain_rows(first) if isinstance(row, dict)]

    def rows(columns: Columns) -> Iterator[tuple[str, Row]]:
        return _rows(path, columns, holding, problems)

    return Table(str(path), label, names, head, rows, holding)


def _rows(path: Path, columns: Columns, holding: Sequence[str], problems: list[Problem]) -> Iterator[tuple[str, Row]]:
    stat = path.stat()
    version = f"{stat.st_size}-{stat.st_mtime_ns}"
    names = [name for name in columns.all() if name not in holding]
    number = 0
    with _opened(path) as file:
        for group in range(file.num_row_groups):
            before = number
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=names):
                for row in plain_rows(batch):
                    number += 1
                    if isinstance(row, UnicodeDecodeError):
                        problems.append(Problem("bad text", f"{path}:{number}", str(row)))
                        continue
                    if columns.image in holding:
                        cell = _Cell(path, version, columns.image, group, number - before - 1)
                        row[columns.image] = CellImage(f"{os.path.abspath(path)}:{number}", version, cell)
                    yield str(number), row


@dataclass(frozen=True)
class _Cell:
    """Reads the picture in one row of a row group."""

    path: Path
    version: str
    column: str
    group: int
    row: int

    def __call__(self) -> bytes:
        where = f"{self.path} (row group {self.group}, row {self.row}, column {self.column})"
        try:
            cell = _row_group(self.path, self.version, self.column, self.group).cell(self.row)
        except (ValueError, StopIteration) as error:
            raise InvalidImage("missing image", f"{where} cannot be read: {error}") from error
        return picture_bytes(cell, self.path.parent, where)


@lru_cache(maxsize=4)
def _row_group(path: Path, version: str, column: str, group: int) -> _RowGroup:
    return _RowGroup(path, column, group)


class _RowGroup:
    """The pictures of a row group, a few at a time: a file of one row group may be larger than memory. Pictures are
    fast in the order of their rows, more or less; one that lies further back costs another pass."""

    def __init__(self, path: Path, column: str, group: int) -> None:
        self._path = path
        self._column = column
        self._group = group
        self._lock = Lock()
        self._recent: deque[tuple[int, Sequence[Any]]] = deque(maxlen=_RECENT)  # batches: first row, and cells
        self._batches: Iterator[Any] = iter(())

    def cell(self, row: int) -> Any:
        with self._lock, _arrow_errors(self._path):
            if not self._recent or row < self._recent[0][0]:
                file = needs("pyarrow.parquet", "Parquet files need", "data").ParquetFile(self._path, memory_map=True)
                self._batches = file.iter_batches(_PICTURES, row_groups=[self._group], columns=[self._column])
                self._recent.clear()
                self._recent.append((0, next(self._batches).column(0)))
            while row >= self._recent[-1][0] + len(self._recent[-1][1]):
                start, cells = self._recent[-1]
                self._recent.append((start + len(cells), next(self._batches).column(0)))
            start, cells = next(found for found in reversed(self._recent) if found[0] <= row)
            return cells[row - start].as_py()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    parquet = needs("pyarrow.parquet", "Parquet files need", "data")
    with _arrow_errors(path), parquet.ParquetFile(path) as file:
        yield file


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (needs("pyarrow", "Parquet files need", "data").ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error
