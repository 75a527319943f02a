"""Files of tables into records."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from hnclip.config import ReadConfig
from hnclip.core import Problem
from hnclip.data.readers.columns import Columns, Row
from hnclip.data.readers.gather import Found, Gather
from hnclip.data.readers.locate import Pictures
from hnclip.data.readers.parquet import parquet_table
from hnclip.data.readers.places import Places, named_pictures
from hnclip.data.readers.rows import read_rows
from hnclip.data.readers.tables import HEAD, Table, add_table

SUFFIXES = (".csv", ".tsv", ".jsonl", ".jsonlines", ".ndjson", ".json", ".parquet")


def read_tables(files: Sequence[tuple[Path, str | None]], read: ReadConfig, base: Path) -> Found:
    """The records of table files, each given with the split that it stands for, if any. Ids are relative to `base`."""
    gather = Gather(own_ids=read.id_column is not None)
    images = named_pictures(read, gather.problems)
    beside: dict[Path, Pictures] = {}
    for path, split in files:
        label = path.relative_to(base).as_posix()
        open_table = parquet_table if path.suffix.lower() == ".parquet" else _text_table
        table = open_table(path, label, gather.problems)
        if table.names:
            pictures = beside.setdefault(path.parent, Pictures(path.parent))
            add_table(gather, table, split, read, Places(images, pictures, os.path.dirname(label)))
    return gather.finish(f"rows with a picture and a caption in {', '.join(str(path) for path, _ in files[:3])}")


def _text_table(path: Path, label: str, problems: list[Problem]) -> Table:
    rows = read_rows(path, problems)
    head = list(islice(rows, HEAD))
    names = list(dict.fromkeys(name for _, row in head for name in row if name))

    def all_rows(columns: Columns) -> Iterator[tuple[str, Row]]:
        return chain(head, rows)

    lists_in_text = path.suffix.lower() in (".csv", ".tsv")
    return Table(str(path), label, names, [row for _, row in head], all_rows, lists_in_text=lists_in_text)
