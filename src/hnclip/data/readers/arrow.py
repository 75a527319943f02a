"""Parquet files and Hugging Face data sets: images stay in their files until they are read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from hnclip.config import ReadConfig
from hnclip.core import InvalidImage
from hnclip.data.image_sources import CellImage, FileImage
from hnclip.data.readers.collect import HEAD, RecordCollector, SourceTable, TableImages, add_table
from hnclip.data.readers.columns import Columns, Row
from hnclip.data.records import DataSet, ReadLog, normal_split
from hnclip.util.optional import import_extra

_ROWS = 4096  # of text, read at once
_IMAGES = 16  # read at once
_RECENT = 3  # batches of images that are kept: threads overtake each other by a few images


def parquet_table(path: Path, label: str, log: ReadLog) -> SourceTable:
    """A Parquet file as a table."""
    with _opened(path) as file:
        names = file.schema_arrow.names
        holding = _image_columns(file.schema_arrow)
        text = [name for name in names if name not in holding]
        first = next(file.iter_batches(batch_size=HEAD, columns=text), None)
        head = [] if first is None else [row for row in _plain_rows(first) if isinstance(row, dict)]
    if len(set(names)) < len(names):
        raise ValueError(f"{path} has several columns of one name: {', '.join(map(repr, names))}")

    def rows(columns: Columns) -> Iterator[tuple[str, Row]]:
        stat = path.stat()
        version = f"{stat.st_size}-{stat.st_mtime_ns}"
        key = os.path.abspath(path)
        chosen = [name for name in columns.all() if name not in holding]
        number = 0
        with _opened(path) as file:
            for group in range(file.num_row_groups):
                cells = _ParquetImages(path, version, columns.image, group)
                before = number
                for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=chosen):
                    for row in _plain_rows(batch):
                        number += 1
                        if isinstance(row, UnicodeDecodeError):
                            log.problem("bad text", f"{path}:{number}", str(row))
                            continue
                        if columns.image in holding:
                            cell = _ImageCell(cells, number - before - 1)
                            row[columns.image] = CellImage(f"{key}:{number}", version, cell)
                        yield str(number), row

    return SourceTable(str(path), label, names, head, rows, holding)


def is_saved(directory: Path) -> bool:
    """Whether `save_to_disk` of the package datasets wrote this directory."""
    return (directory / "dataset_dict.json").is_file() or all(
        (directory / name).is_file() for name in ("dataset_info.json", "state.json")
    )


def read_saved(directory: Path, read: ReadConfig) -> DataSet:
    """A Dataset or DatasetDict that was saved to disk."""
    datasets = import_extra("datasets", "Hugging Face data sets", "data")
    try:
        loaded = datasets.load_from_disk(str(directory))
    except Exception as error:  # a damaged directory makes the library raise many types
        raise ValueError(f"{directory} cannot be read as a saved dataset: {error}") from error
    return _read_datasets(loaded, os.path.abspath(directory), directory, read)


def read_hub(source: str, read: ReadConfig) -> DataSet:
    """A data set on the hub, `owner/name` or `owner/name:config`, downloaded once. No code of the data set is run."""
    from huggingface_hub import HfApi, constants

    datasets = import_extra("datasets", "Hugging Face data sets", "data")
    repository, _, config = source.partition(":")
    offline = constants.HF_HUB_OFFLINE
    try:
        if not offline:
            # One question first: without a connection the library would retry for half a minute.
            HfApi().dataset_info(repository, timeout=10)
        loaded = datasets.load_dataset(repository, config or None)
    except Exception as error:  # the library's own errors and those of its transport
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        where = "in the local cache, and HF_HUB_OFFLINE is set" if offline else "on the hub"
        hint = "" if offline else "; HF_HUB_OFFLINE=1 reads it from the local cache, if it is there"
        raise ValueError(
            f"there is no file or directory {source!r} here, and no such data set was found {where} ({line}){hint}"
        ) from error
    return _read_datasets(loaded, source, None, read)


def _read_datasets(loaded: Any, key: str, folder: Path | None, read: ReadConfig) -> DataSet:
    """The records of a DatasetDict by split, or of a Dataset without.

    Args:
        key: names the data set in the keys of its images.
        folder: where images are that a cell or column names by a relative path, if there is such a place.
    """
    log = ReadLog()
    collector = RecordCollector(log, own_ids=read.id_column is not None)
    images = TableImages(read, log)
    images.enter(folder)
    parts = loaded if isinstance(loaded, Mapping) else {None: loaded}
    for split, dataset in parts.items():
        table = _dataset_table(dataset, key if split is None else f"{key}/{split}", split or "rows", folder, log)
        add_table(collector, table, None if split is None else normal_split(str(split)), read, images)
    images.warn(log)
    return collector.finish(key, f"rows with an image and a caption in {key}")


def _dataset_table(dataset: Any, key: str, label: str, folder: Path | None, log: ReadLog) -> SourceTable:
    schema = dataset.features.arrow_schema
    holding = _image_columns(schema)
    arrow = dataset.with_format("arrow")  # in this format nothing is decoded
    text = [name for name in schema.names if name not in holding]
    first = _plain_rows(arrow.select_columns(text)[:HEAD]) if text else ()
    head = [row for row in first if isinstance(row, dict)]
    files = [os.stat(file["filename"]) for file in dataset.cache_files]
    version = "-".join([str(len(dataset)), *(f"{stat.st_size}-{stat.st_mtime_ns}" for stat in files)])

    def rows(columns: Columns) -> Iterator[tuple[str, Row]]:
        names = [name for name in columns.all() if name not in holding]
        cells = _DatasetImages(arrow.select_columns([columns.image]), folder)
        number = 0
        for batch in arrow.select_columns(names).iter(batch_size=_ROWS):
            for row in _plain_rows(batch):
                number += 1
                if isinstance(row, UnicodeDecodeError):
                    log.problem("bad text", f"{key}:{number}", str(row))
                    continue
                if columns.image in holding:
                    row[columns.image] = CellImage(f"{key}:{number}", version, _ImageCell(cells, number - 1))
                yield str(number), row

    return SourceTable(key, label, schema.names, head, rows, holding)


def _image_columns(schema: Any) -> list[str]:
    """The columns that hold images: bytes, or Hugging Face's struct of bytes and path."""
    types = import_extra("pyarrow", "Parquet files", "data").types

    def is_bytes(kind: Any) -> bool:
        return types.is_binary(kind) or types.is_large_binary(kind)

    def holds_images(kind: Any) -> bool:
        if types.is_struct(kind):
            return any(field.name == "bytes" and is_bytes(field.type) for field in kind)
        return is_bytes(kind)

    return [field.name for field in schema if holds_images(field.type)]


