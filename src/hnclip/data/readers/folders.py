"""Image folders with .txt captions, and WebDataset shards, whose images are read in place."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from hnclip.config import ReadConfig
from hnclip.core import Record
from hnclip.data.image_sources import IMAGE_SUFFIXES, FileImage, is_image_name
from hnclip.data.readers.collect import HEAD, RecordCollector, SourceTable
from hnclip.data.readers.columns import Row
from hnclip.data.readers.locate import TarIndex, index_tar
from hnclip.data.readers.rows import decode_text
from hnclip.data.records import SPLITS, DataSet, ReadLog, normal_split

_IMAGE, _TEXT = ".image", ".txt"  # columns of a sample, with the keys of its .json


def read_folder(root: Path, files: Sequence[str]) -> DataSet:
    """Images with a .txt of the same name; `files` are all files below the folder, relative to it.

    A .txt holds one caption; its lines are joined by spaces. Ids are paths without suffix, relative to the folder. If
    there are directories train, validation (val, dev), test at the top, they are splits, and images outside of them are
    a problem. Of two images that differ only in their suffix the first has the caption, the other is a repeated id.
    """
    images: dict[str, list[str]] = {}
    for file in filter(is_image_name, files):
        images.setdefault(os.path.splitext(file)[0], []).append(file)
    texts = {os.path.splitext(file)[0]: file for file in files if file.lower().endswith(".txt")}
    has_splits = any(map(_top_split, images))
    collector = RecordCollector(ReadConfig())
    log, base = collector.log, os.path.abspath(root)
    for stem, (image, *more) in images.items():
        split = _top_split(stem)
        if has_splits and split is None:
            log.problem("unreadable row", image, "is outside of the directories that are splits")
            continue
        for other in more:
            log.problem("repeated id", other, f"differs from {image} only in its suffix; {image} is used")
        if stem not in texts:
            log.problem("no caption", image, f"there is no {stem}.txt")
            continue
        try:
            caption = _one_caption((root / texts[stem]).read_bytes(), texts[stem], log)
        except OSError as error:
            log.problem("unreadable row", texts[stem], f"cannot be read: {error.strerror}")
            continue
        collector.add(texts[stem], Record(stem, FileImage(image, base), (caption,), split), stem)
    for file in (file for stem, file in texts.items() if stem not in images):
        log.problem("no image", file, "there is no image of the same name")
    return collector.finish(str(root))


def count_captioned(files: Sequence[str]) -> tuple[int, int]:
    """The number of images, and of those with a .txt of the same name."""
    texts = {os.path.splitext(file)[0] for file in files if file.lower().endswith(".txt")}
    images = [os.path.splitext(file)[0] for file in files if is_image_name(file)]
    return len(images), sum(stem in texts for stem in images)


def _top_split(path: str) -> str | None:
    top, slash, _ = path.partition("/")
    split = normal_split(top)
    return split if slash and split in SPLITS else None


def _one_caption(content: bytes, where: str, log: ReadLog) -> str:
    """The text of a caption file on one line. The first file that is not UTF-8 is reported."""
    text, encoding = decode_text(content)
    if encoding != "utf-8-sig" and all(warning.kind != "other encoding" for warning in log.warnings):
        log.warn("other encoding", where, f"it is not UTF-8 and was read as {encoding}, and so may others be")
    return " ".join(line.strip() for line in re.split(r"[\r\n]+", text) if line.strip())


def read_shards(shards: Sequence[tuple[Path, str | None]], read: ReadConfig, base: Path) -> DataSet:
    """The records of WebDataset shards, each given with the split that it stands for, if any.

    A sample is an image with a caption in a .txt or .caption or, in shards without these, under a key of a .json,
    which may also hold the split and more. Ids are the samples' keys, with the shard's name where keys are not unique.
    """
    collector = RecordCollector(replace(read, images=None, image_column=None))
    for path, split in shards:
        table = _shard_table(index_tar(path, collector.log), path.relative_to(base).as_posix(), collector.log)
        if list(table.names) == [_IMAGE]:
            raise ValueError(f"{path} holds no captions: name the table of them, and this file as --read.images")
        collector.add_table(table, split, _TEXT if _TEXT in table.names else None)
    return collector.finish(", ".join(str(path) for path, _ in shards[:3]))


def _shard_table(index: TarIndex, label: str, log: ReadLog) -> SourceTable:
    """A row for each sample: files with the same name before the first dot, as WebDataset divides names."""
    samples: dict[str, dict[str, str]] = {}
    for name in index.files:
        folder, slash, base = name.rpartition("/")
        stem, dot, suffix = base.partition(".")
        if stem and dot:
            samples.setdefault(folder + slash + stem, {})[suffix.lower()] = name
    head = [row for _, row in islice(_rows(index, samples, ReadLog()), HEAD)]
    names = list(dict.fromkeys(name for row in head for name in row))
    rows = _rows(index, samples, log)
    return SourceTable(str(index.path), label, names, head, lambda columns: rows, holding=(_IMAGE,), keyed=True)


def _rows(index: TarIndex, samples: dict[str, dict[str, str]], log: ReadLog) -> Iterator[tuple[str, Row]]:
    with index.path.open("rb") as file:

        def content(name: str) -> bytes:
            offset, size = index.files[name]
            file.seek(offset)
            return file.read(size)

        for key, sample in samples.items():
            row: Any = {}
            if "json" in sample:
                try:
                    row = json.loads(content(sample["json"]).decode("utf-8-sig", "surrogateescape"))
                    if not isinstance(row, dict):
                        raise ValueError(f"a {type(row).__name__}, not an object")
                except (ValueError, RecursionError) as error:
                    log.problem("unreadable row", f"{index.path}:{key}", f"{sample['json']}: {error}")
                    continue
            images = [name for suffix, name in sample.items() if f".{suffix}" in IMAGE_SUFFIXES]
            for other in images[1:]:
                log.problem("repeated id", f"{index.path}:{key}", f"{other} is a second image; {images[0]} is used")
            if images:
                row[_IMAGE] = index.image(images[0])
            if text := sample.get("txt") or sample.get("caption"):
                row[_TEXT] = _one_caption(content(text), f"{index.path}:{key}", log)
            if row:
                yield key, row
