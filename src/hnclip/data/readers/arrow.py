"""Parquet files and Hugging Face data sets: images stay in their files until they are read."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

from hnclip.config import ReadConfig
from hnclip.data.image_sources import CellImage
from hnclip.data.readers.collect import HEAD, RecordCollector, SourceTable
from hnclip.data.readers.columns import Columns, Row, listed
from hnclip.data.records import DataSet, normal_split
from hnclip.util.optional import import_extra

ReadCell = Callable[[int], Any]  # the cell in a row of a column

_ROWS = 4096  # of text, read at once
_IMAGES = 16  # read at once
_RECENT = 3  # batches of images that are kept: threads overtake each other by a few images


def parquet_table(path: Path, label: str) -> SourceTable:
    """A Parquet file as a table."""
    with _parquet(path) as file:
        schema = file.schema_arrow
    if len(set(schema.names)) < len(schema.names):
        raise ValueError(f"{path} has several columns of one name: {listed(schema.names)}")
    stat = path.stat()
    key, version = os.path.abspath(path), f"{stat.st_size}-{stat.st_mtime_ns}"

    def batches(names: list[str]) -> Iterator[Any]:
        with _parquet(path) as file:
            yield from file.iter_batches(batch_size=_ROWS, columns=names)

    def cells(column: str) -> ReadCell:
        return partial(_parquet_cell, path, version, column)

    return _arrow_table(key, label, version, path.parent, schema, batches, cells)


def is_saved(directory: Path) -> bool:
    """Whether `save_to_disk` of the package datasets wrote this directory."""
    return (directory / "dataset_dict.json").is_file() or all(
        (directory / name).is_file() for name in ("dataset_info.json", "state.json")
    )


def read_saved(directory: Path, read: ReadConfig) -> DataSet:
    """A Dataset or DatasetDict that was saved to disk."""
    datasets = import_extra("datasets", "Hugging Face data sets", "data")
    with _library_errors(directory):
        loaded = datasets.load_from_disk(str(directory))
    return _read_datasets(loaded, os.path.abspath(directory), directory, read)


def read_hub(source: str, read: ReadConfig) -> DataSet:
    """A data set on the hub, `owner/name` or `owner/name:config`, downloaded once. No code of the data set is run."""
    from huggingface_hub import HfApi, constants

    datasets = import_extra("datasets", "Hugging Face data sets", "data")
    repository, _, config = source.partition(":")
    try:
        if not constants.HF_HUB_OFFLINE:
            # One question first: without a connection the library would retry for half a minute.
            HfApi().dataset_info(repository, timeout=10)
        loaded = datasets.load_dataset(repository, config or None)
    except Exception as error:  # the library's own errors and those of its transport
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        where = "in the local cache (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else "on the hub"
        raise ValueError(
            f"there is no file or directory {source!r} here, and no such data set {where}: {line}"
        ) from error
    return _read_datasets(loaded, source, None, read)


def _read_datasets(loaded: Any, key: str, folder: Path | None, read: ReadConfig) -> DataSet:
    """The records of a DatasetDict by split, or of a Dataset without. `key` names the data set in the keys of its
    images; images that cells name by a relative path are in `folder`, if there is such a place."""
    collector = RecordCollector(read)
    if folder is not None:
        collector.images.enter(folder)
    for split, dataset in (loaded if isinstance(loaded, Mapping) else {None: loaded}).items():
        part = key if split is None else f"{key}/{split}"
        table = _dataset_table(dataset, part, str(split or "rows"), folder)
        collector.add_table(table, None if split is None else normal_split(str(split)))
    return collector.finish(key)


def _dataset_table(dataset: Any, key: str, label: str, folder: Path | None) -> SourceTable:
    arrow = dataset.with_format("arrow")  # in this format nothing is decoded
    files = [os.stat(file["filename"]) for file in dataset.cache_files]
    version = "-".join([str(len(dataset)), *(f"{stat.st_size}-{stat.st_mtime_ns}" for stat in files)])

    def batches(names: list[str]) -> Iterator[Any]:
        yield from arrow.select_columns(names).iter(batch_size=_ROWS)

    def cells(column: str) -> ReadCell:
        return partial(_dataset_cell, arrow.select_columns([column]))

    return _arrow_table(key, label, version, folder, dataset.features.arrow_schema, batches, cells)


def _arrow_table(
    key: str,
    label: str,
    version: str,
    folder: Path | None,
    schema: Any,
    batches: Callable[[list[str]], Iterator[Any]],
    cells: Callable[[str], ReadCell],
) -> SourceTable:
    """A table of which `batches` reads columns of text, and `cells` the images that a column holds."""
    text = _text_columns(schema)

    def rows(columns: Columns) -> Iterator[tuple[str, Row]]:
        cell = None if columns.image in text else cells(columns.image)
        found = (
            row for batch in batches([name for name in columns.all() if name in text]) for row in batch.to_pylist()
        )
        for number, row in enumerate(found):
            if cell is not None:
                row[columns.image] = CellImage(key, number, version, cell, folder)
            yield str(number + 1), row

    first = next(batches(text), None) if text else None
    head = [] if first is None else first.slice(0, HEAD).to_pylist()
    holding = [name for name in schema.names if name not in text]
    return SourceTable(key, label, rows, names=schema.names, head=head, holding=holding)


def _text_columns(schema: Any) -> list[str]:
    """All columns but those that hold images: bytes, or Hugging Face's struct of bytes and path."""
    types = import_extra("pyarrow", "Parquet files", "data").types

    def holds_images(kind: Any) -> bool:
        kinds = [field.type for field in kind if field.name == "bytes"] if types.is_struct(kind) else [kind]
        return any(types.is_binary(kind) or types.is_large_binary(kind) for kind in kinds)

    return [field.name for field in schema if not holds_images(field.type)]


