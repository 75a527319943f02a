"""WebDataset shards: tar files in which members of one name make a sample. Pictures are read where they lie."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from hnclip.config import ReadConfig
from hnclip.core import Problem
from hnclip.data.pictures import IMAGE_SUFFIXES
from hnclip.data.readers.columns import Columns, Row
from hnclip.data.readers.folder import one_caption
from hnclip.data.readers.gather import Found, Gather
from hnclip.data.readers.places import Places
from hnclip.data.readers.tables import HEAD, Table, add_table
from hnclip.data.readers.tars import TarIndex, index_tar

# Columns of a sample beside the keys of its .json.
_IMAGE, _TEXT = ".image", ".txt"

# The members of a sample by what follows the first dot of their base name: that is how WebDataset divides names.
Sample = dict[str, str]


def read_shards(files: Sequence[tuple[Path, str | None]], read: ReadConfig, base: Path) -> Found:
    """The records of shards, each given with the split that it stands for, if any.

    A sample is a picture with a caption in a .txt or .caption or, in shards without these, under a key of a .json,
    which may also say the split and more. Ids are the samples' keys, with the shard's name where keys are not unique.
    """
    gather = Gather(own_ids=read.id_column is not None)
    for path, split in files:
        index = index_tar(path)
        gather.problems += index.problems
        table = _shard_table(index, path.relative_to(base).as_posix(), gather.problems)
        caption = _TEXT if _TEXT in table.names and read.caption_column is None else read.caption_column
        if table.names:
            chosen = replace(read, image_column=None, caption_column=caption)
            add_table(gather, table, split, chosen, Places(None, None))
    shards = ", ".join(str(path) for path, _ in files[:3])
    return gather.finish(f"pictures with a .txt, .caption or .json of the same name in {shards}")


def _shard_table(index: TarIndex, label: str, problems: list[Problem]) -> Table:
    samples = _samples(index)
    head = [row for _, row in islice(_rows(index, samples, []), HEAD)]
    names = list(dict.fromkeys(name for row in head for name in row))
    if names == [_IMAGE]:
        damage = "".join(f"; {problem.detail}" for problem in index.problems)
        raise ValueError(
            f"{index.path} holds pictures but no captions{damage}. If a table has them, name the table, and this file "
            "with --read.images"
        )

    def rows(columns: Columns) -> Iterator[tuple[str, Row]]:
        return _rows(index, samples, problems)

    return Table(str(index.path), label, names, head, rows, holding=(_IMAGE,), keyed=True)


def _samples(index: TarIndex) -> dict[str, Sample]:
    samples: dict[str, Sample] = {}
    for name in index.files:
        folder, slash, base = name.rpartition("/")
        stem, dot, suffix = base.partition(".")
        if stem and dot:
            samples.setdefault(folder + slash + stem, {})[suffix.lower()] = name
    return samples


def _rows(index: TarIndex, samples: dict[str, Sample], problems: list[Problem]) -> Iterator[tuple[str, Row]]:
    with index.path.open("rb") as file:
        for key, sample in samples.items():
            where = f"{index.path}:{key}"
            row: dict[str, Any] = {}
            if "json" in sample:
                try:
                    row = _object(_content(file, index, sample["json"]))
                except (ValueError, RecursionError) as error:
                    problems.append(Problem("unreadable row", where, f"{sample['json']}: {error}"))
                    continue
            pictures = [name for suffix, name in sample.items() if f".{suffix}" in IMAGE_SUFFIXES]
            for other in pictures[1:]:
                problems.append(Problem("repeated id", where, f"{other} is a second picture; {pictures[0]} is used"))
            if pictures:
                row[_IMAGE] = index.image(pictures[0])
            text = sample.get("txt") or sample.get("caption")
            if text:
                row[_TEXT] = one_caption(_content(file, index, text))
            if row:
                yield key, row


def _content(file: IO[bytes], index: TarIndex, name: str) -> bytes:
    offset, size = index.files[name]
    file.seek(offset)
    return file.read(size)


def _object(content: bytes) -> dict[str, Any]:
    row = json.loads(content.decode("utf-8-sig", "surrogateescape"))
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not an object")
    return row