def _plain_rows(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """The rows of a batch as Python values; for a row with text that is not UTF-8, the error."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for row in range(batch.num_rows):
            try:
                yield batch.slice(row, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield error


@dataclass(frozen=True, slots=True)
class _ParquetImages:
    """The images of a row group."""

    path: Path
    version: str
    column: str
    group: int

    def read(self, row: int) -> bytes:
        where = f"{self.path} (row group {self.group}, row {row}, column {self.column})"
        try:
            cell = _row_group(self).cell(row)
        except (ValueError, StopIteration) as error:
            raise InvalidImage("missing image", f"{where} cannot be read: {error}") from error
        return _image_bytes(cell, self.path.parent, where)


@dataclass(frozen=True, slots=True)
class _DatasetImages:
    """The images of a data set that has a single column."""

    images: Any
    folder: Path | None

    def read(self, row: int) -> bytes:
        where = f"row {row + 1} of {self.images.column_names[0]}"
        try:
            cell = self.images[row].column(0)[0].as_py()
        except (import_extra("pyarrow", "Hugging Face data sets", "data").ArrowException, OSError, IndexError) as error:
            raise InvalidImage("missing image", f"{where} cannot be read: {error}") from error
        return _image_bytes(cell, self.folder, where)


@dataclass(frozen=True, slots=True)
class _ImageCell:
    """Reads the image in one row. All rows share `images`."""

    images: _ParquetImages | _DatasetImages
    row: int

    def __call__(self) -> bytes:
        return self.images.read(self.row)


def _image_bytes(cell: Any, folder: Path | None, where: str) -> bytes:
    """The bytes of an image in a cell: bytes, or Hugging Face's {"bytes", "path"}, of which the path is read if there
    are no bytes."""
    path = None
    if isinstance(cell, Mapping):
        cell, path = cell.get("bytes"), cell.get("path")
    if isinstance(cell, bytes):
        return cell
    if path:
        return FileImage(Path(folder or "", path)).read()
    raise InvalidImage("missing image", f"{where} holds no image")


@lru_cache(maxsize=4)
def _row_group(images: _ParquetImages) -> _RowGroup:
    return _RowGroup(images)


class _RowGroup:
    """Reads a row group a few images at a time: a file of one row group may be larger than memory. Reading in the order
    of the rows is fast; an image further back costs another pass."""

    def __init__(self, images: _ParquetImages) -> None:
        self._images = images
        self._lock = Lock()
        self._recent: deque[tuple[int, Sequence[Any]]] = deque(maxlen=_RECENT)  # batches: first row, and cells
        self._batches: Iterator[Any] = iter(())

    def cell(self, row: int) -> Any:
        source = self._images
        with self._lock, _arrow_errors(source.path):
            if not self._recent or row < self._recent[0][0]:
                file = import_extra("pyarrow.parquet", "Parquet files", "data").ParquetFile(
                    source.path, memory_map=True
                )
                self._batches = file.iter_batches(_IMAGES, row_groups=[source.group], columns=[source.column])
                self._recent.clear()
                self._recent.append((0, next(self._batches).column(0)))
            while row >= self._recent[-1][0] + len(self._recent[-1][1]):
                start, cells = self._recent[-1]
                self._recent.append((start + len(cells), next(self._batches).column(0)))
            start, cells = next(found for found in reversed(self._recent) if found[0] <= row)
            return cells[row - start].as_py()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    parquet = import_extra("pyarrow.parquet", "Parquet files", "data")
    with _arrow_errors(path), parquet.ParquetFile(path) as file:
        yield file


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (import_extra("pyarrow", "Parquet files", "data").ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error