def _dataset_cell(images: Any, row: int) -> Any:
    return images[row].column(0)[0].as_py()


def _parquet_cell(path: Path, version: str, column: str, row: int) -> Any:
    return _parquet_column(path, version, column).cell(row)


class _ParquetColumn:
    """Reads a column of images a few at a time: a row group may be larger than memory. Reading in the order of the rows
    is fast; another row costs a pass over its row group."""

    def __init__(self, path: Path, version: str, column: str) -> None:
        self._path, self._column = path, column
        self._lock = Lock()
        self._recent: deque[tuple[int, Sequence[Any]]] = deque(maxlen=_RECENT)  # batches: first row, and cells
        self._batches: Iterator[Any] = iter(())
        with _parquet(path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        self._starts = [0, *accumulate(sizes)]  # first rows of the row groups, and the number of rows

    def cell(self, row: int) -> Any:
        with self._lock:
            group = bisect_right(self._starts, row) - 1
            end = self._recent[-1][0] + len(self._recent[-1][1]) if self._recent else 0
            if not self._recent or row < self._recent[0][0] or self._starts[group] > end:
                parquet = import_extra("pyarrow.parquet", "Parquet files", "data")
                file = parquet.ParquetFile(self._path, memory_map=True)
                groups = range(group, file.num_row_groups)
                self._batches = file.iter_batches(_IMAGES, row_groups=groups, columns=[self._column])
                self._recent.clear()
                end = self._starts[group]
            while row >= end:
                cells = next(self._batches).column(0)
                self._recent.append((end, cells))
                end += len(cells)
            start, cells = next(found for found in reversed(self._recent) if found[0] <= row)
            return cells[row - start].as_py()


# One reader for all cells of a column; another one after the file has changed.
_parquet_column = lru_cache(maxsize=8)(_ParquetColumn)


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    parquet = import_extra("pyarrow.parquet", "Parquet files", "data")
    with _library_errors(path), parquet.ParquetFile(path) as file:
        yield file


@contextmanager
def _library_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file makes the libraries raise many types
        raise ValueError(f"{path} cannot be read: {error}") from error
