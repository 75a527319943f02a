"""Hugging Face datasets: saved to disk, or on the hub. Pictures stay in their files until somebody looks at them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hnclip.config import ReadConfig
from hnclip.core import InvalidImage, Problem
from hnclip.data.needs import needs
from hnclip.data.pictures import CellImage
from hnclip.data.readers.arrow import picture_columns, plain_rows
from hnclip.data.readers.cells import picture_bytes
from hnclip.data.readers.columns import Columns, Row
from hnclip.data.readers.gather import Found, Gather
from hnclip.data.readers.locate import Pictures
from hnclip.data.readers.places import Places, named_pictures
from hnclip.data.readers.tables import HEAD, Table, add_table
from hnclip.data.records import normal_split

_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(:[\w.-]+)?")
_ROWS = 4096  # of text that are read at once
_WHO = "Hugging Face datasets need"


def is_saved(directory: Path) -> bool:
    """Whether `save_to_disk` wrote this directory."""
    return (directory / "dataset_dict.json").is_file() or all(
        (directory / name).is_file() for name in ("dataset_info.json", "state.json")
    )


def read_saved(directory: Path, read: ReadConfig) -> Found:
    """A Dataset or DatasetDict that was saved to disk."""
    datasets = needs("datasets", _WHO, "data")
    try:
        loaded = datasets.load_from_disk(str(directory))
    except Exception as error:  # whatever a half-written directory makes the library stumble over
        raise ValueError(f"{directory} cannot be read as a saved dataset: {error}") from error
    return _read(loaded, os.path.abspath(directory), directory, read)


def looks_like_hub_name(source: str) -> bool:
    """`owner/name` or `owner/name:config`."""
    return _HUB_NAME.fullmatch(source) is not None


def read_hub(source: str, read: ReadConfig) -> Found:
    """A dataset on the hub, fetched once and then from the local cache. No code of the dataset is run."""
    from huggingface_hub import HfApi, constants

    datasets = needs("datasets", _WHO, "data")
    repository, _, config = source.partition(":")
    offline = constants.HF_HUB_OFFLINE
    try:
        if not offline:
            # One question first: without a connection the library would ask again and again for half a minute.
            HfApi().dataset_info(repository, timeout=10)
        loaded = datasets.load_dataset(repository, config or None)
    except Exception as error:  # the library raises its own and its transport's errors for one thing: no dataset
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        where = "in the local cache, and HF_HUB_OFFLINE is set" if offline else "on the hub"
        hint = "" if offline else "; HF_HUB_OFFLINE=1 takes it from the local cache, if it is there"
        raise ValueError(
            f"data {source!r} is no file or directory here, and was not found {where} ({line}){hint}"
        ) from error
    return _read(loaded, source, None, read)


def _read(loaded: Any, key: str, folder: Path | None, read: ReadConfig) -> Found:
    """The records of a DatasetDict by split, or of a Dataset without.

    Args:
        key: names the data set in the keys of its pictures.
        folder: where pictures are that a cell or column names by a relative path, if there is such a place.
    """
    gather = Gather(own_ids=read.id_column is not None)
    places = Places(named_pictures(read, gather.problems), None if folder is None else Pictures(folder))
    if isinstance(loaded, Mapping):
        for split, dataset in loaded.items():
            table = _dataset_table(dataset, f"{key}/{split}", str(split), folder, gather.problems)
            add_table(gather, table, normal_split(str(split)), read, places)
    else:
        add_table(gather, _dataset_table(loaded, key, "rows", folder, gather.problems), None, read, places)
    return gather.finish(f"rows with a picture and a caption in {key}")


def _dataset_table(dataset: Any, key: str, label: str, folder: Path | None, problems: list[Problem]) -> Table:
    schema = dataset.features.arrow_schema
    holding = picture_columns(schema)
    # As Arrow nothing is decoded, and cells are what the file holds.
    arrow = dataset.with_format("arrow")
    text = [name for name in schema.names if name not in holding]
    first = plain_rows(arrow.select_columns(text)[:HEAD]) if text else ()
    head = [row for row in first if isinstance(row, dict)]

    def rows(columns: Columns) -> Iterator[tuple[str, Row]]:
        names = [name for name in columns.all() if name not in holding]
        pictures = arrow.select_columns([columns.image])
        number = 0
        for batch in arrow.select_columns(names).iter(batch_size=_ROWS):
            for row in plain_rows(batch):
                number += 1
                if isinstance(row, UnicodeDecodeError):
                    problems.append(Problem("bad text", f"{key}:{number}", str(row)))
                    continue
                if columns.image in holding:
                    cell = _Cell(pictures, number - 1, folder)
                    row[columns.image] = CellImage(f"{key}:{number}", dataset._fingerprint, cell)
                yield str(number), row

    return Table(key, label, schema.names, head, rows, holding)


@dataclass(frozen=True)
class _Cell:
    """Reads the picture in one row of a dataset that has a single column."""

    pictures: Any
    row: int
    folder: Path | None

    def __call__(self) -> bytes:
        where = f"row {self.row + 1} of {self.pictures.column_names[0]}"
        try:
            cell = self.pictures[self.row].column(0)[0].as_py()
        except (needs("pyarrow", "Hugging Face data sets need", "data").ArrowException, OSError, IndexError) as error:
            raise InvalidImage("missing image", f"{where} cannot be read: {error}") from error
        return picture_bytes(cell, self.folder, where)
