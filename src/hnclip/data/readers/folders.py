"""Images with captions in files of the same name: folders with .txt files, and WebDataset shards, read in place."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hnclip.core import ImageSource
from hnclip.data.image_sources import IMAGE_SUFFIXES, FileImage, is_image_name
from hnclip.data.readers.collect import SourceTable, streamed_table
from hnclip.data.readers.columns import Columns, Row
from hnclip.data.readers.locate import index_tar
from hnclip.data.readers.rows import decode_text
from hnclip.data.records import SPLITS, ReadLog, normal_split

# Columns of samples: their files, and the split of a folder. Shards have the keys of their .json as well.
_IMAGE, _TEXT, _SPLIT = "image file", ".txt", "split"

Samples = dict[str, list[tuple[str, str]]]
"""Files of the same name by that name: suffix in lower case, and path."""


def folder_table(root: Path, files: Sequence[str], log: ReadLog) -> SourceTable:
    """Images with a .txt of the same name; `files` are all files below the folder, relative to it.

    A .txt holds one caption; its lines are joined by spaces. Ids are paths without suffix, relative to the folder. If
    there are directories train, validation (val, dev), test at the top, they are splits, and images outside of them are
    a problem. Of two images that differ only in their suffix the first has the caption, the other is a repeated id.
    """
    samples = Samples()
    for file in (*filter(is_image_name, files), *(file for file in files if file.lower().endswith(".txt"))):
        stem, suffix = os.path.splitext(file)
        samples.setdefault(stem, []).append((suffix.lower(), file))
    columns, base = Columns((_TEXT,), _IMAGE), os.path.abspath(root)
    if any(_top_split(file) for file in files if is_image_name(file)):
        columns = replace(columns, split=_SPLIT)
        for stem in [stem for stem in samples if _top_split(stem) is None]:
            (suffix, file), *_ = samples.pop(stem)
            if suffix != ".txt":  # a text alone is no caption, such as README.txt
                log.problem("unreadable row", file, "is outside of the directories that are splits")
    read = _read_samples(samples, "", partial(FileImage, base=base), lambda file: (root / file).read_bytes(), log)
    rows = ((stem, {**row, _SPLIT: _top_split(stem)}) for stem, row in read)
    return SourceTable(str(root), "", lambda columns: rows, columns, keyed=True)


def count_captioned(files: Sequence[str]) -> tuple[int, int]:
    """The number of images, and of those with a .txt of the same name."""
    texts = {os.path.splitext(file)[0] for file in files if file.lower().endswith(".txt")}
    images = [os.path.splitext(file)[0] for file in files if is_image_name(file)]
    return len(images), sum(stem in texts for stem in images)


def _top_split(path: str) -> str | None:
    top, slash, _ = path.partition("/")
    split = normal_split(top)
    return split if slash and split in SPLITS else None


def shard_table(path: Path, label: str, log: ReadLog) -> SourceTable:
    """A WebDataset shard. A sample is an image with a caption in a .txt or .caption or, in shards without these, under
    a key of a .json, which may also hold the split and more. Ids are the samples' keys, with the shard's name where
    keys are not unique."""
    members, samples = index_tar(path, log), Samples()
    for name in members:
        folder, slash, base = name.rpartition("/")
        stem, dot, suffix = base.partition(".")  # at the first dot, as WebDataset divides names
        if stem and dot:
            samples.setdefault(folder + slash + stem, []).append((f".{suffix.lower()}", name))
    rows = _read_samples(samples, f"{path}:", members.__getitem__, lambda name: members[name].read(), log)
    table = streamed_table(str(path), label, rows)
    if list(table.names) == [_IMAGE]:
        raise ValueError(f"{path} holds no captions: name the table of them, and this file as --read.images")
    return replace(table, holding=(_IMAGE,), keyed=True, caption=_TEXT if _TEXT in table.names else None)


def _read_samples(
    samples: Samples,
    prefix: str,
    image: Callable[[str], ImageSource],
    content: Callable[[str], bytes],
    log: ReadLog,
) -> Iterator[tuple[str, Row]]:
    """A row for each sample. `prefix` stands before the names of files in problems."""
    for key, files in samples.items():
        row: dict[str, Any] = {}
        names = dict(reversed(files))  # the first of each suffix
        try:
            if file := names.get(".json"):
                row = json.loads(content(file).decode("utf-8-sig", "surrogateescape"))
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__}, not an object")
            if file := names.get(".txt") or names.get(".caption"):
                row[_TEXT] = _one_caption(content(file), f"{prefix}{file}", log)
        except (OSError, ValueError, RecursionError) as error:
            log.problem("unreadable row", f"{prefix}{file}", str(error))
            continue
        images = [name for suffix, name in files if suffix in IMAGE_SUFFIXES]
        for other in images[1:]:
            log.problem("repeated id", f"{prefix}{other}", f"another image of this name, {images[0]}, is used")
        if images:
            row[_IMAGE] = image(images[0])
        if row:
            yield key, row


def _one_caption(content: bytes, where: str, log: ReadLog) -> str:
    """The text of a caption file on one line. The first file that is not UTF-8 is reported."""
    text, encoding = decode_text(content)
    if encoding != "utf-8-sig" and all(warning.kind != "other encoding" for warning in log.warnings):
        log.warn("other encoding", where, f"it is not UTF-8 and was read as {encoding}, and so may others be")
    return " ".join(line.strip() for line in re.split(r"[\r\n]+", text) if line.strip())
