"""Image folders with .txt captions, and WebDataset shards, whose images are read in place."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from hnclip.config import ReadConfig
from hnclip.data.image_sources import IMAGE_SUFFIXES, FileImage, is_image_name
from hnclip.data.readers.collect import HEAD, RecordCollector, SourceTable, TableImages, add_table
from hnclip.data.readers.columns import Row
from hnclip.data.readers.locate import TarIndex, index_tar
from hnclip.data.readers.rows import decode_text
from hnclip.data.records import SPLITS, DataSet, ReadLog, normal_split

# Columns of a sample, with the keys of its .json.
_IMAGE, _TEXT = ".image", ".txt"


def read_folder(root: Path, files: Sequence[str]) -> DataSet:
    """Images with a .txt of the same name; `files` are all files below the folder, relative to it.

    A .txt holds one caption; its lines are joined by spaces. Ids are paths without suffix, relative to the folder. If
    there are directories train, validation (val, dev), test at the top, they are splits, and images outside of them are
    a problem. Of two images that differ only in their suffix the first has the caption, the other is a repeated id.
    """
    images: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for file in files:
        stem = os.path.splitext(file)[0]
        if is_image_name(file):
            images.setdefault(stem, []).append(file)
        elif file.lower().endswith(".txt"):
            texts[stem] = file
    has_splits = any(_top_split(stem) for stem in images)
    log = ReadLog()
    collector = RecordCollector(log, own_ids=True)
    base = os.path.abspath(root)
    other_encoding = []
    for stem, (image, *others) in images.items():
        split = _top_split(stem)
        if has_splits and split is None:
            log.problem("unreadable row", image, "is outside of the directories that are splits")
            continue
        for other in others:
            log.problem("repeated id", other, f"differs from {image} only in its suffix; {image} is used")
        if stem not in texts:
            log.problem("no caption", image, f"there is no {stem}.txt")
            continue
        try:
            caption, encoding = one_caption((root / texts[stem]).read_bytes())
        except OSError as error:
            log.problem("unreadable row", texts[stem], f"cannot be read: {error.strerror}")
            continue
        if encoding != "utf-8-sig":
            other_encoding.append(texts[stem])
        collector.add(texts[stem], FileImage(image, base), [caption], name=stem, split=split)
    for stem, file in texts.items():
        if stem not in images:
            log.problem("no image", file, "there is no image of the same name")
    _warn_of_encoding(log, root, other_encoding)
    return collector.finish(str(root), f"images in {root} with a .txt of the same name")


def count_captioned(files: Sequence[str]) -> tuple[int, int]:
    """The number of images, and of those with a .txt of the same name."""
    texts = {os.path.splitext(file)[0] for file in files if file.lower().endswith(".txt")}
    images = [os.path.splitext(file)[0] for file in files if is_image_name(file)]
    return len(images), sum(stem in texts for stem in images)


def one_caption(content: bytes) -> tuple[str, str]:
    """A caption file's text on one line, and its encoding. Bytes that are not text come as surrogate escapes."""
    text, encoding = decode_text(content)
    return " ".join(line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()), encoding


def _top_split(path: str) -> str | None:
    top, slash, _ = path.partition("/")
    split = normal_split(top)
    return split if slash and split in SPLITS else None


def _warn_of_encoding(log: ReadLog, where: Path, names: Sequence[str]) -> None:
    if names:
        detail = f"{len(names):,} caption files are not UTF-8 and were read as cp1252, first {names[0]}"
        log.warn("other encoding", str(where), detail)


def read_shards(files: Sequence[tuple[Path, str | None]], read: ReadConfig, base: Path) -> DataSet:
    """The records of WebDataset shards, each given with the split that it stands for, if any.

    A sample is an image with a caption in a .txt or .caption or, in shards without these, under a key of a .json,
    which may also hold the split and more. Ids are the samples' keys, with the shard's name where keys are not unique.
    """
    log = ReadLog()
    collector = RecordCollector(log, own_ids=read.id_column is not None)
    images = TableImages(replace(read, images=None), log)
    for path, split in files:
        index = index_tar(path)
        log.problems += index.problems
        table = _shard_table(index, path.relative_to(base).as_posix(), log)
        caption = _TEXT if _TEXT in table.names and read.caption_column is None else read.caption_column
        add_table(collector, table, split, replace(read, image_column=None, caption_column=caption), images)
    shards = ", ".join(str(path) for path, _ in files[:3])
    return collector.finish(shards, f"images with a .txt, .caption or .json of the same name in {shards}")


def _shard_table(index: TarIndex, label: str, log: ReadLog) -> SourceTable:
    samples = _samples(index)
    head = [row for _, row in islice(_rows(index, samples, ReadLog()), HEAD)]
    names = list(dict.fromkeys(name for row in head for name in row))
    if names == [_IMAGE]:
        damage = "".join(f"; {problem.detail}" for problem in index.problems)
        raise ValueError(
            f"{index.path} holds images but no captions{damage}. If a table has them, name the table, and this file "
            "with --read.images"
        )
    rows = _rows(index, samples, log)
    return SourceTable(str(index.path), label, names, head, lambda columns: rows, holding=(_IMAGE,), keyed=True)


def _samples(index: TarIndex) -> dict[str, dict[str, str]]:
    """The members of each sample by what follows the first dot of their base name, as WebDataset divides names."""
    samples: dict[str, dict[str, str]] = {}
    for name in index.files:
        folder, slash, base = name.rpartition("/")
        stem, dot, suffix = base.partition(".")
        if stem and dot:
            samples.setdefault(folder + slash + stem, {})[suffix.lower()] = name
    return samples


def _rows(index: TarIndex, samples: dict[str, dict[str, str]], log: ReadLog) -> Iterator[tuple[str, Row]]:
    other_encoding = []
    with index.path.open("rb") as file:
        for key, sample in samples.items():
            where = f"{index.path}:{key}"
            row: dict[str, Any] = {}
            if "json" in sample:
                try:
                    row = _object(_content(file, index, sample["json"]))
                except (ValueError, RecursionError) as error:
                    log.problem("unreadable row", where, f"{sample['json']}: {error}")
                    continue
            images = [name for suffix, name in sample.items() if f".{suffix}" in IMAGE_SUFFIXES]
            for other in images[1:]:
                log.problem("repeated id", where, f"{other} is a second image; {images[0]} is used")
            if images:
                row[_IMAGE] = index.image(images[0])
            text = sample.get("txt") or sample.get("caption")
            if text:
                row[_TEXT], encoding = one_caption(_content(file, index, text))
                if encoding != "utf-8-sig":
                    other_encoding.append(text)
            if row:
                yield key, row
    _warn_of_encoding(log, index.path, other_encoding)


def _content(file: IO[bytes], index: TarIndex, name: str) -> bytes:
    offset, size = index.files[name]
    file.seek(offset)
    return file.read(size)


def _object(content: bytes) -> dict[str, Any]:
    row = json.loads(content.decode("utf-8-sig", "surrogateescape"))
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not an object")
    return row
