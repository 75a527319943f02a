"""`--data` into records: generated scenes, benchmarks, files, directories, patterns of files, and the hub."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

from hnclip.config import ReadConfig
from hnclip.core import Problem, Record
from hnclip.data.benchmarks import BENCHMARKS, open_benchmark
from hnclip.data.readers.arrow import is_saved, parquet_table, read_hub, read_saved
from hnclip.data.readers.collect import RecordCollector, SourceTable, streamed_table
from hnclip.data.readers.columns import listed
from hnclip.data.readers.folders import count_captioned, folder_table, shard_table
from hnclip.data.readers.locate import files_below
from hnclip.data.readers.rows import read_rows
from hnclip.data.records import SPLITS, DataSet, ReadLog, normal_split
from hnclip.data.scenes import FAMILIES, SMALL, scene_records, with_doubles
from hnclip.data.scenes.world import DOMAINS

log = logging.getLogger(__name__)

_DEFAULT = ReadConfig()
SCENES = {
    "scenes": "park",
    **{f"scenes/{style}": style for style in DOMAINS},
    **{f"scenes/{style}/{size}": style for style in DOMAINS for size in ("small", "doubles")},
}

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".jsonlines", ".ndjson", ".json", ".parquet")
_TAR = re.compile(r"\.(tar|tgz|tbz2?|txz|tar\.\w+)$", re.IGNORECASE)
_NO_TABLE = re.compile(r"dataset_infos?\.json|.*_stats\.json")  # files that Hugging Face and img2dataset add to data
_METADATA = re.compile(r"(^|/)metadata\.(csv|jsonl|parquet)$")
_PART = re.compile(r"-\d+-of-\d+")  # Hugging Face's numbers of the parts of a split
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
_MOST_FILES = 200_000  # of a pattern
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", re.ASCII)


def open_data(source: str, read: ReadConfig = _DEFAULT, *, splits: Collection[str] | None = None) -> DataSet:
    """The records of a source, all splits of it. Its warnings are logged.

    Args:
        source: in the order in which they are recognised: `scenes`, `scenes/park`, `scenes/shelf`, and of either
            style `scenes/park/small` and `scenes/park/doubles`; the name of a benchmark, alone or as NAME=FOLDER; a
            file, a directory, or a pattern of files; a Hugging Face data set as `owner/name` or `owner/name:config`,
            or `hf://owner/name` where that could be a path.
        read: how to read it, where the source does not say.
        splits: of a benchmark or of scenes read only these, so that no other split's files are needed.

    Raises:
        ValueError: the source is not known, cannot be read, or holds no record.
    """
    if source in SCENES:
        if Path(source).is_dir():
            detail = f"these are the generated scenes; for the folder of this name write ./{source}"
            _warn_once(Problem("ambiguous name", source, detail))
        return _open_scenes(source, FAMILIES if splits is None or "all" in splits else splits)
    name, _, folder = source.partition("=")
    try:
        if name in BENCHMARKS:
            images = None if read.images is None else Path(read.images)
            wanted = None if splits and "all" in splits else splits
            data = open_benchmark(name, Path(folder).expanduser() if folder else None, images, splits=wanted)
        else:
            data = replace(_open_other(source, read), name=source)
            if not read.splits:
                data = replace(data, records=tuple(replace(record, split=None) for record in data.records))
    except (OSError, RuntimeError, UnicodeError) as error:  # no permission, or a name that no file can have
        raise ValueError(f"data {source[:200]!r} cannot be read: {str(error)[:500]}") from error
    for warning in data.warnings:
        _warn_once(warning)
    return data


def is_own_data(source: str) -> bool:
    """Whether a source is not, and is not meant to be, generated scenes."""
    return source not in SCENES and (Path(source).exists() or not source.startswith("scenes/"))


def local_path(source: str) -> Path | None:
    """The absolute path of a file or directory, or None if the name means generated scenes or a benchmark, or nothing
    exists there."""
    if source in SCENES or source.partition("=")[0] in BENCHMARKS:
        return None
    path = Path(os.path.abspath(Path(source).expanduser()))
    return path if path.exists() else None


def open_records(source: str, split: str, read: ReadConfig = _DEFAULT) -> list[Record]:
    """The records of one split; "all" is every record."""
    return list(open_data(source, read, splits={split}).part(split, validation_share=read.validation_share))


@cache
def _warn_once(warning: Problem) -> None:
    """A study or a run opens the same data several times."""
    log.warning("%s: %s: %s", warning.kind, warning.where, warning.detail)


def is_data_name(name: str) -> bool:
    """Whether a file of that name is a table or a tar file."""
    return _is_table(name) or _TAR.search(name) is not None


def _is_table(name: str) -> bool:
    return name.lower().endswith(TABLE_SUFFIXES) and not _NO_TABLE.fullmatch(os.path.basename(name))


def _open_scenes(source: str, splits: Collection[str]) -> DataSet:
    records = tuple(record for split in FAMILIES if split in splits for record in _scenes(source, split))
    return DataSet(source, records, absent={name: "it was not read" for name in FAMILIES if name not in splits})


def _scenes(source: str, split: str) -> list[Record]:
    """Small scenes and those with duplicates have fewer training and validation records, and the same test split."""
    size = source.rpartition("/")[2]
    families = SMALL.get(split) if size in ("small", "doubles") else None
    records = scene_records(SCENES[source], split, families=families)
    return with_doubles(records) if size == "doubles" and split == "train" else records


def _open_other(source: str, read: ReadConfig) -> DataSet:
    """A path, a pattern, or a name on the hub."""
    path = Path(source).expanduser()
    if source and path.exists():
        return _read_directory(path, read) if path.is_dir() else _read_files([path], RecordCollector(read), path.parent)
    if any(mark in source for mark in "*?[{"):
        files = _matching(str(path))
        base = Path(os.path.commonpath([os.path.abspath(file.parent) for file in files]))
        return _read_files(files, RecordCollector(read), base)
    if source.startswith("scenes/"):
        raise ValueError(f"domain must be one of {', '.join(DOMAINS)}, not {source.partition('/')[2]!r}")
    hub_name = source.removeprefix("hf://")
    like_path = is_data_name(source) or os.path.isdir(source.partition("/")[0])  # and mistyped
    if _HUB_NAME.fullmatch(hub_name) and (hub_name != source or not like_path):
        return read_hub(hub_name, read)
    raise ValueError(
        f"data {source[:200]!r} is not known, and there is no such file or directory. Data (hnclip docs data) are one "
        f"of {', '.join(SCENES)}; a benchmark as NAME or NAME=FOLDER ({', '.join(BENCHMARKS)}); a folder of images "
        f"with .txt captions; a table ({', '.join(TABLE_SUFFIXES)}); WebDataset shards; a Hugging Face data set"
    )


def _matching(pattern: str) -> list[Path]:
    """All files of a pattern: `*`, `?`, `**` as in a shell, `{000..010}` and `{a,b}`."""
    names = list(islice(_expand(pattern), _MOST_FILES + 1))
    if len(names) > _MOST_FILES:
        raise ValueError(f"the braces of {pattern} mean more than {_MOST_FILES:,} files")
    found = [sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else [name] for name in names]
    files = [Path(file) for files in found for file in files]
    if not files:
        raise ValueError(f"there is no file of the pattern {pattern}")
    return files


def _expand(pattern: str) -> Iterator[str]:
    """The pattern without braces: `{000..010}` counts, with leading zeros, `{a,b}` lists."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    span = _RANGE.fullmatch(match[1])
    parts: Iterator[str] = iter(match[1].split(","))
    if span is not None:
        parts = (str(number).zfill(len(span[1])) for number in range(int(span[1]), int(span[2]) + 1))
    for part in parts:
        yield from _expand(pattern[: match.start()] + part + pattern[match.end() :])


