"""`--data` into records: generated scenes, benchmarks, files, directories, patterns of files, and the hub."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from hnclip.config import ReadConfig
from hnclip.core import Problem, Record
from hnclip.data.records import SPLITS, DataSet, ReadLog, normal_split
from hnclip.data.scenes import FAMILIES, SMALL, scene_records, with_doubles
from hnclip.data.scenes.world import DOMAINS

if TYPE_CHECKING:
    from hnclip.data.benchmark_folder import Benchmark

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
MOST_FILES = 200_000  # of a pattern
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", re.ASCII)
_FOLDER_NAMES = {"data", "dataset", "datasets", "images", "photos", "runs", "models", "out", "output", "tmp"}


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
        return _open_scenes(source, FAMILIES if splits is None or "all" in splits else splits)
    from hnclip.data.benchmarks import BENCHMARKS, open_benchmark

    name, _, folder = source.partition("=")
    if name in BENCHMARKS:
        images = None if read.images is None else Path(os.path.expanduser(read.images))
        wanted = None if splits is None or "all" in splits else _benchmark_splits(BENCHMARKS[name], splits)
        data = open_benchmark(name, Path(os.path.expanduser(folder)) if folder else None, images, splits=wanted)
    else:
        data = replace(_open_other(source, read), name=source)
        if not read.splits:
            data = replace(data, records=tuple(replace(record, split=None) for record in data.records))
    for warning in data.warnings:
        _warn_once(warning)
    return data


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


def is_pattern(source: str) -> bool:
    return any(mark in source for mark in "*?[{")


def _open_scenes(source: str, splits: Collection[str]) -> DataSet:
    records = tuple(record for split in FAMILIES if split in splits for record in _scenes(source, split))
    return DataSet(source, records, absent={name: "it was not read" for name in FAMILIES if name not in splits})


def _scenes(source: str, split: str) -> list[Record]:
    """Small scenes and those with duplicates have fewer training and validation records, and the same test split."""
    size = source.rpartition("/")[2]
    families = SMALL.get(split) if size in ("small", "doubles") else None
    records = scene_records(SCENES[source], split, families=families)
    return with_doubles(records) if size == "doubles" and split == "train" else records


def _benchmark_splits(benchmark: Benchmark, splits: Collection[str]) -> set[str]:
    """Those of the splits that a benchmark has; a validation split that it lacks is held out of its training split."""
    wanted = {*splits, "train"} if "validation" in splits and "validation" not in benchmark.splits else {*splits}
    found = wanted & benchmark.splits.keys()
    if not found:
        why = "".join(f"; {benchmark.absent[name]}" for name in sorted(splits) if name in benchmark.absent)
        have = ", ".join(benchmark.splits)
        raise ValueError(f"{benchmark.name} has no split {', '.join(sorted(splits))}: it has {have}{why}")
    return found


def _open_other(source: str, read: ReadConfig) -> DataSet:
    """A path, a pattern, or a name on the hub."""
    path = Path(os.path.expanduser(source))
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:  # a name that is too long, or contains a null character
        raise ValueError(f"data {source[:200]!r} cannot be the path of a file: {error}") from error
    if source and exists:
        return _read_directory(path, read) if path.is_dir() else _read_files([path], read, path.parent)
    if is_pattern(source):
        files = _matching(str(path))
        return _read_files(files, read, Path(os.path.commonpath([os.path.abspath(file.parent) for file in files])))
    if source.startswith("scenes/"):
        raise ValueError(f"domain must be one of {', '.join(DOMAINS)}, not {source.partition('/')[2]!r}")
    hub_name = source.removeprefix("hf://")
    not_hub = "" if hub_name != source or is_data_name(source) else _why_not_hub(source)
    if _HUB_NAME.fullmatch(hub_name) and not is_data_name(source) and not not_hub:
        from hnclip.data.readers.arrow import read_hub

        return read_hub(hub_name, read)
    from hnclip.data.benchmarks import BENCHMARKS

    missing = ", and there is no such file or directory" if path.name != source or is_data_name(source) else ""
    close = get_close_matches(source.partition("=")[0], [*SCENES, *BENCHMARKS], 1)
    meant = f" Did you mean {close[0]}?" if close else ""
    raise ValueError(
        f"data {source!r} is not known{missing}{not_hub}.{meant} Data are one of: generated scenes "
        f"({', '.join(SCENES)}); a benchmark as NAME or NAME=FOLDER ({', '.join(BENCHMARKS)}); a folder of images with "
        ".txt captions; a table (.csv, .tsv, .jsonl, .json, .parquet) or a folder with one; WebDataset shards (.tar, a "
        "folder or a pattern of them); a Hugging Face data set, saved to disk or as owner/name"
    )


def _why_not_hub(source: str) -> str:
    """Why a name that a hub data set could have is taken for a mistyped path; "" if it is not."""
    owner, slash, _ = source.partition("/")
    if not slash or _HUB_NAME.fullmatch(source) is None:
        return ""
    folders = [entry.name for entry in os.scandir() if entry.is_dir()]
    similar = [owner] if owner in folders else get_close_matches(owner, folders, 1, cutoff=0.75)
    like_path = "it reads like a path" if owner in _FOLDER_NAMES else ""
    why = f"there is a directory {similar[0]!r}" if similar else like_path
    return why and f"; it was not looked for on the hub, because {why} (the hub is hf://{source})"


def _matching(pattern: str) -> list[Path]:
    """All files of a pattern: `*`, `?`, `**` as in a shell, `{000..010}` and `{a,b}`."""
    names = list(islice(_expand(pattern), MOST_FILES + 1))
    if len(names) > MOST_FILES:
        raise ValueError(f"the braces of {pattern} mean more than {MOST_FILES:,} files")
    files: list[Path] = []
    for name in names:
        if glob.has_magic(name):
            files += map(Path, sorted(glob.glob(name, recursive=True)))
        elif os.path.isfile(name):
            files.append(Path(name))
        else:
            raise ValueError(f"there is no file {name}, which the pattern {pattern} means")
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


def _read_files(files: Sequence[Path], read: ReadConfig, base: Path) -> DataSet:
    """Tables, or shards. Several files are splits if all their names say so, and so is one that is numbered as a part
    of a split. Ids are relative to `base`."""
    for file in files:
        with _readable(file).open("rb") as handle:
            if handle.read(40).startswith(b"version https://git-lfs"):
                raise ValueError(f"{file} is a pointer of Git LFS, not the data themselves: run `git lfs pull`")
    base = Path(os.path.abspath(base))
    names = [Path(os.path.abspath(file)).relative_to(base).as_posix() for file in files]
    has_splits = len(names) > 1 or _PART.search(names[0])
    splits = splits_of_paths(names) if has_splits else [None]
    if all(_TAR.search(name) for name in names):
        from hnclip.data.readers.folders import read_shards

        return read_shards([(base / name, split) for name, split in zip(names, splits)], read, base)
    if not all(_is_table(name) for name in names):
        raise ValueError(
            f"{_listed(names)} cannot be read: data are files that end in {', '.join(TABLE_SUFFIXES)} or .tar, one of "
            "these at a time; unpack other archives into a directory"
        )
    from hnclip.data.readers.collect import RecordCollector, TableImages, add_table, text_table

    read_log = ReadLog()
    collector = RecordCollector(read_log, own_ids=read.id_column is not None)
    images = TableImages(read, read_log)
    for file, name, split in zip(files, names, splits):
        if name.lower().endswith(".parquet"):
            from hnclip.data.readers.arrow import parquet_table as open_table
        else:
            open_table = text_table
        images.enter(file.parent, os.path.dirname(name))
        add_table(collector, open_table(file, name, read_log), split, read, images)
    images.warn(read_log)
    return collector.finish(
        _listed(names), f"rows with an image and a caption in {', '.join(str(file) for file in files[:3])}"
    )


def _readable(file: Path) -> Path:
    if not file.is_file():
        raise ValueError(f"{file} is not a file")
    if not os.access(file, os.R_OK):
        raise ValueError(f"{file} cannot be read: permission denied")
    return file


def _read_directory(root: Path, read: ReadConfig) -> DataSet:
    """In this order: what `save_to_disk` wrote; Hugging Face's image folder (metadata.csv and images); images of which
    most have a .txt; shards; Parquet files at any depth; other tables at the top; images of which any has a .txt."""
    from hnclip.data.readers.arrow import is_saved, read_saved
    from hnclip.data.readers.folders import count_captioned, read_folder
    from hnclip.data.readers.locate import files_below

    if is_saved(root):
        return read_saved(root, read)
    files = list(files_below(root))
    metadata = [file for file in files if _METADATA.search(file)]
    shards = [file for file in files if _TAR.search(file)]
    parquet = [file for file in files if file.lower().endswith(".parquet")]
    tables = [file for file in files if "/" not in file and _is_table(file) and not file.lower().endswith(".parquet")]
    images, captioned = count_captioned(files)
    if metadata:
        chosen = metadata
    elif captioned > images / 2 or not (shards or parquet or tables):
        data = read_folder(root, files)
        if tables:
            unread = Problem("unread table", str(root), f"{_listed(tables)} not read: most images have a .txt file")
            data = replace(data, warnings=(*data.warnings, unread))
        return data
    elif shards:
        if tables:
            raise ValueError(
                f"{root} holds tables ({_listed(tables)}) and tar files ({_listed(shards)}): name the table, and the "
                "tar file with --read.images; or, if these are WebDataset shards, name them by a pattern such as "
                "'folder/*.tar'"
            )
        chosen = shards
    elif parquet and not tables:
        folders = {_without_split(os.path.dirname(file)) for file in parquet}
        if len(folders) > 1:
            raise ValueError(
                f"{root} holds several data sets, in {_listed(sorted(folders))}: name the directory of one"
            )
        chosen = parquet
    elif len(tables) + len(parquet) == 1 or (tables and not parquet and None not in splits_of_paths(tables)):
        chosen = tables
    else:
        raise ValueError(
            f"{root} holds several tables: {_listed(tables + parquet)}; name one of them, or several by a pattern such "
            "as 'folder/part-*.csv'"
        )
    return _read_files([root / file for file in chosen], read, root)


def splits_of_paths(paths: Sequence[str]) -> list[str | None]:
    """The split of each path if every one names one split: `data/train-00000-of-00002.parquet`, `coco_val.csv`. A word
    that only some paths have means something else."""
    found = [{normal_split(word) for word in re.split(r"[/._-]+", path)} & set(SPLITS) for path in paths]
    return [splits.pop() for splits in found] if all(len(splits) == 1 for splits in found) else [None] * len(paths)


def _is_table(name: str) -> bool:
    return name.lower().endswith(TABLE_SUFFIXES) and not _NO_TABLE.fullmatch(os.path.basename(name))


def _without_split(folder: str) -> str:
    return "/".join(part for part in folder.split("/") if normal_split(part) not in SPLITS)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