def _read_files(files: Sequence[Path], collector: RecordCollector, base: Path) -> DataSet:
    """Tables and shards. Several files are splits if all their names say so, and so is one that is numbered as a part
    of a split. Ids are relative to `base`."""
    for file in files:
        if not file.is_file():  # opening a pipe would block
            raise ValueError(f"there is no file {file}")
    base = Path(os.path.abspath(base))
    names = [Path(os.path.abspath(file)).relative_to(base).as_posix() for file in files]
    splits = splits_of_paths(names) if len(names) > 1 or _PART.search(names[0]) else [None]
    if other := [name for name in names if not is_data_name(name)]:
        raise ValueError(
            f"{listed(other)} cannot be read: data are files that end in {', '.join(TABLE_SUFFIXES)} or .tar; unpack "
            "other archives into a directory"
        )
    for file, name, split in zip(files, names, splits):
        collector.images.enter(file.parent, os.path.dirname(name))
        collector.add_table(_open_table(file, name, collector.log), split)
    return collector.finish(listed([str(file) for file in files]))


def _open_table(file: Path, label: str, log: ReadLog) -> SourceTable:
    if _TAR.search(label):
        return shard_table(Path(os.path.abspath(file)), label, log)
    if label.lower().endswith(".parquet"):
        return parquet_table(file, label)
    return streamed_table(str(file), label, read_rows(file, log))


def _read_directory(root: Path, read: ReadConfig) -> DataSet:
    """In this order: what `save_to_disk` wrote; Hugging Face's image folder (metadata.csv and images); images of which
    most have a .txt; shards; Parquet files at any depth; other tables at the top; images of which any has a .txt."""
    if is_saved(root):
        return read_saved(root, read)
    collector, errors = RecordCollector(read), list[OSError]()
    files = list(files_below(root, errors.append))
    for error in errors:
        name = os.path.relpath(error.filename, root)
        collector.log.problem("missing image", name, f"{name} cannot be listed: {error.strerror}")
    chosen = [file for file in files if _METADATA.search(file)]
    shards = [file for file in files if _TAR.search(file)]
    parquet = [file for file in files if file.lower().endswith(".parquet")]
    tables = [file for file in files if "/" not in file and _is_table(file) and not file.lower().endswith(".parquet")]
    images, captioned = count_captioned(files)
    if not chosen and (captioned > images / 2 or not (shards or parquet or tables)):
        if tables:
            detail = f"{listed(tables)} not read: most images have a .txt file"
            collector.log.warn("unread table", str(root), detail)
        collector.add_table(folder_table(root, files, collector.log), None)
        return collector.finish(str(root))
    # Parquet files of one data set are in one directory, or in one for each split.
    folders = {tuple(part for part in file.split("/")[:-1] if normal_split(part) not in SPLITS) for file in parquet}
    if chosen or (shards and tables):
        pass
    elif shards:
        chosen = shards
    elif not tables and len(folders) == 1:
        chosen = parquet
    elif not parquet and (len(tables) == 1 or None not in splits_of_paths(tables)):
        chosen = tables
    if not chosen:
        raise ValueError(
            f"{root} holds several tables or tar files: {listed(tables + parquet + shards)}. Name one, several by a "
            "pattern such as 'folder/part-*.csv', or a table with the tar file of its images as --read.images"
        )
    return _read_files([root / file for file in chosen], collector, root)


def splits_of_paths(paths: Sequence[str]) -> list[str | None]:
    """The split of each path if every one names one split: `data/train-00000-of-00002.parquet`, `coco_val.csv`. A word
    that only some paths have means something else."""
    found = [{normal_split(word) for word in re.split(r"[/._-]+", path)} & set(SPLITS) for path in paths]
    return [splits.pop() for splits in found] if all(len(splits) == 1 for splits in found) else [None] * len(paths)
